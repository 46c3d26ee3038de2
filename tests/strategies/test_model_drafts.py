"""How many levels a strategy asks a model for, by what was right before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftwood_strategies import DraftTree, HybridStrategy, create, strategy_names
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.base import DraftStats, ModelAsk
from draftwood_strategies.dispatch import run_together
from draftwood_strategies.draft import EMPTY_TREE, DraftTrees
from draftwood_strategies.draft_engine.controller import DraftCostModel
from draftwood_strategies.draft_engine.engine import propose_all
from draftwood_strategies.draft_engine.guard import GuardedDrafter, IndexingBudget
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.model_drafts import LevelGains, ModelDrafter, ModelStrategy, promises, right_levels
from draftwood_strategies.registry import (
    UnknownStrategyError,
    check_options,
    default_sources,
    offered,
    options_of,
    warm_up,
)


class Model:
    """A source whose rows are texts; its drafts are right for `right` levels, then wrong.

    Attributes:
        share: that a level costs.
        asked: levels of the latest drafts.
        calls: how many rows each call was for.
        broken: rows for which it fails.
        error: what it raises then.
        seconds: that a call takes.
        read: tokens of each row that it has read.
    """

    def __init__(self, right: int, share: float) -> None:
        self.right, self.share = right, share
        self.asked: list[int] = []
        self.calls: list[int] = []
        self.broken: list[Any] = []
        self.error: Exception = RuntimeError("broken model")
        self.seconds = 0.0
        self.read: dict[int, int] = {}
        self.text = list(range(1000))

    def level_share(self) -> float:
        return self.share

    def draft(self, rows: Sequence[Any], budgets: Int32Array, levels: Int32Array, least: Float32Array) -> DraftTrees:
        self.asked = levels.tolist()
        self.calls.append(len(rows))
        time.sleep(self.seconds)
        if any(row in self.broken for row in rows):
            raise self.error
        trees = []
        for row, depth in zip(rows, self.asked, strict=True):
            at = row.position
            path = [self.text[at + i] if i < self.right else 5000 + i for i in range(depth)]
            trees.append(DraftTree.of(path, scores=[0.9] * depth) if depth else EMPTY_TREE)
        return DraftTrees.of(trees)

    def position(self, row: Any) -> int:
        return int(row.position)

    def agreed(self, row: Any) -> tuple[int, list[bool]]:
        first = self.read.get(id(row), 0)
        self.read[id(row)] = row.position
        return first, [self.right > 0] * (row.position - first)


class Row:
    position = 0


def write(strategy: ModelStrategy, drafter: ModelDrafter, row: Row, others: DraftTree, tokens: int) -> None:
    """A step that writes so many of the text's tokens."""
    propose(strategy, drafter, others)
    drafter.observe(np.arange(row.position, row.position + tokens, dtype=np.int32), None)
    row.position += tokens


def propose(strategy: ModelStrategy, drafter: ModelDrafter, others: DraftTree) -> None:
    run_together([strategy.propose_beside([drafter], np.array([16], np.int32), DraftTrees.of([others]))])


def drafter_of(strategy: ModelStrategy) -> tuple[ModelDrafter, Row]:
    drafter, row = strategy.start(np.zeros(3, np.int32)), Row()
    drafter.follow_row(row)
    return drafter, row


def test_a_model_that_is_right_is_asked_for_as_many_levels_as_are_right() -> None:
    model = Model(right=3, share=0.1)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(60):
        write(strategy, drafter, row, EMPTY_TREE, 4)
    assert model.asked == [3]


@pytest.mark.parametrize(("right", "share"), [(0, 0.1), (1, 2.5)])
def test_a_model_that_gains_less_than_it_costs_is_not_asked(right: int, share: float) -> None:
    model = Model(right, share)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(60):
        write(strategy, drafter, row, EMPTY_TREE, 1 + right)
    assert model.asked == [0]


def test_it_is_asked_again_once_what_it_reads_shows_that_it_is_right() -> None:
    """Nothing is tried: its predictions of the text are enough."""
    model = Model(right=0, share=0.3)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(80):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    assert model.asked == [0]
    model.right = 4
    steps = 0
    while model.asked == [0] and steps < 400:
        write(strategy, drafter, row, EMPTY_TREE, 1)
        steps += 1
    assert 0 < steps < 400


def test_where_others_promise_a_long_text_it_is_left_out_and_elsewhere_it_is_asked() -> None:
    model = Model(right=2, share=0.15)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(80):
        known = DraftTree.of(list(range(row.position, row.position + 8)), scores=[0.99] * 8)
        write(strategy, drafter, row, known, 9)
        write(strategy, drafter, row, EMPTY_TREE, 3)
    write(strategy, drafter, row, EMPTY_TREE, 3)
    assert model.asked == [2]
    propose(strategy, drafter, DraftTree.of(list(range(row.position, row.position + 8)), scores=[0.99] * 8))
    assert model.asked == [0]


def test_a_drafter_that_must_not_learn_changes_no_count() -> None:
    model = Model(right=0, share=0.1)
    strategy = ModelStrategy(model)
    before = strategy.gains.gained.copy()
    drafter, row = strategy.start_read_only(np.zeros(3, np.int32)), Row()
    drafter.follow_row(row)
    for _ in range(20):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    np.testing.assert_array_equal(strategy.gains.gained, before)


def test_tenants_count_for_themselves() -> None:
    model = Model(right=0, share=0.1)
    mine, theirs = ModelStrategy(model), ModelStrategy(model)
    drafter, row = drafter_of(mine)
    for _ in range(40):
        write(mine, drafter, row, EMPTY_TREE, 1)
    assert mine.gains.gained[0, -1] < 0.2 < theirs.gains.gained[0, -1]
    rebuilt = ModelStrategy(model)
    rebuilt.keep_learned(mine)
    assert rebuilt.gains is mine.gains


class Step:
    """Guarded drafters of several tenants, each with a strategy of its own, one of which may be a hybrid."""

    def __init__(self, model: Model, kinds: Sequence[str], rows_each: int = 1) -> None:
        self.failures: Counter[str] = Counter()
        self.rows: list[Row] = []
        self.drafters: list[GuardedDrafter] = []
        self.stats: list[DraftStats] = []
        with offered("head", lambda **options: ModelStrategy(model, **options)):
            self.strategies: list[Any] = [create(kind) for kind in kinds]
        for strategy in self.strategies:
            for _ in range(rows_each):
                self.rows.append(Row())
                self.rows[-1].position = 7 * len(self.rows)
                self.stats.append(DraftStats())
                request: Any = SimpleNamespace(
                    request_id="r", prompt=np.arange(3, dtype=np.int32), drafting=Drafting("s", (), 16), learns=True
                )
                self.drafters.append(
                    GuardedDrafter(
                        request, strategy, self.stats[-1], 10_000, self.failures, DraftCostModel(), row=self.rows[-1]
                    )
                )

    def propose(self) -> DraftTrees:
        asked = [drafter for drafter in self.drafters if drafter.active]
        for drafter in asked:
            while not drafter.ready(IndexingBudget()):
                pass
        return propose_all(asked, np.full(len(asked), 16, np.int32))

    @property
    def reasons(self) -> list[str]:
        return [stats.drafting_disabled_reason for stats in self.stats]


KINDS = ("head", "hybrid", "trie", "head", "hybrid")


def test_the_strategies_of_all_tenants_ask_a_model_in_one_call() -> None:
    model = Model(right=2, share=0.1)
    step = Step(model, KINDS, rows_each=2)
    together = step.propose()
    assert model.calls == [8]
    alone = []
    for drafter in step.drafters:
        alone.append(propose_all([drafter], np.array([16], np.int32))[0])
    for row, tree in enumerate(together):
        assert tree.tokens.tolist() == alone[row].tokens.tolist()
        assert bool(len(tree)) == (KINDS[row // 2] != "trie")
    assert model.calls == [8] + 8 * [1]
    assert step.failures == {}


def test_what_a_tenant_asks_does_not_depend_on_others() -> None:
    """Its levels come from its own counts, and it pays for its own levels only."""
    model = Model(right=0, share=0.1)
    step = Step(model, ["head", "head"])
    mine = step.strategies[0]
    drafter, row = drafter_of(mine)
    for _ in range(60):
        write(mine, drafter, row, EMPTY_TREE, 1)
    step.propose()  # the first call of a class counts for nothing
    before = [stats.draft_seconds for stats in step.stats]
    model.seconds = 0.02
    step.propose()
    spent = [stats.draft_seconds - earlier for stats, earlier in zip(step.stats, before, strict=True)]
    assert model.asked[0] == 0 < model.asked[1]
    assert spent[0] < model.seconds / 2
    assert spent[1] > model.seconds


@pytest.mark.parametrize("broken", [(0,), (1, 4), (2, 3, 5)])
def test_a_model_that_fails_for_a_row_costs_that_row_its_drafts(broken: tuple[int, ...]) -> None:
    model = Model(right=2, share=0.1)
    step = Step(model, ["head", "hybrid", "head"], rows_each=2)
    model.broken = [step.rows[row] for row in broken]
    hybrid = (2, 3)
    assert [len(tree) == 0 for tree in step.propose()] == [row in broken for row in range(6)]
    assert [bool(reason) for reason in step.reasons] == [row in broken and row not in hybrid for row in range(6)]
    assert {*step.reasons} <= {"", "propose raised RuntimeError: broken model"}
    assert step.strategies[1].failures.total() == len({*broken} & {*hybrid})
    model.calls.clear()
    step.propose()
    assert model.calls == [6 - len(broken)]


def test_a_model_that_takes_too_long_is_not_asked_again() -> None:
    model = Model(right=2, share=0.1)
    step = Step(model, ["head", "hybrid", "head", "trie"])
    model.broken, model.error = step.rows[:1], TimeoutError("too long")
    assert step.propose().tokens.size == 0
    assert model.calls == [3]
    assert [bool(reason) for reason in step.reasons] == [True, False, True, False]
    assert step.strategies[1].failures == {"head": 1}
    step.propose()
    assert model.calls == [3]


@pytest.mark.parametrize("asks", ["nothing that can be answered", "after the answer"])
def test_a_strategy_that_fails_while_it_asks_costs_no_other_its_drafts(
    asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(right=2, share=0.1)
    step = Step(model, ["head", "head", "hybrid"])

    def faulty(drafters: Any, budgets: Int32Array) -> Any:
        if asks == "after the answer":
            yield from ModelStrategy.propose_asking(step.strategies[1], drafters, budgets)
            raise ValueError("broken strategy")
        yield ModelAsk(model, [], budgets, budgets, budgets.astype(np.float32))

    monkeypatch.setattr(step.strategies[1], "propose_asking", faulty)
    assert [len(tree) == 0 for tree in step.propose()] == [False, True, False]
    assert [bool(reason) for reason in step.reasons] == [False, True, False]


def test_gains_are_bounded_by_what_others_have_right_as_well() -> None:
    gains = LevelGains(4)
    for _ in range(400):
        gains.learn(0, 4, others=4, own=4)
        gains.learn(1, 4, others=0, own=4)
    assert gains.gained[0, -1] < 0.1
    assert gains.gained[1, -1] > 3.9


def test_promises_are_the_sums_of_scores() -> None:
    trees = DraftTrees.of([DraftTree.of([1, 2], [-1, 0], [0.5, 0.25]), EMPTY_TREE, DraftTree.of([3], scores=[1.0])])
    np.testing.assert_allclose(promises(trees), [0.75, 0.0, 1.0])
    np.testing.assert_allclose(promises(DraftTrees.empty(2)), [0.0, 0.0])


def test_right_levels_follow_one_path() -> None:
    tree = DraftTree.of([7, 8, 9, 9, 5], [-1, -1, 0, 1, 3], [0.5, 0.4, 0.3, 0.3, 0.2])

    def right(*written: int) -> int:
        return int(right_levels(tree.tokens, tree.parents, np.array(written, np.int32)))

    assert [right(8, 9, 5, 1), right(7, 9, 5), right(8, 9), right(4), right()] == [3, 2, 2, 0, 0]


def test_its_strategies_exist_while_they_are_offered_and_are_sources_of_a_hybrid_then() -> None:
    with pytest.raises(UnknownStrategyError):
        create("head")
    with offered("head", lambda **options: ModelStrategy(Model(1, 0.1), **options)):
        assert "head" in strategy_names()
        assert default_sources() == "trie,recycling,head"
        made = create("head", depth=3)
        assert isinstance(made, ModelStrategy)
        assert made.gains.gained.shape[1] == 4
        assert {"depth", "capacity_tokens"} <= options_of("hybrid").keys()
        assert check_options("hybrid", {"depth": 2}) == {"depth": 2}
        with pytest.raises(ValueError, match="depth"):
            create("head", depth=99)
        with pytest.raises(ValueError, match="taken"), offered("trie", ModelStrategy):
            pass
        warm_up("head")
        warm_up("hybrid")
        hybrid = create("hybrid")
    assert isinstance(hybrid, HybridStrategy)
    assert [*hybrid.parts] == ["trie", "head"]
    assert "head" not in strategy_names()
    assert default_sources() == "trie,recycling"
