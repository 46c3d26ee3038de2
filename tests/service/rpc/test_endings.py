"""Every way in which an answer ends: one Finished or one status, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_model_runner.errors import EngineStoppedError, InvalidValueError, ModelError
from draftwood_service.errors import (
    DeadlineExceededError,
    ModelNotServedError,
    QueueFullError,
    ReaderStalledError,
    ShuttingDownError,
)
from draftwood_service.rpc.statuses import ERROR_DOMAIN, rule_for, to_status
from tests.service.fakes import Answer, FakeEngine, Served, answer, serving, until


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
    """Calls that are being answered, their first two events read."""
    calls = [served.stub.GenerateStream(ask()) for _ in range(count)]
    for call in calls:
        for kind in ("started", "delta"):
            event = await call.read()
            assert isinstance(event, pb.GenerateStreamResponse)
            assert event.WhichOneof("event") == kind
    return calls


async def test_each_sample_tells_its_end_in_its_last_delta(served: Served) -> None:
    sampling = pb.SamplingOptions(n=3, temperature=1.0, seed=5)
    result = await answer(served.stub.GenerateStream(ask(max_tokens=4, sampling=sampling)))
    deltas = [event.delta for event in result.events if event.HasField("delta")]
    last = {delta.sample: delta for delta in deltas}
    assert [delta for delta in deltas if delta.HasField("result")] == sorted(last.values(), key=deltas.index)
    assert [last[sample].result for sample in range(3)] == [*result.finished.samples]
    assert [one.usage.completion_tokens for one in result.finished.samples] == [4, 4, 4]
    assert [one.seed for one in result.finished.samples] == [5, 6, 7]
    alone = await answer(served.stub.GenerateStream(ask(max_tokens=4)))
    assert [event.delta.result for event in alone.events if event.delta.HasField("result")] == [*alone.finished.samples]
    assert not alone.finished.samples[0].HasField("seed")  # greedy


async def test_normal_end(served: Served) -> None:
    result = await answer(served.stub.GenerateStream(ask(max_tokens=7, request_id="mine", tenant="acme")))
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
    assert not sample.usage.HasField("reasoning_tokens")
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (5, 7)
    assert (end.drafting.steps, end.drafting.draft_tokens, end.drafting.accepted_tokens) == (4, 6, 3)
    assert end.drafting.mean_acceptance_length == 7 / 4
    assert dict(end.drafting.by_source)["hybrid"].accepted_tokens == 3
    assert end.timings.decode.ToNanoseconds() > 0


async def test_requests_share_steps_and_all_are_answered(served: Served) -> None:
    results = await asyncio.gather(*(answer(served.stub.GenerateStream(ask(max_tokens=20))) for _ in range(12)))
    assert {result.text for result in results} == {"abcdefghijklmnopqrst"}
    assert all(result.finished.usage.completion_tokens == 20 for result in results)
    assert served.engine.most_running == 4
    assert len(served.engine.threads) == 1


async def test_client_cancels(served: Served) -> None:
    [call] = await started(served)
    steps = served.engine.steps
    call.cancel()
    await served.assert_idle()
    assert await call.code() is grpc.StatusCode.CANCELLED
    # It ended long before all of its tokens were generated, which would take 1500 steps.
    assert served.engine.steps - steps < 100


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


async def test_channel_closes(served: Served) -> None:
    await started(served, 3)
    assert served.engine.running == 3
    await served.channel.close()
    await served.assert_idle()
    assert served.engine.running == 0


async def test_deadline_of_the_client(caplog: pytest.LogCaptureFixture, served: Served) -> None:
    result = await answer(served.stub.GenerateStream(ask(), timeout=0.1))
    steps = served.engine.steps
    assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await served.assert_idle()
    assert served.engine.steps - steps < 50
    assert "deadline_exceeded" in caplog.text


@pytest.mark.parametrize(
    ("settings", "own_deadline"),
    [({"default_timeout": 0.1}, None), ({"default_timeout": 0.1, "max_timeout": 0.1}, 30.0)],
)
async def test_deadline_of_the_server(settings: dict[str, Any], own_deadline: float | None) -> None:
    async with serving(**settings) as served:
        result = await answer(served.stub.GenerateStream(ask(), timeout=own_deadline))
        assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert reason(result.status) == "DEADLINE_EXCEEDED"


async def test_deadline_while_the_engine_is_in_a_long_step() -> None:
    async with serving(default_timeout=0.1) as served:
        served.engine.gate.clear()
        result = await answer(served.stub.GenerateStream(ask()))
        assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert result.kinds == ["started"]
        served.engine.gate.set()


@pytest.mark.parametrize(
    ("error", "told"), [(ModelError("CUDA error in /secret/path"), "MODEL_FAILED"), (KeyError("secret"), "INTERNAL")]
)
async def test_an_error_of_sequences_reveals_no_internals(error: Exception, told: str, served: Served) -> None:
    calls = await started(served, 3)
    served.engine.sequence_error = error
    for result in [await answer(call) for call in calls]:
        assert result.status.code() is grpc.StatusCode.INTERNAL
        assert reason(result.status) == told
        assert "secret" not in str(result.status.details())
    served.engine.sequence_error = None
    assert (await answer(served.stub.GenerateStream(ask(max_tokens=2)))).finished


async def test_engine_that_refuses_a_sequence_goes_on(served: Served) -> None:
    served.engine.add_error = MemoryError("no memory")
    result = await answer(served.stub.GenerateStream(ask()))
    assert result.status.code() is grpc.StatusCode.INTERNAL
    served.engine.add_error = None
    assert (await answer(served.stub.GenerateStream(ask(max_tokens=2)))).finished


async def test_shutdown_in_mid_stream(served: Served) -> None:
    calls = await started(served, 2)
    answers = [asyncio.create_task(answer(call)) for call in calls]
    await served.server.stop(grace=0.05)
    for result in await asyncio.gather(*answers):
        assert result.status.code() is grpc.StatusCode.UNAVAILABLE
        assert reason(result.status) == "SHUTTING_DOWN"
    assert served.engine.closed


async def test_shutdown_waits_for_no_reader() -> None:
    async with serving(drain_grace=0.0) as served:
        served.engine.text = "x" * 50_000
        call = served.stub.GenerateStream(ask())
        await call.read()
        await until(lambda: served.engine.paused == 1)
        began = time.perf_counter()
        await served.server.stop()
        assert time.perf_counter() - began < 5.0
        assert served.engine.closed
        assert (await answer(call)).status.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_readers_that_stop_give_up_their_slots_until_they_read_on() -> None:
    large = [("grpc.max_receive_message_length", -1)]
    async with serving(max_waiting=20) as served, grpc.aio.insecure_channel(served.server.address, large) as channel:
        served.engine.text = "x" * 50_000
        stub = pb_grpc.GenerationServiceStub(channel)
        stalled = [stub.GenerateStream(ask(max_tokens=800, tenant="slow")) for _ in range(20)]
        for call in stalled:
            await call.read()
        await until(lambda: served.engine.paused >= 4)
        other = await asyncio.wait_for(answer(served.stub.GenerateStream(ask(max_tokens=8, tenant="other"))), 10)
        assert other.finished.usage.completion_tokens == 8
        await until(lambda: served.engine.paused == 20)
        reads_on, *others = stalled
        for call in others:
            call.cancel()
        result = await answer(reads_on)
        assert result.token_ids == [97 + i % 26 for i in range(800)]


async def test_client_that_disconnects_while_a_message_waits(served: Served) -> None:
    served.engine.text = "x" * 50_000
    call = served.stub.GenerateStream(ask())
    await call.read()
    await until(lambda: served.engine.paused == 1)
    call.cancel()
    await served.assert_idle()
    assert served.engine.running == 0


async def test_reader_that_stops_is_cut_off() -> None:
    async with serving(stall_timeout=0.2) as served:
        served.engine.text = "x" * 50_000
        call = served.stub.GenerateStream(ask())
        await call.read()
        await until(lambda: served.engine.running == 1)
        await served.assert_idle()
        assert served.engine.steps < 1500
        result = await answer(call)
        assert result.status.code() is grpc.StatusCode.ABORTED
        assert reason(result.status) == "READER_STALLED"


async def test_a_storm_of_all_endings_leaves_nothing_and_logs_no_error(caplog: pytest.LogCaptureFixture) -> None:
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
    loud = [record.getMessage() for record in caplog.records if record.levelname in ("WARNING", "ERROR", "CRITICAL")]
    assert loud == []


TABLE = [
    (ModelNotServedError("x", "y"), grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    (InvalidValueError("a.b", 3, "it must be 4"), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_VALUE"),
    (QueueFullError(5, 0.25), grpc.StatusCode.UNAVAILABLE, "QUEUE_FULL"),
    (ShuttingDownError(), grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN"),
    (EngineStoppedError("secret"), grpc.StatusCode.UNAVAILABLE, "ENGINE_STOPPED"),
    (DeadlineExceededError(1.5), grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    (ReaderStalledError(1.5), grpc.StatusCode.ABORTED, "READER_STALLED"),
    (ModelError("secret"), grpc.StatusCode.INTERNAL, "MODEL_FAILED"),
    (KeyError("secret"), grpc.StatusCode.INTERNAL, "INTERNAL"),
]


@pytest.mark.parametrize(("error", "code", "reason"), TABLE, ids=lambda value: str(value)[:20])
def test_status(error: Exception, code: grpc.StatusCode, reason: str) -> None:
    found, text, trailing = to_status(error, "mine")
    assert found is code
    assert "secret" not in text
    metadata = dict(trailing)
    packed = metadata["grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    status = status_pb2.Status.FromString(packed)
    assert (status.code, status.message) == (code.value[0], text)
    info, retry, bad = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain, info.metadata["request_id"]) == (reason, "draftwood", "mine")
    assert any(detail.Unpack(retry) for detail in status.details) is (code is grpc.StatusCode.UNAVAILABLE)
    assert ("grpc-retry-pushback-ms" in metadata) is (code is grpc.StatusCode.UNAVAILABLE)
    assert any(detail.Unpack(bad) for detail in status.details) is (code is grpc.StatusCode.INVALID_ARGUMENT)
    if isinstance(error, QueueFullError):
        assert 250 <= int(metadata["grpc-retry-pushback-ms"]) <= 313
        assert retry.retry_delay.ToMilliseconds() == 250


@pytest.mark.parametrize(("remaining", "expected"), [(None, {100, 125}), (0.13, {100, 125}), (0.1, {-1}), (0.0, {-1})])
def test_a_retry_that_would_come_after_the_deadline_is_forbidden(remaining: float | None, expected: set[int]) -> None:
    sent = [
        int(dict(to_status(QueueFullError(5, 0.1), "mine", remaining)[2])["grpc-retry-pushback-ms"]) for _ in range(50)
    ]
    assert min(expected) <= min(sent) <= max(sent) <= max(expected)
    assert (len(set(sent)) > 1) is (len(expected) > 1)


def test_no_client_is_asked_to_come_back_at_once() -> None:
    assert int(dict(to_status(QueueFullError(5, 0.0), "mine")[2])["grpc-retry-pushback-ms"]) >= 10


def test_a_subclass_has_the_rule_of_its_base() -> None:
    class NarrowError(ModelError):
        pass

    assert rule_for(NarrowError()) is rule_for(ModelError())
