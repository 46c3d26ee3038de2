"""Generate, the answer as one message: what holds for the stream holds for it."""

from __future__ import annotations

import time

import grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import ModelError
from tests.service.fakes import FakeModel, Served, refusal, serving, until
from tests.service.rpc.test_bad_input import violation
from tests.service.rpc.test_endings import ask, reason

NO_DRAFTS = pb.DraftOptions(enabled=False)


async def test_it_is_what_the_stream_sends(served: Served) -> None:
    sampling = pb.SamplingOptions(n=3, temperature=1.0, seed=5)
    request = ask(max_tokens=9, sampling=sampling, request_id="mine", tenant="acme")
    streamed = await served.answer(request)
    whole = await served.stub.Generate(request)
    assert whole.started == streamed.events[0].started
    assert [one.result for one in whole.answers] == [*streamed.finished.samples]
    assert whole.usage == streamed.finished.usage
    for sample, one in enumerate(whole.answers):
        deltas = [event.delta for event in streamed.events if event.delta.sample == sample]
        assert [part.text for part in one.parts] == ["abcdefghi"]
        assert [*one.token_ids] == [token for delta in deltas for token in delta.token_ids]
    drafting = streamed.finished.drafting
    assert (whole.drafting.steps, whole.drafting.accepted_tokens) == (drafting.steps, drafting.accepted_tokens)
    assert whole.timings.decode.ToNanoseconds() > 0


async def test_a_client_that_is_gone_frees_its_slots(served: Served) -> None:
    served.engine.gate.clear()
    call = served.stub.Generate(ask(max_tokens=100))
    await until(lambda: served.engine.running == 1 or served.engine.in_step)
    call.cancel()
    served.engine.gate.set()
    await served.assert_idle()


async def test_the_deadline_of_the_server() -> None:
    async with serving(default_timeout=0.3) as served:
        served.engine.gate.clear()
        assert reason(await refusal(served.stub.Generate(ask()))) == "DEADLINE_EXCEEDED"


async def test_errors_of_the_model_and_of_the_message(served: Served) -> None:
    served.engine.sequence_error = ModelError("broken")
    assert reason(await refusal(served.stub.Generate(ask()))) == "MODEL_FAILED"
    assert violation(await refusal(served.stub.Generate(ask(max_tokens=0)))).field == "stop.max_tokens"
    unknown = await refusal(served.stub.Generate(ask(model="other")))
    assert (unknown.code(), reason(unknown)) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_details_that_could_be_too_large_are_refused_before_any_work() -> None:
    """Of a request without them nothing is refused, nor of a stream."""
    async with serving(model=FakeModel(max_context=200_000)) as served:
        details = pb.OutputOptions(top_logprobs=20)
        samples = pb.SamplingOptions(n=2, temperature=1.0)
        unset = pb.GenerateRequest(text="x", output=pb.OutputOptions(token_details=True))
        for request, tokens, most in (
            (ask(max_tokens=5000, output=details), 5000, 4064),
            (ask(max_tokens=3000, output=details, sampling=samples), 3000, 2032),
            (unset, 199_999, 58_254),
        ):
            found = violation(await refusal(served.stub.Generate(request)))
            assert found.description.startswith(f"stop.max_tokens: {tokens} is not allowed; with these details in one")
            assert f"it must be at most {most}; call GenerateStream" in found.description
        assert served.engine.steps == 0
        allowed = await served.stub.Generate(ask(max_tokens=30, output=details))
        assert len(allowed.answers[0].details) == 30


async def test_padding_fills_it_up() -> None:
    async with serving(delta_padding=1024) as served:
        assert (await served.stub.Generate(ask(max_tokens=4))).ByteSize() == 1024
        assert (await served.stub.Generate(ask(max_tokens=600))).ByteSize() % 1024 == 0


async def test_at_a_cadence_neither_its_size_nor_its_time_tell_what_is_written() -> None:
    period = 0.05 * 4
    sizes = set()
    async with serving(delta_cadence=0.05, delta_padding=256, delta_rounding=4) as served:
        await served.stub.Generate(ask(max_tokens=2, drafting=NO_DRAFTS))
        for text in ("a", "äöü and more"):
            served.engine.text = text
            began = time.perf_counter()
            sizes.add((await served.stub.Generate(ask(max_tokens=100, drafting=NO_DRAFTS))).ByteSize())
            assert time.perf_counter() - began > period
    assert len(sizes) == 1 or max(sizes) == 2 * min(sizes)
    assert all(size % 256 == 0 and size.bit_count() == 1 for size in sizes)


async def test_an_error_ends_it_before_its_time() -> None:
    async with serving(delta_cadence=5.0) as served:
        began = time.perf_counter()
        error = await refusal(served.stub.Generate(ask(max_tokens=6), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.perf_counter() - began < 4
