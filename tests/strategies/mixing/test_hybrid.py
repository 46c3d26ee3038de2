"""The hybrid strategy: parts under one budget, calibrated, and failing."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood_strategies import (
    DraftTree,
    Feedback,
    HybridStrategy,
    TrieStrategy,
    registry,
)
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.base import Drafter, SuccessorSource
from draftwood_strategies.successors import STEADY, WIDTH, SuccessorTable
from tests.strategies.arrays import ids
from tests.strategies.fakes import FakeStrategy, hybrid_of, own_records
from tests.strategies.test_draft import paths, trees
from tests.strategies.toy_model import ToyModel, run


def first_level(tree: DraftTree) -> dict[int, float]:
    top = tree.parents == -1
    return dict(zip(tree.tokens[top].tolist(), tree.scores[top].tolist(), strict=True))


def predicted(token: int, *tokens: int) -> Feedback:
    """The model's prediction at the root alone: `tokens` are its most probable ones."""
    top = np.array([[*tokens, *range(1000, 1008 - len(tokens))]], np.int32)
    return Feedback(ids(token), ids(-1), top[:, 0], top)


@settings(max_examples=60)
@given(st.lists(trees(), min_size=2, max_size=2), st.integers(1, 40), st.lists(st.integers(0, 5), min_size=1))
def test_every_draft_is_valid_and_has_the_parts_paths(drafts: list[DraftTree], budget: int, prompt: list[int]) -> None:
    parts = [FakeStrategy(tree.pruned(budget)) for tree in drafts]
    strategy = hybrid_of(one=parts[0], two=parts[1])
    drafter = strategy.start(np.array(prompt, np.int32))
    for _ in range(3):
        tree = drafter.propose(budget)
        tree.check()
        assert strategy.failures == {}
        assert first_level(tree).keys() <= {token for part in parts for token in first_level(part.propose(1))}
        proposed = {*paths(parts[0].propose(1)), *paths(parts[1].propose(1))}
        assert len(tree) == min(budget, len(proposed))
        assert {*paths(tree)} <= proposed
        drafter.observe(ids(1, 2), None)
    drafter.close()


@pytest.mark.parametrize("sources", ["trie,recycling", "trie,recycling,jacobi", "recycling", "trie", "trie,none"])
def test_any_set_of_strategies_writes_the_same(sources: str) -> None:
    model, strategy = ToyModel(2), HybridStrategy(sources=sources)
    for seed in range(4):
        drafter = strategy.start(ids(seed, 2))
        run(model, drafter, [seed, 2], 300, 16)
        drafter.close()
    assert strategy.failures == {}


class TableOnly:
    """A strategy with nothing but a successor table, as a third party might write it."""

    top_k = WIDTH

    def __init__(self) -> None:
        self.successors = SuccessorTable(4096)

    def start(self, prompt: Int32Array) -> Drafter:
        raise AssertionError("its table is mixed instead")


@pytest.fixture
def table_only(monkeypatch: pytest.MonkeyPatch) -> TableOnly:
    """Known by its name."""
    made = TableOnly()
    monkeypatch.setattr(registry, "_factories", {**registry._factories, "table_only": lambda: made})
    return made


def test_any_strategy_with_a_successor_table_can_be_mixed_as_the_table(table_only: TableOnly) -> None:
    """It drafts what recycling's table does, is no part of its own, and counts under its own name."""
    model, made = ToyModel(), []
    for sources in ("trie,table_only", "trie,recycling"):
        strategy = HybridStrategy(sources=sources)
        drafter = strategy.start(ids(1, 2))
        made.append((run(model, drafter, [1, 2], 200, 8), drafter.by_source, [*strategy.parts]))
        assert drafter.by_source[sources.removeprefix("trie,")].accepted > 0
    assert made[0][0] == made[1][0]
    assert [*made[0][1].values()] == [*made[1][1].values()]
    assert made[0][2] == made[1][2] == ["trie"]
    assert isinstance(table_only, SuccessorSource)
    assert not isinstance(TrieStrategy(), SuccessorSource)


def test_rows_may_hold_anything(table_only: TableOnly) -> None:
    """Numbers of any size in a strategy's own entries are no index of anything."""
    strategy = HybridStrategy(sources="trie,table_only")
    run(ToyModel(), strategy.start(ids(1, 2)), [1, 2], 60, 8)
    rows = table_only.successors.rows
    rows[:, STEADY] = np.random.default_rng(1).integers(-(2**31), 2**31, rows.shape[0])
    run(ToyModel(), strategy.start(ids(1, 2)), [1, 2], 60, 8)
    assert strategy.failures == {}


def test_a_path_goes_on_from_the_table_where_the_tree_ends() -> None:
    """The part knows 1 -> 2 only, the table what comes after 2: the draft holds both in one path."""
    part = FakeStrategy(DraftTree.of([2]))
    strategy = hybrid_of("recycling", part=part)
    for _ in range(30):
        drafter = strategy.start(ids(1))
        drafter.propose(2)
        drafter.observe(ids(2), None)
        drafter.propose(2)
        drafter.observe(ids(3), predicted(2, 3))
    assert (2, 3) in paths(strategy.start(ids(1)).propose(2))


def test_two_parts_that_agree_score_higher_than_one() -> None:
    one, two = (FakeStrategy(DraftTree.of([7, 8], [-1, -1], [0.5, 0.3])) for _ in range(2))
    alone = first_level(hybrid_of(part=one).start(ids(1)).propose(8))
    both = first_level(hybrid_of(one=one, two=two).start(ids(1)).propose(8))
    assert both[7] / both[8] > 1.2 * alone[7] / alone[8]


def test_nodes_go_to_the_part_that_is_accepted() -> None:
    wrong = FakeStrategy(DraftTree.of([50, 51, 52, 53], scores=[0.9, 0.8, 0.7, 0.6]))
    strategy = hybrid_of(wrong=wrong, right=FakeStrategy(DraftTree.of([7, 8], scores=[0.5, 0.3])))
    drafter = strategy.start(ids(1))
    for _ in range(300):
        drafter.propose(2)
        drafter.observe(ids(7, 8, 9), None)
    assert drafter.propose(2).tokens.tolist() == [7, 8]
    assert drafter.by_source["right"].accepted == 600
    assert sum(counts.accepted for counts in drafter.by_source.values()) == 600


@pytest.mark.parametrize("call", ["start", "propose", "observe", "close"])
def test_a_part_that_raises_is_dropped_alone_logged_and_counted(call: str, caplog: pytest.LogCaptureFixture) -> None:
    model, bad = ToyModel(), FakeStrategy(raises_in=call)
    strategy = hybrid_of("recycling", bad=bad)
    with caplog.at_level(logging.ERROR):
        drafter = strategy.start(ids(1, 2))
        run(model, drafter, [1, 2], 400, 8)
        drafter.close()
    assert strategy.failures == {"bad": 1}
    dropped = f"'bad' is dropped for one sequence: {call} raised"
    assert [dropped in record.message for record in own_records(caplog)] == [True]
    assert call == "close" or bad.proposed <= 1
    assert bad.closed == (0 if call == "start" else 1)
    steps = run(model, strategy.start(ids(1, 2)), [1, 2], 400, 8)
    assert np.mean(steps[-10:]) > 4, "recycling went on"


@pytest.mark.parametrize("tree", [None, DraftTree.of(range(9))], ids=["none", "too many nodes"])
def test_a_malformed_tree_drops_the_part(tree: object) -> None:
    bad = FakeStrategy()
    bad.tree = tree
    strategy = hybrid_of("recycling", bad=bad)
    drafter = strategy.start(ids(1, 2))
    for _ in range(2):
        drafter.propose(8).check()
        drafter.observe(ids(3), predicted(2, 3))
    assert strategy.failures == {"bad": 1}
    assert (bad.proposed, bad.closed) == (1, 1)


def test_each_part_gets_feedback_with_its_own_top_k() -> None:
    none, three = FakeStrategy(top_k=0), FakeStrategy(top_k=3)
    strategy = hybrid_of("recycling", no_top_k=none, top_3=three)
    assert strategy.top_k == 8
    drafter = strategy.start(ids(1))
    drafter.propose(4)
    drafter.observe(ids(5), predicted(1, 5, 6, 7, 8))
    assert none.feedback is not None
    assert three.feedback is not None
    assert none.feedback.top_tokens is None
    assert three.feedback.top_tokens is not None
    assert three.feedback.top_tokens.tolist() == [[5, 6, 7]]


def test_it_learns_as_the_trie_does() -> None:
    strategy, text = HybridStrategy(), np.arange(100, 140, dtype=np.int32)
    empty = strategy.nbytes
    strategy.learn(text)
    assert strategy.tokens == 40
    strategy.learn(np.arange(5000, dtype=np.int32))
    assert strategy.tokens == 5040
    assert strategy.nbytes > empty > 0
    assert [found.shape[0] for found in strategy.sequences()] == [40, 5000]
    drafter = strategy.start(ids(5))
    drafter.observe(text[:5], None)
    assert paths(DraftTree.of(text[5:13])).keys() <= paths(drafter.propose(16)).keys()


def test_sources_that_cannot_be_mixed_are_refused(table_only: TableOnly, monkeypatch: pytest.MonkeyPatch) -> None:
    five = dict.fromkeys("abcde", FakeStrategy)
    monkeypatch.setattr(registry, "_factories", {**registry._factories, **five})

    def refused(sources: str, problem: str) -> None:
        with pytest.raises(ValueError, match=f"sources: {problem}"):
            HybridStrategy(sources=sources)

    refused("a,b,c,d,e", "'a,b,c,d,e' names more than 4 strategies that draft trees")
    refused("table_only,recycling", "table_only and recycling have a successor table each; one can be")
    table_only.top_k = 4
    refused("trie,table_only", "'table_only' has a successor table, so its top_k must be at least 8")
    table_only.top_k, table_only.successors = WIDTH, SimpleNamespace(rows=None)  # type: ignore[assignment]
    refused("trie,table_only", "'table_only': its successors must be a SuccessorTable")


def test_options_go_to_the_parts_that_have_them() -> None:
    parts: dict[str, Any] = HybridStrategy(sources="trie, recycling ,jacobi", branch_length=5, window=3).parts
    assert (parts["trie"].options.branch_length, parts["jacobi"].options.window) == (5, 3)
    with pytest.raises(TypeError, match="none of the sources trie, recycling has an option 'window'"):
        HybridStrategy(window=3)
