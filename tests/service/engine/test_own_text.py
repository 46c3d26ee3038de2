"""What the model writes by itself is written while the engine is idle, and no request waits for it."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from draftwood.v1 import generation_pb2 as pb
from draftwood_service.engine import host
from tests.service.fakes import FakeEngine, FakeOwnText, answer, serving, until

TOKENS = 50
REQUEST = pb.GenerateRequest(text="x", tenant="acme", stop=pb.StopOptions(max_tokens=12))


def idle_engine(tokens: int = TOKENS) -> tuple[FakeEngine, FakeOwnText]:
    engine = FakeEngine()
    engine.own_text = FakeOwnText(engine, tokens)
    return engine, engine.own_text


async def test_it_is_written_before_audits_and_after_requests() -> None:
    engine, own_text = idle_engine()
    engine.gate.clear()
    async with serving(engine, audit_share=1.0) as served:
        call = served.stub.Generate(REQUEST)
        engine.gate.set()
        assert (await answer(call)).finished
        await until(lambda: bool(engine.redecodings))
        assert own_text.done
        assert own_text.steps == TOKENS


async def test_requests_are_served_while_it_is_written() -> None:
    engine, own_text = idle_engine(tokens=1 << 40)
    async with serving(engine) as served:
        for _ in range(3):
            await until(lambda steps=own_text.steps: own_text.steps > steps + 5)  # type: ignore[misc]
            assert (await answer(served.stub.Generate(REQUEST))).finished
        assert not own_text.done


async def test_it_pauses_for_a_while_after_each_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_QUIET_SECONDS", 600.0)
    engine, own_text = idle_engine(tokens=1 << 40)
    async with serving(engine) as served:
        await until(lambda: own_text.steps > 5)
        assert (await answer(served.stub.Generate(REQUEST))).finished
        steps = own_text.steps
        assert (await answer(served.stub.Generate(REQUEST))).finished
        assert own_text.steps == steps


@pytest.mark.parametrize("steps", [0, 7])
async def test_its_failure_costs_it_alone(steps: int) -> None:
    engine, own_text = idle_engine(tokens=1 << 40)
    with capture_logs() as logs:
        async with serving(engine) as served:
            await until(lambda: own_text.steps >= steps)
            own_text.error = RuntimeError("out of memory")
            await until(lambda: own_text.done)
            await until(lambda: served.server.bridge.reports.latest.own_text_failed)
            assert (await answer(served.stub.Generate(REQUEST))).finished
    assert ["own text" in one["event"] for one in logs].count(True) == 1
