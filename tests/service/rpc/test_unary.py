"""Generate, the answer as one message: what holds for the stream holds for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import ModelError
from draftwood_service.rpc.answers import padding_of_whole
from draftwood_tenants.config import DeltaShaping
from tests.service.fakes import FakeModel, Served, answer, serving, until
from tests.service.rpc.test_endings import ask, reason

NO_DRAFTS = pb.DraftOptions(enabled=False)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """The status of a call that fails."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value


async def test_it_is_what_the_stream_sends() -> None:
    sampling = pb.SamplingOptions(n=3, temperature=1.0, seed=5)
    request = ask(max_tokens=9, sampling=sampling, request_id="mine", tenant="acme")
    async with serving() as served:
        streamed = await answer(served.stub.GenerateStream(request))
        whole = await served.stub.Generate(request)
    assert whole.started == streamed.events[0].started
    assert [one.result for one in whole.answers] == [*streamed.finished.samples]
    assert whole.usage == streamed.finished.usage
    for sample, one in enumerate(whole.answers):
        deltas = [event.delta for event in streamed.events if event.delta.sample == sample]
        assert [part.text for part in one.parts] == ["abcdefghi"]
        assert [*one.token_ids] == [token for delta in deltas for token in delta.token_ids]
    assert (whole.drafting.steps, whole.drafting.accepted_tokens) == (
        streamed.finished.drafting.steps,
        streamed.finished.drafting.accepted_tokens,
    )
    assert whole.timings.decode.ToNanoseconds() > 0


async def test_a_client_that_is_gone_frees_its_slots() -> None:
    async with serving() as served:
        served.engine.gate.clear()
        call = served.stub.Generate(ask(max_tokens=100))
        await until(lambda: served.engine.running == 1 or served.engine.in_step)
        call.cancel()
        served.engine.gate.set()
        await served.assert_idle()


@pytest.mark.parametrize("own_deadline", [0.2, None])
async def test_deadlines(own_deadline: float | None) -> None:
    async with serving(default_timeout=0.3) as served:
        served.engine.gate.clear()
        error = await refusal(served.stub.Generate(ask(), timeout=own_deadline))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        served.engine.gate.set()


async def test_errors_of_the_model_and_of_the_message() -> None:
    async with serving() as served:
        served.engine.sequence_error = ModelError("broken")
        assert reason(await refusal(served.stub.Generate(ask()))) == "MODEL_FAILED"
        bad = await refusal(served.stub.Generate(ask(max_tokens=0)))
        assert (bad.code(), "stop.max_tokens" in str(bad.details())) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        unknown = await refusal(served.stub.Generate(ask(model="other")))
        assert unknown.code() is grpc.StatusCode.NOT_FOUND


async def test_shutdown() -> None:
    async with serving() as served:
        call = asyncio.ensure_future(refusal(served.stub.Generate(ask())))
        await until(lambda: served.engine.running == 1)
        await served.server.stop(grace=0.05)
        assert reason(await call) == "SHUTTING_DOWN"


async def test_quotas() -> None:
    async with serving(tokens_per_minute=60) as served:
        assert (await served.stub.Generate(ask(max_tokens=40))).usage.completion_tokens == 40
        assert reason(await refusal(served.stub.Generate(ask(max_tokens=40)))) == "QUOTA_EXCEEDED"


async def refused_field(served: Served, request: pb.GenerateRequest) -> str:
    error = await refusal(served.stub.Generate(request))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(error.details())


async def test_details_that_could_be_too_large_are_refused_before_any_work() -> None:
    """Of a request without them nothing is refused, nor of a stream."""
    async with serving(model=FakeModel(max_context=200_000)) as served:
        details = pb.OutputOptions(top_logprobs=20)
        steps = served.engine.steps
        text = await refused_field(served, ask(max_tokens=5000, output=details))
        assert text.startswith("stop.max_tokens: 5000 is not allowed; with these details in one message")
        assert "it must be at most 4064; call GenerateStream" in text
        samples = pb.SamplingOptions(n=2, temperature=1.0)
        assert "at most 2032" in await refused_field(served, ask(max_tokens=3000, output=details, sampling=samples))
        unset = pb.GenerateRequest(text="x", output=pb.OutputOptions(token_details=True))
        assert "199999 is not allowed" in (text := await refused_field(served, unset))
        assert "at most 58254" in text
        assert served.engine.steps == steps
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


@pytest.mark.parametrize(("padding", "cadence", "size", "expected"), [(0, 0, 500, 0), (64, 0, 500, 64), (0, 1, 500, 0)])
def test_padding_of_whole_answers(padding: int, cadence: float, size: int, expected: int) -> None:
    assert padding_of_whole(DeltaShaping(cadence, padding), [], size) == expected
    assert padding_of_whole(DeltaShaping(1.0, 64), [], 500) == 512


async def test_an_error_ends_it_before_its_time() -> None:
    async with serving(delta_cadence=5.0) as served:
        call = asyncio.ensure_future(refusal(served.stub.Generate(ask(max_tokens=6), timeout=0.5)))
        began = time.perf_counter()
        assert (await call).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.perf_counter() - began < 4
