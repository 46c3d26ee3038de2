"""StatusService: what operators and tenants' admins see, intervals, limits, restarts of the engine, and drains."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftwood.admin.v1 import status_pb2 as pb
from draftwood.admin.v1.status_pb2_grpc import StatusServiceStub
from draftwood_service.auth import Role
from draftwood_service.engine import reports as reporter
from draftwood_service.rpc import status
from tests.service.auth.test_matrix import OTHER, OWN, Keys
from tests.service.fakes import FakeEngine, FakeOwnText, Served, answer, refusal, serving, until
from tests.service.rpc.test_bad_input import violation
from tests.service.rpc.test_endings import ask, reason

CODE = grpc.StatusCode
TOKENS = 12


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.02)


def headers(authorization: str | None) -> grpc.aio.Metadata:
    return grpc.aio.Metadata(*([("authorization", authorization)] if authorization else []))


async def answered(served: Served, tenant: str, authorization: str | None = None) -> None:
    asked = ask("x", TOKENS, tenant=tenant)
    assert (await served.answer(asked, metadata=headers(authorization))).finished


async def status_of(served: Served, authorization: str | None = None) -> pb.ServerStatus:
    stub: Any = StatusServiceStub(served.channel)
    response: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), metadata=headers(authorization))
    return response.status


async def reported(served: Served, tokens: int) -> None:
    """Waits for the engine's report of so many tokens."""
    await until(lambda: sum(one.written_tokens for one in served.server.bridge.reports.latest.work.values()) == tokens)


def watch(served: Served, seconds: float | None = 0.5) -> Any:
    stub: Any = StatusServiceStub(served.channel)
    request = pb.WatchStatusRequest()
    if seconds is not None:
        request.interval.FromNanoseconds(round(seconds * 1e9))
    return stub.WatchStatus(request)


async def test_an_operator_sees_everything() -> None:
    async with serving(max_waiting=5) as served:
        for tenant in (OWN, OWN, OTHER):
            await answered(served, tenant)
        await reported(served, 3 * TOKENS)
        seen = await status_of(served)
    assert (seen.model, seen.dtype, seen.runner, seen.state) == ("fake", "float32", "torch", pb.SERVING_STATE_SERVING)
    assert seen.server_version
    assert abs(seen.report_time.ToNanoseconds() / 1e9 - time.time()) < 60
    assert 0 < seen.uptime.ToNanoseconds() / 1e9 < 60
    load = seen.load
    assert (load.max_running, load.max_waiting, load.running, load.waiting) == (4, 5, 0, 0)
    assert (load.tokens, load.decode_steps, load.kv_pages) == (3 * TOKENS, 3 * TOKENS // 2, 64)
    assert load.steps > 0
    assert load.store.up
    [drafting] = load.drafting
    assert (drafting.strategy, drafting.arm, drafting.requests) == ("hybrid", "", 3)
    assert (drafting.draft_tokens, drafting.accepted_tokens) == (load.draft_tokens, 3 * TOKENS // 2)
    assert {one.tenant: (one.tokens, one.decode_steps) for one in seen.tenants} == {
        OWN: (2 * TOKENS, TOKENS),
        OTHER: (TOKENS, TOKENS // 2),
    }


async def test_what_idle_work_lost_is_shown() -> None:
    engine = FakeEngine()
    engine.own_text = own_text = FakeOwnText(engine, 1 << 40)
    engine.redecoding_error = RuntimeError("no luck")
    async with serving(engine, audit_share=1.0) as served:
        assert not (await status_of(served)).load.own_text_failed
        own_text.error = RuntimeError("no luck")
        await answered(served, OWN)
        await until(lambda: served.server.bridge.reports.latest.own_text_failed)
        await until(lambda: bool(served.server.audits.counts))
        load = (await status_of(served)).load
    assert load.own_text_failed
    assert (load.audits.audited, load.audits.failed) == (0, 1)


async def test_an_admin_sees_its_tenant_and_no_figures_of_others(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "auth.yaml")
    operator, admin = (f"Bearer {keys.of_role[role]}" for role in (Role.OPERATOR, Role.TENANT_ADMIN))
    async with serving(auth_file=keys.path) as served:
        await answered(served, OTHER, operator)
        await reported(served, TOKENS)
        before = await status_of(served, admin)
        await answered(served, OWN, operator)
        await reported(served, 2 * TOKENS)
        after = await status_of(served, admin)
        everything = await status_of(served, operator)
    assert (len(before.tenants), before.HasField("load")) == (0, False)
    assert [(tenant.tenant, tenant.tokens) for tenant in after.tenants] == [(OWN, TOKENS)]
    assert not after.HasField("load")
    assert OTHER.encode() not in after.SerializeToString()
    assert {tenant.tenant for tenant in everything.tenants} == {OWN, OTHER}


async def test_running_and_waiting_are_shown_while_they_last() -> None:
    engine = FakeEngine(max_running=1)
    engine.tokens_per_step, engine.step_seconds = 1, 0.01
    async with serving(engine, max_running=1) as served:
        calls = [served.stub.GenerateStream(ask("x", 2000, tenant=OWN)) for _ in range(2)]
        stream = watch(served)
        while ((seen := (await stream.read()).status.load).running, seen.waiting) != (1, 1):
            pass
        for call in calls:
            call.cancel()
        while (seen := (await stream.read()).status).load.running + seen.load.waiting:
            pass
        assert [(tenant.tenant, tenant.running, tenant.waiting) for tenant in seen.tenants] == [(OWN, 0, 0)]
        stream.cancel()


@pytest.mark.parametrize("seconds", [0, 0.49, 60.5, -1])
async def test_a_bad_interval_is_refused_by_name(seconds: float, served: Served) -> None:
    found = violation(await refusal(watch(served, seconds)))
    assert found.description == f"interval {seconds:g} s: must be 0.5 to 60 seconds"


async def test_too_many_watches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_MAX_WATCHES", 2)
    async with serving() as served:
        first, second = watch(served, None), watch(served, 60)
        assert (await first.read()).status.model == (await second.read()).status.model == "fake"
        error = await refusal(watch(served))
        assert (error.code(), reason(error)) == (CODE.RESOURCE_EXHAUSTED, "TOO_MANY_WATCHES")
        second.cancel()
        async with asyncio.timeout(10):
            while True:  # until the server has seen its end
                with suppress(grpc.aio.AioRpcError):
                    assert (await watch(served).read()).status.model == "fake"
                    break
                await asyncio.sleep(0.05)


async def test_a_watch_ends_after_the_longest_time_of_a_request() -> None:
    async with serving(max_timeout=1.0, default_timeout=1.0) as served:
        samples = [sample async for sample in watch(served, 0.5)]
        assert len(samples) in (1, 2)


async def test_a_drain_is_shown_and_does_not_wait_for_watches() -> None:
    async with serving(drain_grace=20.0) as served:
        served.engine.gate.clear()
        call = served.stub.GenerateStream(ask("x", 60))
        await call.read()
        stream = watch(served)
        assert (await stream.read()).status.state == pb.SERVING_STATE_SERVING
        began = time.monotonic()
        stopping = asyncio.create_task(served.server.stop())
        while (await stream.read()).status.state != pb.SERVING_STATE_DRAINING:
            pass
        served.engine.gate.set()
        assert (await answer(call)).finished
        await stopping
        assert time.monotonic() - began < 15


async def test_a_restart_of_the_engine_is_shown(served: Served) -> None:
    served.engine.may_load.clear()
    served.engine.step_error = RuntimeError("broken")
    error = (await served.answer(ask("x"))).status
    assert (error.code(), reason(error)) == (CODE.UNAVAILABLE, "ENGINE_STOPPED")
    assert "broken" not in str(error.details())
    await until(lambda: not served.server.serving)
    assert (await status_of(served)).state == pb.SERVING_STATE_RESTARTING
    served.engine.step_error = None
    served.engine.may_load.set()
    await until(lambda: served.server.serving)
    assert (await status_of(served)).load.engine_restarts == 1
