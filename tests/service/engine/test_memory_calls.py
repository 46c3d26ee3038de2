"""Operations on memories across the link: results, errors, cancellation, and the end of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from draftwood.v1 import generation_pb2 as pb
from draftwood_memory.errors import StoreFullError
from draftwood_memory.memory import Memory
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_service.engine import host
from draftwood_service.errors import ShuttingDownError
from tests.service.engine.test_bridge import running, sample
from tests.service.fakes import FakeEngine, FakeOwnText, answer, serving, until


@dataclass(frozen=True)
class Operation:
    """Ends with a value or an error, or not at all."""

    value: int = 0
    error: Exception | None = None
    ends: bool = True

    async def run(self, memory: Memory) -> int:
        if not self.ends:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        return self.value


async def test_operations_on_memories_return_or_raise_across_the_link() -> None:
    async with running(FakeEngine()) as bridge:
        assert await asyncio.gather(*(bridge.run_operation(Operation(value)) for value in range(5))) == [0, 1, 2, 3, 4]
        with pytest.raises(StoreFullError, match="no space"):
            await bridge.run_operation(Operation(error=StoreFullError("no space")))
        cancelled = asyncio.create_task(bridge.run_operation(Operation(ends=False)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await bridge.run_operation(Operation(6)) == 6
    with pytest.raises(EngineStoppedError):
        await bridge.run_operation(Operation(7))


@pytest.mark.parametrize(("dies", "error"), [(True, EngineStoppedError), (False, ShuttingDownError)])
async def test_operations_end_with_the_engine_or_the_bridge(dies: bool, error: type[Exception]) -> None:
    engine = FakeEngine()
    async with running(engine) as bridge:
        waiting = asyncio.create_task(bridge.run_operation(Operation(ends=False)))
        await asyncio.sleep(0)
        if dies:
            engine.step_error = RuntimeError("dead")
            bridge.admit().submit(sample())
        else:
            await bridge.close()
        with pytest.raises(error):
            await waiting


FIRST: dict[str, Any] = {"text": "hi", "tenant": "acme", "request_id": "r"}
CASES: dict[str, tuple[list[dict[str, Any]], int]] = {
    "one request": ([FIRST], 1),
    "the same again": ([FIRST, FIRST, FIRST], 1),
    "no id": ([{"text": "hi"}] * 3, 3),
    "another id": ([FIRST, {**FIRST, "request_id": "s"}], 2),
    "another prompt": ([FIRST, {**FIRST, "text": "ho"}], 2),
    "another tenant": ([FIRST, {**FIRST, "tenant": "other"}], 2),
    "not to be learned": ([{**FIRST, "drafting": pb.DraftOptions(learn=False)}], 0),
    "to be learned the second time": ([{**FIRST, "drafting": pb.DraftOptions(learn=False)}, FIRST], 1),
    "drafting off": ([{**FIRST, "drafting": pb.DraftOptions(enabled=False)}], 0),
    "several samples": ([{**FIRST, "sampling": pb.SamplingOptions(n=3, temperature=1.0)}] * 2, 3),
}


@pytest.mark.parametrize("case", CASES)
async def test_what_is_learned(case: str) -> None:
    requests, expected = CASES[case]
    async with serving() as served:
        for fields in requests:
            stop = pb.StopOptions(max_tokens=3)
            assert (await answer(served.stub.GenerateStream(pb.GenerateRequest(stop=stop, **fields)))).finished
        await served.assert_idle()
        assert served.memory.counters().learned == expected


TOKENS = 50
REQUEST = pb.GenerateRequest(text="x", tenant="acme", stop=pb.StopOptions(max_tokens=12))


def idle_engine(tokens: int = TOKENS) -> tuple[FakeEngine, FakeOwnText]:
    engine = FakeEngine()
    engine.own_text = FakeOwnText(engine, tokens)
    return engine, engine.own_text


async def test_own_text_is_written_before_audits_and_after_requests() -> None:
    engine, own_text = idle_engine()
    engine.gate.clear()
    async with serving(engine, audit_share=1.0) as served:
        call = served.stub.GenerateStream(REQUEST)
        engine.gate.set()
        assert (await answer(call)).finished
        await until(lambda: bool(engine.redecodings))
        assert own_text.done
        assert own_text.steps == TOKENS


async def test_own_text_pauses_for_a_while_after_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_QUIET_SECONDS", 600.0)
    engine, own_text = idle_engine(tokens=1 << 40)
    async with serving(engine) as served:
        await until(lambda: own_text.steps > 5)
        assert (await answer(served.stub.GenerateStream(REQUEST))).finished
        steps = own_text.steps
        assert (await answer(served.stub.GenerateStream(REQUEST))).finished
        assert own_text.steps == steps


async def test_own_text_that_fails_costs_itself_alone() -> None:
    engine, own_text = idle_engine(tokens=1 << 40)
    with capture_logs() as logs:
        async with serving(engine) as served:
            await until(lambda: own_text.steps > 5)
            assert (await answer(served.stub.GenerateStream(REQUEST))).finished
            assert not own_text.done
            own_text.error = RuntimeError("out of memory")
            await until(lambda: own_text.done)
            await until(lambda: served.server.bridge.reports.latest.own_text_failed)
            assert (await answer(served.stub.GenerateStream(REQUEST))).finished
    assert ["own text" in log["event"] for log in logs].count(True) == 1
