"""Audits beside live requests: what is chosen, what waits, what is dropped, and that nobody waits for them."""

from __future__ import annotations

import asyncio
import json
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from draftwood.admin.v1 import audit_pb2, audit_pb2_grpc
from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import memory_pb2, memory_pb2_grpc
from draftwood_client.cli import build_app
from draftwood_memory import MemoryName
from draftwood_model_runner.output import Difference
from draftwood_service.audit_counts import AuditCounts
from draftwood_service.engine import audits as auditor
from draftwood_service.engine.reports import WorkKey
from tests.service.fakes import FakeEngine, FakeModel, Served, answer, serving, until

TOKENS = 12


def request(tenant: str = "acme", request_id: str = "r", max_tokens: int = TOKENS, **fields: Any) -> pb.GenerateRequest:
    stop = pb.StopOptions(max_tokens=max_tokens)
    return pb.GenerateRequest(text="x", tenant=tenant, request_id=request_id, stop=stop, **fields)


async def answered(served: Served, *requests: pb.GenerateRequest) -> None:
    for one in requests:
        assert (await answer(served.stub.GenerateStream(one))).finished


def total(served: Served) -> AuditCounts:
    """The counts of the one key."""
    [counts] = served.server.audits.counts.values()
    return counts


async def audited(served: Served, count: int) -> AuditCounts:
    await until(lambda: sum(one.audited for one in served.server.audits.counts.values()) == count)
    return total(served)


async def test_each_sample_is_audited_once_and_its_audit_learns_nothing() -> None:
    async with serving(audit_share=1.0) as served:
        sampling = pb.SamplingOptions(n=3, temperature=1.0, seed=5)
        await answered(served, request(), request(request_id="s", sampling=sampling))
        counts = await audited(served, 4)
        assert (counts.tokens, counts.differing, counts.dropped, counts.failed) == (4 * TOKENS, 0, 0, 0)
        assert [*served.server.audits.counts] == [WorkKey("hybrid", "")]
        assert all(redecoding.closed for redecoding in served.engine.redecodings)
        assert sorted(one.answer.request.sampling.seed for one in served.engine.redecodings)[1:] == [5, 6, 7]
        await served.assert_idle()
        assert served.memory.counters().learned == 4


@pytest.mark.parametrize(
    ("share", "drafting"),
    [(0.0, pb.DraftOptions()), (1.0, pb.DraftOptions(enabled=False)), (1.0, pb.DraftOptions(max_nodes=0))],
)
async def test_nothing_to_audit(share: float, drafting: pb.DraftOptions) -> None:
    engine = FakeEngine()
    if share:
        engine.tokens_per_step = 1  # nothing was drafted
    async with serving(engine, audit_share=share) as served:
        await answered(served, *(request(request_id=str(i), drafting=drafting) for i in range(5)))
        await served.assert_idle()
        assert not served.server.audits.counts
        assert not engine.redecodings


async def test_a_share_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    chances = iter([0.2, 0.3, 0.31, 0.1])
    monkeypatch.setattr(auditor, "random", SimpleNamespace(random=lambda: next(chances)))
    async with serving(audit_share=0.3) as served:
        await answered(served, *(request(request_id=str(i)) for i in range(4)))
        await audited(served, 2)
        await served.assert_idle()
        assert [redecoding.answer.request.request_id for redecoding in served.engine.redecodings] == ["0", "3"]


async def test_cancelled_requests_are_not_audited() -> None:
    engine = FakeEngine()
    async with serving(engine, audit_share=1.0) as served:
        call = served.stub.GenerateStream(request(max_tokens=4000))
        await call.read()
        await call.read()
        call.cancel()
        await served.assert_idle()
        await answered(served, request(request_id="s"))
        await audited(served, 1)
        assert [redecoding.answer.request.request_id for redecoding in engine.redecodings] == ["s"]


async def test_a_live_request_waits_for_one_step_and_the_audit_goes_on() -> None:
    """FakeRedecoding asserts that it is never stepped while the engine has work."""
    engine = FakeEngine()
    engine.hold_redecoding_at = 5
    async with serving(engine, audit_share=1.0) as served:
        await answered(served, request())
        await until(lambda: not engine.gate.is_set())
        [audit] = engine.redecodings
        assert audit.steps == 5
        live: Any = served.stub.GenerateStream(request(request_id="live", max_tokens=400))
        assert (await live.read()).HasField("started")
        await until(lambda: bool(served.server.bridge._streams))  # it is sent to the engine
        engine.step_seconds = 0.05
        engine.gate.set()
        assert (await live.read()).HasField("delta")
        assert audit.steps == 6
        engine.step_seconds = 0.001
        assert (await answer(live)).finished
        await audited(served, 2)
        assert len(engine.redecodings) == 2
        assert audit.steps == TOKENS


@pytest.mark.parametrize("bound", ["MAX_ANSWERS", "MAX_TOKENS"])
async def test_the_queue_is_bounded(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, bound, 2 if bound == "MAX_ANSWERS" else 2 * (TOKENS + 1))
    async with serving(audit_share=1.0) as served:
        await answered(served, request(sampling=pb.SamplingOptions(n=4, temperature=1.0, seed=5)))
        counts = await audited(served, 2)
        assert counts.dropped == 2


async def test_a_purge_drops_the_audits_of_the_tenant() -> None:
    """One that is being decoded, and one that waits; that of another tenant stays."""
    engine = FakeEngine()
    engine.hold_redecoding_at = 5
    async with serving(engine, audit_share=1.0) as served:
        await answered(served, request())
        await until(lambda: not engine.gate.is_set())
        requests = request(request_id="s"), request("beta")
        live = asyncio.create_task(answered(served, *requests))
        await until(lambda: bool(served.server.bridge._streams))  # the first is sent to the engine
        stub: Any = memory_pb2_grpc.MemoryServiceStub(served.channel)
        purging = asyncio.ensure_future(stub.PurgeMemory(memory_pb2.PurgeMemoryRequest(tenant="acme")))
        await until(lambda: bool(served.server.bridge._memory_calls))
        engine.gate.set()
        await asyncio.gather(live, purging)
        counts = await audited(served, 1)
        assert counts.dropped == 2
        [stopped, other] = engine.redecodings
        assert (stopped.steps, stopped.closed) == (6, True)
        assert other.answer.request.tenant == "beta"


async def test_a_purge_by_another_server_drops_them_too() -> None:
    async with serving(audit_share=1.0) as served:
        is_kept = served.memory.purge_watch(MemoryName("acme"))
        assert is_kept()
        [resident] = served.memory.residents.all()
        resident.reset(7, resident.used_at + 1e6)
        assert not is_kept()


@pytest.mark.parametrize("where", ["redecoding_error", "closing_error"])
async def test_an_error_in_an_audit_or_at_its_end_costs_that_audit_alone(where: str) -> None:
    engine = FakeEngine()
    setattr(engine, where, RuntimeError("no luck"))
    async with serving(engine, audit_share=1.0) as served:
        await answered(served, request())
        await until(lambda: bool(served.server.audits.counts))
        assert (total(served).failed, total(served).audited) == (1, 0)
        setattr(engine, where, None)
        await answered(served, request(request_id="s"))
        await audited(served, 1)
        assert served.server.recovery.restarts == 0


async def test_an_error_while_a_request_is_chosen_or_kept_costs_its_audit_alone() -> None:
    async with serving(audit_share=1.0) as served:

        def broken() -> bool:
            raise RuntimeError("no luck")

        watch = served.memory.purge_watch
        patched: Any = served.memory
        counts = served.server.audits.counts[WorkKey("hybrid", "")]
        for of_request in (broken, lambda name: broken):
            patched.purge_watch, failed = of_request, counts.failed
            await answered(served, request())
            await until(partial(lambda before: counts.failed == before + 1, failed))
        patched.purge_watch = watch
        await answered(served, request(request_id="s"))
        assert (await audited(served, 1)).failed == 2
        assert served.server.recovery.restarts == 0


async def test_what_takes_audits_and_reports_of_the_engine_cannot_end_it() -> None:
    def broken(what: object) -> None:
        raise RuntimeError("no luck")

    async with serving(audit_share=1.0) as served:
        bridge: Any = served.server.bridge
        bridge.on_audited = bridge.reports.add = broken
        with capture_logs() as logs:
            await answered(served, request())
            await until(lambda: {"AuditResult", "EngineReport"} <= {log.get("message") for log in logs})
            await answered(served, request(request_id="s"))
        assert not bridge.stopped
        assert served.server.recovery.restarts == 0


@pytest.mark.parametrize(
    ("margin", "exact", "tie"),
    [(1e-6, False, True), (1e-6, True, False), (0.2, False, False), (math.inf, False, False)],
)
async def test_differences_are_reported(margin: float, exact: bool, tie: bool) -> None:
    engine = FakeEngine()
    engine.difference = Difference(7, margin)
    async with serving(engine, FakeModel(exact=exact), audit_share=1.0) as served:
        with capture_logs() as logs:
            await answered(served, request())
            await audited(served, 1)
        [line] = [log for log in logs if "margin" in log]
        assert line["log_level"] == ("warning" if tie else "error")
        logged = "infinite" if margin == math.inf else margin
        assert (line["tenant"], line["request_id"], line["position"], line["margin"]) == ("acme", "r", 7, logged)
        assert (line["model"], line["dtype"], line["runner"]) == ("fake", "float32", "torch")
        stub: Any = audit_pb2_grpc.AuditServiceStub(served.channel)
        report = await stub.GetAuditReport(audit_pb2.GetAuditReportRequest())
        [counts], [found] = report.counts, report.differences
        assert (counts.strategy, counts.audited, counts.tokens) == ("hybrid", 1, 7)
        assert (counts.differing, counts.ties, counts.largest_margin) == (1, int(tie), margin)
        assert sum(counts.margins) == 1
        assert len(counts.margins) == len(report.margin_bounds) + 1
        assert (found.tenant, found.request_id, found.position, found.margin) == ("acme", "r", 7, margin)
        assert found.tie == tie
        assert (report.share, report.model, report.engine_restarts) == (1.0, "fake", 0)
        command = ["audit", "--target", served.server.address]
        shown = await asyncio.to_thread(CliRunner().invoke, build_app(), command)
        assert "hybrid" in shown.stdout
        assert ("DEFECT" in shown.stdout) is not tie
        printed = await asyncio.to_thread(CliRunner().invoke, build_app(), [*command, "--json"])
        [difference] = json.loads(printed.stdout)["differences"]
        assert (difference["position"], difference["margin"]) == (7, None if margin == math.inf else margin)
