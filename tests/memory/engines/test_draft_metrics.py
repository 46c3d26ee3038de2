"""What an engine's metrics count: by strategy and arm, under the names of our own server's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.engines import draft_metrics
from draftwood_memory.engines.draft_metrics import ARM, STRATEGY, DataPoint, Kind
from draftwood_strategies import TrieStrategy
from tests.memory.engines.test_drafts import TEXT, drafted, engine, rested
from tests.memory.engines.toy_engine import ToyEngine
from tests.memory.servers import wait_for

DOCUMENTED = re.findall(
    r"^\| `[a-z_.]+` \| `([a-z_]+)` \| (counter|gauge) \| [^|]+ \| ([^|]+) \|$",
    Path("docs/telemetry.md").read_text(),
    re.M,
)


def points(made: ToyEngine) -> list[DataPoint]:
    return made.drafts.points()


def values(made: ToyEngine, strategy: str, arm: str = "") -> dict[str, float]:
    """The values of a strategy and arm, by name."""
    wanted = {STRATEGY: strategy, ARM: arm}
    return {metric.name: value for metric, labels, value in points(made) if labels == wanted}


def test_names_kinds_and_descriptions_are_the_servers() -> None:
    ours = {
        (f"{metric.name}_total", "counter", metric.description)
        if metric.kind is Kind.COUNTER
        else (metric.name, "gauge", metric.description)
        for metric in draft_metrics.ALL_METRICS
    }
    assert len(ours) == len(draft_metrics.ALL_METRICS)
    assert {name for name, *_ in ours - set(DOCUMENTED)} == {"draftwood_drafting_up"}  # which no server needs


def test_drafts_are_counted_by_strategy_while_requests_run_and_when_they_have_ended() -> None:
    with engine(tenant="acme") as made:
        assert not [labels for _, labels, _ in points(made) if labels]  # nothing of the warm-up
        drafted(made, "1", TEXT[:4])
        accepted = drafted(made, "2", TEXT[:4])
        made.add("3", TEXT[:4], 40)
        for _ in range(3):
            made.step()
        running = values(made, "trie")
        made.run()
        rested(made)
        ended = values(made, "trie")
        drafted(made, "off", TEXT[:4], draftwood="off")
        off = values(made, "none")
    assert running["draftwood_sequences"] == ended["draftwood_sequences"] == 3
    assert 48 < running["draftwood_output_tokens"] < ended["draftwood_output_tokens"]
    assert accepted <= ended["draftwood_draft_accepted_tokens"] <= ended["draftwood_draft_tokens"]
    assert ended["draftwood_draft_tokens"] <= ended["draftwood_draft_proposed_tokens"]
    assert 0 < ended["draftwood_drafts"] < ended["draftwood_decode_steps"] < ended["draftwood_output_tokens"]
    assert 0 < ended["draftwood_draft_time_seconds"] < 10
    assert off["draftwood_sequences"] == 1
    assert off["draftwood_draft_tokens"] == off["draftwood_drafts"] == 0
    assert off["draftwood_decode_steps"] == off["draftwood_output_tokens"] >= 24


def test_a_draft_counts_as_verified_once_a_step_has_verified_it() -> None:
    with engine(tenant="acme") as made:
        drafted(made, "1", TEXT[:4])
        before, verified = values(made, "trie")["draftwood_draft_tokens"], 0
        made.add("2", TEXT[:4], 40)
        while not made.requests["2"].draft or not verified:
            verified += len(made.requests["2"].draft)
            made.step()
        made.abort("2")  # as where it ends at a stop string: what was drafted last is never verified
        rested(made)
        assert values(made, "trie")["draftwood_draft_tokens"] == before + verified


def test_a_name_that_a_caller_made_up_and_a_tenant_are_no_labels() -> None:
    with engine() as made:
        for number in range(3):
            drafted(made, f"{number}", TEXT[:4], draftwood_strategy=f"made up {number}", draftwood_tenant=f"t{number}")
        found = [labels for _, labels, _ in points(made) if labels]
    assert {tuple(sorted(labels.items())) for labels in found} == {((ARM, ""), (STRATEGY, "none"))}


def test_a_strategy_that_fails_costs_its_drafts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tenant="acme") as made:
        monkeypatch.setattr(TrieStrategy, "propose_all", None)
        assert drafted(made, "1", TEXT[:4]) == 0
        assert values(made, "trie")["draftwood_draft_disabled"] == 1
    assert "switched off" in caplog.text


def test_memory_and_store(store_is_down: str) -> None:
    with engine(store_is_down, tenant="acme") as made:
        drafted(made, "1", TEXT[:4])
        rested(made)
        wait_for(lambda: not made.drafts.memory.healthy, "the store to be missed", 20.0)
        found = {metric.name: value for metric, labels, value in points(made) if not labels}
    assert set(found) == {
        one.name for one in (*draft_metrics.MEMORY_METRICS, draft_metrics.STORE_UP, draft_metrics.DRAFTING_UP)
    }
    assert (found["draftwood_store_up"], found["draftwood_store_pending"]) == (0, 1)
    assert found["draftwood_memory_memories"] == 1
    assert {one.field for one in draft_metrics.MEMORY_METRICS} <= set(MemoryCounters.__slots__)
