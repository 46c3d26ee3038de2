"""Every way in which an answer ends: one Finished or one status, and nothing is held afterwards.

For a stream and, at the end of the file, for Generate, whose answer is one message.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_model_runner.errors import ModelError
from draftwood_service.errors import QueueFullError
from draftwood_service.rpc.statuses import ERROR_DOMAIN, to_status
from tests.service.fakes import Answer, FakeEngine, FakeModel, Served, answer, refusal, serving, until
from tests.service.rpc.test_bad_input import violation


def ask(text: str = "hello", max_tokens: int = 3000, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, stop=pb.StopOptions(max_tokens=max_tokens), **fields)


def reason(error: grpc.aio.AioRpcError) -> str:
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == ERROR_DOMAIN
    assert info.metadata["request_id"]
    return str(info.reason)


async def started(
    served: Served, count: int = 1
) -> list[grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]]:
    """Calls that are being answered for 15 s, their first two events read."""
    served.engine.step_seconds = 0.01
    calls = [served.stub.GenerateStream(ask()) for _ in range(count)]
    for call in calls:
        for kind in ("started", "delta"):
            event = await call.read()
            assert isinstance(event, pb.GenerateStreamResponse)
            assert event.WhichOneof("event") == kind
    return calls


async def stalled(served: Served) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateStreamResponse]:
    """A call whose client has stopped to read, and which waits for it."""
    served.engine.text = "x" * 50_000
    call = served.stub.GenerateStream(ask())
    await call.read()
    await until(lambda: served.engine.paused == 1)
    return call


async def test_each_sample_tells_its_end_in_its_last_delta(served: Served) -> None:
    sampling = pb.SamplingOptions(n=3, temperature=1.0, seed=5)
    result = await served.answer(ask(max_tokens=4, sampling=sampling))
    deltas = [event.delta for event in result.events if event.HasField("delta")]
    last = {delta.sample: delta for delta in deltas}
    assert [delta for delta in deltas if delta.HasField("result")] == sorted(last.values(), key=deltas.index)
    assert [last[sample].result for sample in range(3)] == [*result.finished.samples]
    assert [one.usage.completion_tokens for one in result.finished.samples] == [4, 4, 4]
    assert [one.seed for one in result.finished.samples] == [5, 6, 7]


async def test_normal_end(served: Served) -> None:
    result = await served.answer(ask(max_tokens=7, request_id="mine", tenant="acme"))
    assert result.kinds == ["started", *["delta"] * (len(result.events) - 2), "finished"]
    assert result.text == "abcdefg"
    assert result.token_ids == list(range(97, 104))
    head = result.events[0].started
    assert (head.request_id, head.tenant, head.strategy) == ("mine", "acme", "hybrid")
    assert (head.prompt_tokens, head.max_tokens, head.model) == (5, 7, "fake")
    end = result.finished
    [sample] = end.samples
    assert sample.reason == pb.FINISH_REASON_LENGTH
    assert (sample.usage.completion_tokens, sample.usage.accepted_draft_tokens) == (7, 3)
    assert not sample.HasField("seed")  # greedy
    assert not sample.usage.HasField("reasoning_tokens")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (5, 7)
    assert (end.drafting.steps, end.drafting.draft_tokens, end.drafting.accepted_tokens) == (4, 6, 3)
    assert end.drafting.mean_acceptance_length == 7 / 4
    assert dict(end.drafting.by_source)["hybrid"].accepted_tokens == 3
    assert end.timings.decode.ToNanoseconds() > 0


async def test_requests_share_steps_and_all_are_answered(served: Served) -> None:
    results = await asyncio.gather(*(served.answer(ask(max_tokens=20)) for _ in range(12)))
    assert {result.text for result in results} == {"abcdefghijklmnopqrst"}
    assert all(result.finished for result in results)
    assert served.engine.most_running == 4


async def test_client_cancels(served: Served) -> None:
    [call] = await started(served)
    call.cancel()
    await served.assert_idle()
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert len(served.engine.added[0].output) < 3000


async def test_client_cancels_while_waiting() -> None:
    engine = FakeEngine(max_running=1)
    async with serving(engine) as served:
        [first] = await started(served)
        second = served.stub.GenerateStream(ask())
        await until(lambda: engine.waiting == 1)
        second.cancel()
        await until(lambda: engine.waiting == 0)
        assert engine.running == 1
        first.cancel()


async def test_deadline_of_the_client(caplog: pytest.LogCaptureFixture, served: Served) -> None:
    served.engine.step_seconds = 0.01
    result = await served.answer(ask(), timeout=0.1)
    assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.assert_idle()
    assert all(len(one.output) < 3000 for one in served.engine.added)
    assert "deadline_exceeded" in caplog.text


@pytest.mark.parametrize("own_deadline", [None, 30.0])
async def test_deadline_of_the_server_also_while_the_engine_is_in_a_long_step(own_deadline: float | None) -> None:
    async with serving(default_timeout=0.1, max_timeout=0.1) as served:
        served.engine.gate.clear()
        result = await served.answer(ask(), timeout=own_deadline)
        assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(result.status) == "DEADLINE_EXCEEDED"
        assert result.kinds == ["started"]


@pytest.mark.parametrize(
    ("where", "error", "told"),
    [
        ("sequence_error", ModelError("CUDA error in /secret/path"), "MODEL_FAILED"),
        ("sequence_error", KeyError("secret"), "INTERNAL"),
        ("add_error", MemoryError("secret"), "INTERNAL"),
    ],
)
async def test_an_error_of_sequences_reveals_no_internals_and_the_engine_goes_on(
    where: str, error: Exception, told: str, served: Served
) -> None:
    calls = await started(served, 3) if where == "sequence_error" else []
    setattr(served.engine, where, error)
    for call in [*calls, served.stub.GenerateStream(ask())]:
        status = (await answer(call)).status
        assert (status.code(), reason(status)) == (grpc.StatusCode.INTERNAL, told)
        assert "secret" not in str(status.details())
    setattr(served.engine, where, None)
    assert (await served.answer(ask(max_tokens=2))).finished


async def test_shutdown_in_mid_stream(served: Served) -> None:
    calls = await started(served, 2)
    answers = [asyncio.create_task(answer(call)) for call in calls]
    await served.server.stop(grace=0.05)
    for result in await asyncio.gather(*answers):
        assert result.status.code() is grpc.StatusCode.UNAVAILABLE
        assert reason(result.status) == "SHUTTING_DOWN"


async def test_shutdown_waits_for_no_reader() -> None:
    async with serving(drain_grace=0.0) as served:
        call = await stalled(served)
        async with asyncio.timeout(20):  # a reader may take 30 s
            await served.server.stop()
        assert (await answer(call)).status.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_readers_that_stop_give_up_their_slots_until_they_read_on() -> None:
    large = [("grpc.max_receive_message_length", -1)]
    async with serving(max_waiting=20) as served, grpc.aio.insecure_channel(served.server.address, large) as channel:
        served.engine.text = "x" * 50_000
        stub = pb_grpc.GenerationServiceStub(channel)
        reads_on, *others = [stub.GenerateStream(ask(max_tokens=800, tenant="slow")) for _ in range(20)]
        for call in (reads_on, *others):
            await call.read()
        await until(lambda: served.engine.paused >= 4)
        other = await served.answer(ask(max_tokens=8, tenant="other"))
        assert other.finished.usage.completion_tokens == 8
        await until(lambda: served.engine.paused == 20)
        for call in others:
            call.cancel()
        result = await answer(reads_on)
        assert result.token_ids == [97 + i % 26 for i in range(800)]


async def test_client_that_disconnects_while_a_message_waits(served: Served) -> None:
    call = await stalled(served)
    call.cancel()
    await served.assert_idle()


async def test_reader_that_stops_is_cut_off() -> None:
    async with serving(stall_timeout=0.2) as served:
        served.engine.text = "x" * 50_000
        [call] = await started(served)
        await served.assert_idle()
        assert served.engine.steps < 1500
        result = await answer(call)
        assert result.status.code() is grpc.StatusCode.ABORTED
        assert reason(result.status) == "READER_STALLED"


async def test_a_storm_of_all_endings_leaves_nothing_and_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()
    caplog.clear()  # of what earlier tests left
    chance = random.Random(7)

    async def one(served: Served) -> Answer:
        own_deadline = chance.choice([None, 0.02, 0.05, 5.0])
        call = served.stub.GenerateStream(ask(max_tokens=chance.randint(1, 60)), timeout=own_deadline)
        if chance.random() < 0.4:
            asyncio.get_running_loop().call_later(chance.uniform(0, 0.06), call.cancel)
        return await answer(call)

    settings: dict[str, Any] = {"max_running": 4, "max_waiting": 20, "default_timeout": 0.04, "max_timeout": 0.05}
    async with serving(**settings) as served:
        for _ in range(6):
            for result in await asyncio.gather(*(one(served) for _ in range(50))):
                # A status that the client itself made, at its deadline or cancellation, has no details.
                detailed = result.error is not None and "grpc-status-details-bin" in dict(
                    result.error.trailing_metadata()
                )
                assert result.kinds.count("finished") + detailed <= 1
                assert "finished" in result.kinds or result.error is not None or result.cancelled
            await served.assert_idle()
        loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert loud == []


async def test_a_whole_answer_is_what_the_stream_sends(served: Served) -> None:
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


async def test_a_client_of_a_whole_answer_that_is_gone_frees_its_slots(served: Served) -> None:
    served.engine.gate.clear()
    call = served.stub.Generate(ask(max_tokens=100))
    await until(lambda: served.engine.running == 1 or served.engine.in_step)
    call.cancel()
    served.engine.gate.set()
    await served.assert_idle()


async def test_the_deadline_of_a_whole_answer() -> None:
    async with serving(default_timeout=0.3) as served:
        served.engine.gate.clear()
        assert reason(await refusal(served.stub.Generate(ask()))) == "DEADLINE_EXCEEDED"


async def test_errors_of_a_whole_answer(served: Served) -> None:
    served.engine.sequence_error = ModelError("broken")
    assert reason(await refusal(served.stub.Generate(ask()))) == "MODEL_FAILED"
    assert violation(await refusal(served.stub.Generate(ask(max_tokens=0)))).field == "stop.max_tokens"
    unknown = await refusal(served.stub.Generate(ask(model="other")))
    assert (unknown.code(), reason(unknown)) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_details_that_could_be_too_large_for_one_message_are_refused_before_any_work() -> None:
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


async def test_padding_fills_up_a_whole_answer() -> None:
    async with serving(delta_padding=1024) as served:
        assert (await served.stub.Generate(ask(max_tokens=4))).ByteSize() == 1024
        assert (await served.stub.Generate(ask(max_tokens=600))).ByteSize() % 1024 == 0


async def test_neither_size_nor_time_of_a_whole_answer_tell_what_is_written() -> None:
    request = ask(max_tokens=100, drafting=pb.DraftOptions(enabled=False))
    sizes = set()
    async with serving(delta_cadence=0.05, delta_padding=256, delta_rounding=4) as served:
        await served.stub.Generate(request)
        for text in ("a", "äöü and more"):
            served.engine.text = text
            began = time.perf_counter()
            sizes.add((await served.stub.Generate(request)).ByteSize())
            assert time.perf_counter() - began > 0.05 * 4
    assert len(sizes) == 1 or max(sizes) == 2 * min(sizes)
    assert all(size % 256 == 0 and size.bit_count() == 1 for size in sizes)


async def test_an_error_ends_a_whole_answer_before_its_time() -> None:
    async with serving(delta_cadence=5.0) as served:
        began = time.perf_counter()
        error = await refusal(served.stub.Generate(ask(max_tokens=6), timeout=0.5))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.perf_counter() - began < 4


def pushback(retry_seconds: float, remaining: float | None = None) -> int:
    """Milliseconds after which gRPC's clients retry by themselves; -1 forbids it."""
    return int(dict(to_status(QueueFullError(5, retry_seconds), "mine", remaining)[2])["grpc-retry-pushback-ms"])


@pytest.mark.parametrize(("remaining", "least", "most"), [(None, 100, 125), (0.13, 100, 125), (0.1, -1, -1)])
def test_a_retry_that_would_come_after_the_deadline_is_forbidden(
    remaining: float | None, least: int, most: int
) -> None:
    sent = [pushback(0.1, remaining) for _ in range(50)]
    assert least <= min(sent) <= max(sent) <= most
    assert (len(set(sent)) > 1) is (most > least)  # they do not come back together


def test_no_client_is_asked_to_come_back_at_once() -> None:
    assert pushback(0.0) >= 10
