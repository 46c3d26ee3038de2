"""Experiments on live requests, through whole servers that share a store."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.json_format import ParseDict

from draftwood.admin.v1 import experiments_pb2 as xp
from draftwood.admin.v1 import tenants_pb2
from draftwood.v1 import generation_pb2 as pb
from draftwood_memory import Memory, MemoryName
from draftwood_memory.errors import StoreUnavailableError
from draftwood_memory.operations import PurgeArms
from draftwood_model_runner.errors import ModelError
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.sequence import Sequence
from draftwood_service.experiments import watch
from draftwood_service.experiments.live import LiveExperiments
from draftwood_service.rpc.tenants import Resources
from draftwood_strategies.drafting import Drafting
from draftwood_tenants.experiments import arms as counting
from draftwood_tenants.experiments.assignment import Split
from draftwood_tenants.resources import follower
from tests.memory.helpers import log_of
from tests.memory.servers import Valkey
from tests.service.fakes import FakeEngine, Served, once, rewrite, serving, until
from tests.service.rpc.test_administration import experiments, refused, tenants

CODE = grpc.StatusCode
ARMS = [{"id": "trie", "drafting": {"strategy": "trie"}}, {"id": "hybrid", "drafting": {"maxNodes": 5}}]
NAME = "experiments/x"


def fix_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a random salt, an arm may have none of a few units."""
    monkeypatch.setattr(
        "draftwood_service.rpc.experiments.secrets", SimpleNamespace(token_hex=lambda count: "5a" * count)
    )


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_salts(monkeypatch)
    monkeypatch.setattr(counting, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.05)


class FailingEngine(FakeEngine):
    """Fails for the requests of one arm."""

    failing = "x/bad"

    def _write(self, sequence: Sequence) -> StepOutput:
        if sequence.request.arm == self.failing:
            self._free(sequence)
            return StepOutput.failed(sequence, ModelError("the model failed"))
        return super()._write(sequence)


async def started(served: Served, arms: list[dict[str, Any]] | None = None, **fields: Any) -> xp.Experiment:
    """A running experiment, which the server knows."""
    given = ParseDict({"arms": arms or ARMS, **fields}, xp.Experiment())
    await experiments(served).CreateExperiment(xp.CreateExperimentRequest(experiment_id="x", experiment=given))
    found: xp.Experiment = await experiments(served).StartExperiment(xp.StartExperimentRequest(name=NAME))
    return found


async def knows(served: Served) -> None:
    """Waits until a server has read of the running experiment."""
    await until(lambda: any(experiment.started_at for experiment in catalog(served).experiments()))


def catalog(served: Served) -> Any:
    return served.server.tenants.catalog


async def asked(served: Served, request_id: str = "", tenant: str = "acme", **fields: Any) -> pb.Started:
    """Generates; the first event."""
    stop = pb.StopOptions(max_tokens=6)
    message = pb.GenerateRequest(text="hello", request_id=request_id, tenant=tenant, stop=stop, **fields)
    events = [event async for event in served.stub.GenerateStream(message)]
    return events[0].started


async def all_asked(served: Served, ids: list[str], **fields: Any) -> list[pb.Started]:
    """Four at a time, so that no queue is full."""
    found: list[pb.Started] = []
    for start in range(0, len(ids), 4):
        found += await asyncio.gather(*(asked(served, one, **fields) for one in ids[start : start + 4]))
    return found


async def read(served: Served) -> xp.ExperimentReport:
    found: xp.ExperimentReport = await experiments(served).GetExperimentReport(xp.GetExperimentReportRequest(name=NAME))
    return found


async def requests_counted(served: Served, least: int) -> list[int]:
    """Requests of each arm, once there are so many."""
    found = await once(partial(read, served), lambda report: sum(row.requests for row in report.arms) >= least)
    return [row.requests for row in found.arms]


def split_of(experiment: xp.Experiment, arms: tuple[str, ...] = ("trie", "hybrid")) -> Split:
    return Split(bytes.fromhex(experiment.salt), arms, (1.0,) * len(arms), experiment.coverage or 1.0)


def arm_of(split: Split, unit: str) -> str:
    assignment = split.assign("acme", unit)
    return "" if assignment is None else split.arms[assignment.arm]


async def test_two_servers_assign_alike_and_count_together(server: Valkey) -> None:
    ids = [f"request {number}" for number in range(60)]
    async with serving(store=server.url) as one, serving(store=server.url) as two:
        experiment = await started(one, coverage=0.9)
        await knows(two)
        split = split_of(experiment)
        first = await all_asked(one, ids[:30]) + await all_asked(two, ids[30:])
        assert [one.arm for one in first] == [arm_of(split, unit) for unit in ids]
        assert {one.experiment for one in first if one.arm} == {"x"}
        assert {one.strategy for one in first if one.arm == "trie"} == {"trie"}
        inside = [unit for unit in ids if arm_of(split, unit)]
        assert 40 < len(inside) < 60
        assert [one.arm for one in await all_asked(two, ids[:10])] == [one.arm for one in first[:10]]  # sent again
        again = sum(unit in inside for unit in ids[:10])
        for served in (one, two):
            assert sum(await requests_counted(served, len(inside) + again)) == len(inside) + again
        found = await once(partial(read, one), lambda report: report.servers == 2)
        assert [row.arm for row in found.arms] == ["trie", "hybrid"]
        assert len(inside) <= sum(row.units for row in found.arms) <= len(inside) + again  # each server has its own
        assert "Too early" in found.conclusions[0].text
    async with serving(store=server.url) as three:  # started again, with a new boot id
        assert [one.arm for one in await all_asked(three, ids[:10])] == [one.arm for one in first[:10]]
        expected = len(inside) + 2 * again
        assert sum(await requests_counted(three, expected)) == expected


async def test_a_stop_keeps_what_was_counted_last_in_the_embedded_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(counting, "POLL_SECONDS", 60.0)  # the stop alone writes
    monkeypatch.setattr(follower, "POLL_SECONDS", 0.01)  # a look at a store that has gone is a warning
    settings: dict[str, Any] = {"store": "embedded", "store_folder": tmp_path / "s", "drain_grace": 20.0}
    gc.collect()
    caplog.clear()  # of what earlier tests left
    async with serving(**settings) as one:
        await started(one)
        await all_asked(one, ["1", "2", "3"])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    async with serving(**settings) as two:
        assert sum(row.requests for row in (await read(two)).arms) == 3


async def test_overrides_other_tenants_and_requests_without_a_session_are_in_no_arm(served: Served) -> None:
    experiment = await started(served, tenants=["acme"], unit="EXPERIMENT_UNIT_SESSION")
    split = split_of(experiment)
    for overridden in ({"strategy": "trie"}, {"max_nodes": 3}, {"enabled": False}):
        assert not (await asked(served, session="s", drafting=pb.DraftOptions(**overridden))).experiment
    assert not (await asked(served, "id")).experiment
    assert not (await asked(served, "id", "umbrella", session="s")).experiment
    for session in ("a", "b", "c", "d"):
        arms = {(await asked(served, str(number), session=session)).arm for number in range(2)}
        assert arms == {arm_of(split, session)}
    assert (await asked(served, session="s", drafting=pb.DraftOptions(learn=False))).arm
    assert sum(await requests_counted(served, 9)) == 9
    assert sum(row.units for row in (await read(served)).arms) == 5
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asked(served, session="x" * 300)
    assert "session" in str(error.value.details())


async def test_an_arms_drafting_replaces_the_tenants() -> None:
    async with serving(max_draft_nodes=32) as served:
        given = tenants_pb2.Tenant(drafting=tenants_pb2.DraftConfig(strategy="jacobi", max_nodes=3))
        create = tenants_pb2.CreateTenantRequest(tenant_id="acme", tenant=given)
        await tenants(served).CreateTenant(create)
        drafting = {"strategy": "trie", "options": {"branch_length": 7}, "maxNodes": 9}
        arms = [{"id": "off", "drafting": {"maxNodes": 0}}, {"id": "short", "drafting": drafting}]
        arms[1]["memory"] = "ARM_MEMORY_FORKED"
        await started(served, arms)
        await all_asked(served, [str(number) for number in range(16)])
        await asked(served, "own", drafting=pb.DraftOptions(max_nodes=2))
    requests = [sequence.request for sequence in served.engine.added]
    assert {(request.arm, request.drafting, request.memory.forked) for request in requests} == {
        ("x/off", Drafting("hybrid", (), 0), False),
        ("x/short", Drafting("trie", (("branch_length", 7),), 9), True),
        ("", Drafting("jacobi", (), 2), False),
    }


THREE: list[dict[str, Any]] = [{"id": "trie"}, {"id": "bad"}, {"id": "good", "drafting": {"maxNodes": 5}}]


async def provoke(served: Served, experiment: xp.Experiment, arms: tuple[str, ...]) -> None:
    """Sends requests until 45 of the bad arm have failed; 36 are enough to stop it."""
    split, failed = split_of(experiment, arms), 0
    for unit in map(str, range(1000)):
        if arm_of(split, unit) != "bad":
            await asked(served, unit)
            continue
        with suppress(grpc.aio.AioRpcError):
            assert (await asked(served, unit)).arm != "bad"
        failed += 1
        if failed == 45:
            return


async def stopped(served: Served, arms: bool = True) -> xp.Experiment:
    """The experiment once it has a stopped arm, or none."""
    get = partial(experiments(served).GetExperiment, xp.GetExperimentRequest(name=NAME))
    return await once(get, lambda found: bool(found.stopped_arms) == arms)


async def test_a_guardrail_stops_an_arm_that_errs(server: Valkey) -> None:
    async with serving(FailingEngine(), store=server.url) as served, serving(store=server.url) as other:
        arms = ("trie", "bad", "good")
        experiment = await started(served, THREE)
        await provoke(served, experiment, arms)
        found = await stopped(served)
        assert [(one.arm, one.guardrail) for one in found.stopped_arms] == [("bad", "errors")]
        assert found.state == xp.EXPERIMENT_STATE_RUNNING
        before = (await read(served)).arms
        split = split_of(experiment, arms)
        units = [str(number) for number in range(1000, 1030)]
        assigned = await all_asked(served, units)
        arms_of_units = [arm_of(split, unit) for unit in units]
        assert [one.arm for one in assigned] == ["trie" if arm == "bad" else arm for arm in arms_of_units]
        own = len(units) - arms_of_units.count("bad")
        after = (await read(served)).arms
        assert [b.requests - a.requests for a, b in zip(before, after, strict=True)][1] == 0
        assert sum(row.requests for row in after) - sum(row.requests for row in before) == own
        report_now = await read(other)
        assert not report_now.sample_ratio_mismatch
        assert not report_now.violations
        assert len(report_now.history) >= 1
        change = ParseDict({"name": NAME, "arms": [*ARMS]}, xp.Experiment())
        change.arms[0].weight = 2.0
        update = experiments(served).UpdateExperiment(xp.UpdateExperimentRequest(experiment=change))
        await refused(update, CODE.FAILED_PRECONDITION, "frozen")


async def test_an_experiment_without_another_arm_stops_and_one_that_only_reports_goes_on() -> None:
    async with serving(FailingEngine()) as served:
        experiment = await started(served, THREE[:2], guardrails={"reportOnly": True})
        await provoke(served, experiment, ("trie", "bad"))
        assert [violation.guardrail for violation in (await read(served)).violations] == ["errors"]
        change = ParseDict({"name": NAME, "guardrails": {"reportOnly": False}}, xp.Experiment())
        await experiments(served).UpdateExperiment(xp.UpdateExperimentRequest(experiment=change))
        found = await stopped(served)
        assert found.state == xp.EXPERIMENT_STATE_STOPPED
        assert found.HasField("end_time")
        assert [arm.arm for arm in found.stopped_arms] == ["bad"]
        assert not (await asked(served, "later")).experiment


async def test_a_guardrail_stops_an_arm_of_the_file(server: Valkey, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(
        "experiments:\n- name: experiments/x\n  state: EXPERIMENT_STATE_RUNNING\n"
        "  arms: [{id: trie}, {id: bad}, {id: ok}]\n"
    )
    settings: dict[str, Any] = {"store": server.url, "tenants_file": path}
    async with serving(FailingEngine(), **settings) as served, serving(**settings) as other:
        experiment = await experiments(served).GetExperiment(xp.GetExperimentRequest(name=NAME))
        await provoke(served, experiment, ("trie", "bad", "ok"))
        for one in (served, other):
            assert [stop.arm for stop in (await stopped(one)).stopped_arms] == ["bad"]
        rewrite(path, path.read_text().replace("id: ok", "id: better"))  # another experiment
        await stopped(served, arms=False)


async def test_concluding_needs_a_winner_and_deleting_deletes_the_counts(server: Valkey) -> None:
    async with serving(store=server.url) as served:
        await asked(served)
        await started(served, tenants=["acme"])
        await all_asked(served, [str(number) for number in range(8)])
        await until(lambda: bool(server.client.keys("dw:{counts:*:values")))
        await until(lambda: len(tags(server, "x%2Ftrie") + tags(server, "x%2Fhybrid") + tags(server, "")) == 3)
        stub = experiments(served)
        conclude = xp.ConcludeExperimentRequest(name=NAME)
        await refused(stub.ConcludeExperiment(conclude), CODE.FAILED_PRECONDITION, "name the winner")
        conclude.winner = "hybrid"
        await stub.ConcludeExperiment(conclude)
        assert catalog(served).config_of("acme").drafting.max_nodes == 5
        assert sum(await requests_counted(served, 8)) == 8  # the counts stay
        assert tags(server, "x%2Ftrie") == tags(server, "x%2Fhybrid") == ["acme"]  # each arm has a memory of its own
        assert tags(server, "") == ["acme"]
        await stub.DeleteExperiment(xp.DeleteExperimentRequest(name=NAME))
        assert tags(server, "x%2Ftrie") == tags(server, "x%2Fhybrid") == []
        assert tags(server, "") == ["acme"]
        left = [key.decode() for key in server.client.scan_iter("dw:{counts:*")]
        assert [key for key in left if not key.endswith((":deleted", ":lease"))] == []
        await started(served)
        assert await requests_counted(served, 0) == [0, 0]


async def test_a_refused_delete_purges_nothing_and_a_failed_purge_can_be_repeated(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Resources.delete

    async def late(self: Resources[xp.Experiment], current: xp.Experiment) -> None:
        described = xp.Experiment(name=NAME, description="changed meanwhile")
        await stub.UpdateExperiment(xp.UpdateExperimentRequest(experiment=described))
        await delete(self, current)

    async def fail(self: PurgeArms, memory: Memory) -> int:
        raise StoreUnavailableError("no answer")

    async with serving(store=server.url) as served:
        stub = experiments(served)
        deletion = xp.DeleteExperimentRequest(name=NAME)
        await started(served, tenants=["acme"])
        await all_asked(served, [str(number) for number in range(8)])
        await until(lambda: tags(server, "x%2Ftrie") == tags(server, "x%2Fhybrid") == ["acme"])
        await stub.StopExperiment(xp.StopExperimentRequest(name=NAME))
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Resources, "delete", late)
            await refused(stub.DeleteExperiment(deletion), CODE.ABORTED)
        assert tags(server, "x%2Ftrie") == tags(server, "x%2Fhybrid") == ["acme"]
        with monkeypatch.context() as failing:
            failing.setattr(PurgeArms, "run", fail)
            told = "experiments/x is deleted, and the memories of its arms trie, hybrid"
            await refused(stub.DeleteExperiment(deletion), CODE.ABORTED, told)
        await refused(stub.GetExperiment(xp.GetExperimentRequest(name=NAME)), CODE.NOT_FOUND)
        again = ParseDict({"arms": ARMS}, xp.Experiment())
        await stub.CreateExperiment(xp.CreateExperimentRequest(experiment_id="x", experiment=again))
        await stub.DeleteExperiment(deletion)
        assert tags(server, "x%2Ftrie") == tags(server, "x%2Fhybrid") == []


async def test_the_arm_that_the_report_calls_better_wins(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(*_: Any) -> xp.ExperimentReport:
        return xp.ExperimentReport(better_arm="hybrid")

    monkeypatch.setattr(LiveExperiments, "report", report)
    await started(served, tenants=["acme"])
    concluded = await experiments(served).ConcludeExperiment(xp.ConcludeExperimentRequest(name=NAME))
    assert concluded.winner == "hybrid"
    assert catalog(served).config_of("acme").drafting.max_nodes == 5


@pytest.mark.parametrize(("stored", "scope"), [(True, ["acme"]), (False, [])])
async def test_the_winners_memory_becomes_the_tenants(server: Valkey, stored: bool, scope: list[str]) -> None:
    store = server.url if stored else "memory"
    async with serving(store=store) as served, serving(store=store) as other:
        servers = [served, other] if stored else [served]
        await asked(served, "before")
        await started(served, [ARMS[0], {"id": "fork", "memory": "ARM_MEMORY_FORKED"}], tenants=scope)
        if stored:
            await knows(other)
        learned = Counter(fork=1)  # what the tenant's memory had
        for one in servers:
            for answer in await all_asked(one, [f"{one is served}{number}" for number in range(8)]):
                learned[answer.arm] += 1
        await served.assert_idle()
        memory = served.memory
        await until(lambda: not any(one.memory.outbox.pending for one in servers))
        await until(lambda: all(len(log_of(memory, "acme", f"x/{arm}")) == learned[arm] for arm in ("fork", "trie")))
        won, lost = log_of(memory, "acme", "x/fork"), log_of(memory, "acme", "x/trie")
        assert len(won) > 1
        assert len(log_of(memory, "acme")) == 1
        conclude = xp.ConcludeExperimentRequest(name=NAME, winner="fork", keep_tenants=not scope, validate_only=True)
        await experiments(served).ConcludeExperiment(conclude)
        assert len(log_of(memory, "acme")) == 1
        conclude.validate_only = False
        await experiments(served).ConcludeExperiment(conclude)
        assert sorted(log_of(memory, "acme")) == sorted(won)  # the tenant's own record, and its copy in the fork, once
        assert log_of(memory, "acme", "x/trie") == lost
        for one in servers:
            await until(partial(_has, one, won))
        with memory.learning(MemoryName("acme", "x/fork")) as late:  # a request that had begun in the arm
            late.learn(np.arange(40, dtype=np.int32))
        await served.assert_idle()
        await experiments(served).DeleteExperiment(xp.DeleteExperimentRequest(name=NAME))
        assert sorted(log_of(memory, "acme")) == sorted([*won, [*range(40)]])
        assert log_of(memory, "acme", "x/fork") == log_of(memory, "acme", "x/trie") == []


def _has(served: Served, records: list[list[int]]) -> bool:
    served.memory.residents.open(MemoryName("acme"))
    served.memory.thread.wake()
    return sorted(log_of(served.memory, "acme")) == sorted(records)


def tags(server: Valkey, arm: str) -> list[str]:
    """The tenants with records in the memories of an arm."""
    parts = [key.decode().split(":") for key in server.client.scan_iter("dw:{t:*}:3:*")]
    return [tenant.removesuffix("}") for _, _, tenant, _, _, its_arm, _ in parts if its_arm == arm]
