"""The watch of running experiments when the store, or what it holds, fails: it goes on, and the log says so once."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_memory.errors import StoreUnavailableError
from draftwood_service.experiments import watch as watch_module
from draftwood_service.experiments.report import CountReader
from draftwood_service.experiments.watch import Watch
from draftwood_tenants.experiments.arms import Running
from draftwood_tenants.experiments.definition import ExperimentConfig, ExperimentState
from draftwood_tenants.experiments.store import InProcessCounts
from tests.service.experiments.test_store import EXPERIMENT, process

RUNNING = replace(EXPERIMENT.config, state=ExperimentState.RUNNING)
TARGET = Running.of(RUNNING).target
AWAY = StoreUnavailableError("the store is away")


class Failing(InProcessCounts):
    """Raises what is set as `error`, if anything, where a look begins."""

    error: Exception | None = None

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        if self.error is not None:
            raise self.error
        return True


class Experiments:
    """A catalog of one running experiment, and of one that was stopped."""

    def experiments(self) -> Iterable[ExperimentConfig]:
        return RUNNING, replace(RUNNING, name="stopped", state=ExperimentState.STOPPED)


def watch_of(store: InProcessCounts) -> Watch:
    async def stop(experiment: Running, found: Iterable[pb.StoppedArm]) -> None:
        raise AssertionError("no guardrail is broken")

    catalog: Any = Experiments()
    return Watch(store, CountReader(store, process(store, "watching")), catalog, "watching", stop)


async def test_an_outage_is_logged_once_another_error_each_time_and_the_next_look_succeeds() -> None:
    store, bug = Failing(), RuntimeError("a bug")
    watch = watch_of(store)
    with capture_logs() as logs:
        for store.error in (AWAY, AWAY, None, AWAY, bug, bug, AWAY):
            await watch.look()
    assert {line["event"] for line in logs} == {"experiments cannot be watched"}
    assert [line["log_level"] for line in logs] == ["warning", "warning", "error", "error", "warning"]
    assert logs[0]["problem"] == "the store is away"
    store.error = None
    await watch.look()
    assert len(await watch.points(Running.of(RUNNING))) == 1
    assert await watch.points(Running.of(replace(RUNNING, name="stopped"))) == []


@pytest.mark.parametrize(
    "kept",
    [
        b"damaged",
        zlib.compress(b"\xff" * 9),
        watch_module.encode([pb.ReportPoint(comparisons=[pb.ArmComparison(arm="x" * 20_000)])]),
    ],
    ids=["not compressed", "no message", "too large"],
)
async def test_a_history_that_cannot_be_read_is_logged_and_begins_anew(
    kept: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "_MAX_BYTES", 10_000)
    store = InProcessCounts()
    await store.write_history(TARGET, kept)
    watch = watch_of(store)
    with capture_logs() as logs:
        assert await watch.points(Running.of(RUNNING)) == []
    assert [(line["event"], line["log_level"], line["experiment"]) for line in logs] == [
        ("looks at an experiment are lost", "error", "x")
    ]
    await watch.look()
    with capture_logs() as logs:
        assert len(await watch.points(Running.of(RUNNING))) == 1
    assert logs == []


async def test_of_many_looks_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "_MAX_LOOKS", 2)
    monkeypatch.setattr(watch_module, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(watch_module, "SHARE_OF_AGE", 0.0)
    watch = watch_of(InProcessCounts())
    looks = []
    for _ in range(4):
        await watch.look()
        looks.append([point.look_time.ToNanoseconds() for point in await watch.points(Running.of(RUNNING))])
    assert [len(look) for look in looks] == [1, 2, 2, 2]
    assert (looks[2][0], looks[3][0]) == (looks[1][1], looks[2][1])
