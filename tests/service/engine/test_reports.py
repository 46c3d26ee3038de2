"""The engine's reports: once a second, beside its steps, with counts that only grow."""

from __future__ import annotations

import time

import numpy as np
import pytest

from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import EngineCounts, KVUse, Sequence, SequenceState, StateUse
from draftwood_service.engine import reports
from draftwood_service.engine.reports import (
    EngineReport,
    Load,
    ReportHistory,
    TenantReport,
    WorkCounts,
    WorkKey,
    WorkRecorder,
)
from draftwood_strategies.base import SourceCounts
from draftwood_strategies.drafting import Drafting
from tests.service.fakes import FakeEngine


def sequence(tenant: str, written: int) -> Sequence:
    """With two decoding steps, in which 3 of 5 draft tokens were accepted."""
    prompt, stop, drafting = np.arange(10, dtype=np.int32), StopParams(100), Drafting("trie", max_nodes=8)
    one = Sequence(Request(request_id="r", prompt=prompt, stop=stop, drafting=drafting, tenant=tenant))
    one.output += range(written)
    one.state = SequenceState.RUNNING
    one.stats.first_scheduled_at = 1.0
    one.stats.cached_prompt_tokens = 4
    one.stats.proposed_tokens = 6
    one.stats.record_step(2, 1, time.perf_counter())
    one.stats.record_step(3, 2, time.perf_counter())
    return one


def test_work_of_live_and_of_ended_sequences_is_counted_once() -> None:
    recorder, engine = WorkRecorder(), FakeEngine()
    first, second = sequence("a", 5), sequence("a", 7)
    waiting = Sequence(first.request)
    expected = {"sequences": 2, "prompt_tokens": 20, "cached_prompt_tokens": 8, "written_tokens": 12}
    expected |= {"decode_steps": 4, "proposed_tokens": 12, "draft_tokens": 10, "accepted_tokens": 6}
    for ended in ([], [first], [first, second]):
        for one in ended[-1:]:
            one.state = SequenceState.FINISHED
            recorder.ended(one)
        live = [one for one in (first, second, waiting) if one not in ended]
        report = recorder.report(engine, live)
        [(key, work)] = report.work.items()
        assert key == WorkKey("trie", "")
        assert {name: getattr(work, name) for name in expected} == expected
        sources = {"trie": SourceCounts(5 * len(ended), 3 * len(ended))} if ended else {}
        assert (work.accepted_by_depth, work.by_source) == ([4, 2], sources)
        assert work.acceptance_length == 3.0
        assert report.load == report.tenants["a"].load == Load(2 - len(ended), 1)
        assert report.tenants["a"].work == work


def test_active_tenants_are_reported_and_once_more_and_the_last_ones_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reports, "_MAX_COUNTED", 3)
    monkeypatch.setattr(reports, "_MAX_TENANTS", 2)
    recorder, engine, history = WorkRecorder(), FakeEngine(), ReportHistory()
    for tenant in "abcad":
        recorder.ended(sequence(tenant, 1))
    found = recorder.report(engine, [sequence("e", 3)]).tenants
    written = {name: one.work.written_tokens for name, one in found.items()}
    assert written == {"a": 2, "b": 0, "c": 1, "d": 1, "e": 3}
    assert (found["d"].load, found["e"].load) == (Load(), Load(1, 0))
    assert {name: one.load for name, one in recorder.report(engine, []).tenants.items()} == {"e": Load()}
    assert not recorder.report(engine, []).tenants
    for tenant in "abac":
        history.add(EngineReport(tenants={tenant: TenantReport(Load(1, 0), WorkCounts(written_tokens=5))}))
    assert {name: one.load.running for name, one in history.latest.tenants.items()} == {"a": 0, "c": 1}


def test_counts_go_on_after_the_engine_was_restarted() -> None:
    def report(steps: int, written: int, running: int) -> EngineReport:
        work = WorkCounts(written_tokens=written, accepted_by_depth=[written], by_source={"trie": SourceCounts(2, 1)})
        return EngineReport(
            engine=EngineCounts(steps, 0.5, 0.25),
            load=Load(running, 0),
            kv=KVUse(10, running, 1),
            states=StateUse(100 * running, 50),
            work={WorkKey("trie", ""): work},
            tenants={"a": TenantReport(Load(running, 0), work)},
        )

    history = ReportHistory()
    history.add(report(5, 10, 1))
    history.add(report(6, 12, 2))
    assert history.latest.states == StateUse(200, 50)
    history.restarted()
    assert (history.latest.load, history.latest.kv, history.latest.states) == (Load(), KVUse(10, 0, 0), StateUse())
    history.add(report(1, 3, 1))
    assert history.latest.engine == EngineCounts(7, 1.0, 0.5)
    for work in (history.latest.work[WorkKey("trie", "")], history.latest.tenants["a"].work):
        assert (work.written_tokens, work.accepted_by_depth) == (15, [15])
        assert work.by_source == {"trie": SourceCounts(4, 2)}
    history.add(EngineReport())
    assert history.latest.tenants["a"].load == Load()
    assert history.latest.work[WorkKey("trie", "")].written_tokens == 12
