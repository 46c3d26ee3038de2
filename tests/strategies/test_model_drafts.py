"""How many levels a strategy asks a model for, by what was right before."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftwood_strategies import DraftTree, create
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.base import DraftStats, ModelAsk
from draftwood_strategies.dispatch import run_together
from draftwood_strategies.draft import EMPTY_TREE, DraftTrees
from draftwood_strategies.draft_engine.controller import DraftCostModel
from draftwood_strategies.draft_engine.engine import propose_all
from draftwood_strategies.draft_engine.guard import GuardedDrafter, IndexingBudget
from draftwood_strategies.drafting import Drafting
from draftwood_strategies.model_drafts import ModelDrafter, ModelStrategy, right_levels
from draftwood_strategies.registry import offered, warm_up
from tests.strategies.draft_engine.test_guard import Asked


class Model:
    """A source whose rows write 0, 1, 2, ...; its drafts are right for `right` levels, then wrong.

    Attributes:
        share: that a level costs.
        asked: levels of the latest drafts.
        calls: how many rows each call was for.
        broken: rows for which it fails.
        error: what it raises then.
        seconds: that a call takes.
        read: tokens of each row that it has read.
        unread: rows that it does not read.
    """

    def __init__(self, right: int, share: float) -> None:
        self.right, self.share = right, share
        self.asked: list[int] = []
        self.calls: list[int] = []
        self.broken: list[Any] = []
        self.error: Exception = RuntimeError("broken model")
        self.seconds = 0.0
        self.read: dict[int, int] = {}
        self.unread: list[Any] = []

    def level_share(self, rows: int | None = None) -> float:
        return self.share

    def reads(self, row: Any) -> bool:
        return row not in self.unread

    def draft(self, rows: Sequence[Any], budgets: Int32Array, levels: Int32Array, least: Float32Array) -> DraftTrees:
        self.asked = levels.tolist()
        self.calls.append(len(rows))
        time.sleep(self.seconds)
        if any(row in self.broken for row in rows):
            raise self.error
        trees = []
        for row, depth in zip(rows, self.asked, strict=True):
            path = [row.position + i if i < self.right else 5000 + i for i in range(depth)]
            trees.append(DraftTree.of(path, scores=[0.9] * depth))
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


@pytest.mark.parametrize(("right", "share", "levels"), [(3, 0.1, 3), (0, 0.1, 0), (1, 2.5, 0)])
def test_a_model_is_asked_for_as_many_levels_as_are_right_and_worth_their_cost(
    right: int, share: float, levels: int
) -> None:
    """And asked again once its predictions of the text that it reads are right: nothing is tried."""
    model = Model(right, share)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(60):
        write(strategy, drafter, row, EMPTY_TREE, 1 + right)
    assert model.asked == [levels]
    model.right, model.share = 4, 0.1
    steps = 0
    while model.asked == [0] and steps < 400:
        write(strategy, drafter, row, EMPTY_TREE, 1)
        steps += 1
    assert steps < 400


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


def test_rows_that_the_model_does_not_read_go_without_it() -> None:
    model = Model(right=2, share=0.1)
    strategy = ModelStrategy(model)
    (first, _), (second, row) = drafter_of(strategy), drafter_of(strategy)
    model.unread = [row]
    trees = strategy.propose_all([second, first, second], np.full(3, 16, np.int32))
    assert model.calls == [1]
    assert [len(tree) > 0 for tree in trees] == [False, True, False]
    assert second.latest is None
    assert not strategy.propose_all([second], np.full(1, 16, np.int32)).tokens.size
    assert model.calls == [1]


def test_a_model_reads_where_it_may_save_more_than_reading_takes() -> None:
    """As far as is known of this tenant."""
    model = Model(right=3, share=0.1)
    strategy = ModelStrategy(model)
    assert strategy.models_for(8) == [model]
    model.share = 0.6
    assert strategy.models_for(8) == []
    drafter, row = drafter_of(strategy)
    model.share = 0.1
    for _ in range(60):
        write(strategy, drafter, row, EMPTY_TREE, 4)
    assert strategy.gains.gained[0, 1] > 0.8
    model.share = 0.6
    assert strategy.models_for(8) == [model]
    model.right, model.share = 0, 0.1
    for _ in range(400):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    assert strategy.models_for(8) == []


def test_a_model_does_not_rest_for_a_few_wrong_predictions() -> None:
    model = Model(right=0, share=0.12)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(8):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    assert strategy.models_for(1) == [model]
    for _ in range(200):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    assert strategy.models_for(1) == []


def test_what_others_promise_counts_where_nothing_reads_as_well() -> None:
    """So a model that rests while others know the text reads again once they do not."""
    model = Model(right=2, share=0.1)
    strategy = ModelStrategy(model)
    drafter, row = drafter_of(strategy)
    for _ in range(400):
        known = DraftTree.of(list(range(row.position, row.position + 8)), scores=[0.99] * 8)
        write(strategy, drafter, row, known, 9)
    assert strategy.models_for(1) == []
    model.unread = [row]
    for _ in range(400):
        write(strategy, drafter, row, EMPTY_TREE, 1)
    assert strategy.models_for(1) == [model]


def test_tenants_count_for_themselves_and_a_drafter_that_must_not_learn_counts_nothing() -> None:
    model = Model(right=0, share=0.1)
    mine, theirs = ModelStrategy(model), ModelStrategy(model)
    reading, row = mine.start_read_only(np.zeros(3, np.int32)), Row()
    reading.follow_row(row)
    for _ in range(20):
        write(mine, reading, row, EMPTY_TREE, 1)
    np.testing.assert_array_equal(mine.gains.gained, theirs.gains.gained)
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
        with offered("head", lambda **options: ModelStrategy(model, **options)):
            self.strategies: list[Any] = [create(kind) for kind in kinds]
        self.failures: Counter[str] = Counter()
        self.rows = [Row() for _ in range(len(kinds) * rows_each)]
        self.drafters: list[GuardedDrafter] = []
        for number, row in enumerate(self.rows):
            row.position = 7 * (number + 1)
            strategy, request = self.strategies[number // rows_each], Asked(Drafting("s", (), 16))
            guarded = GuardedDrafter(request, strategy, DraftStats(), 10_000, self.failures, DraftCostModel(), row=row)
            self.drafters.append(guarded)

    def propose(self) -> DraftTrees:
        asked = [drafter for drafter in self.drafters if drafter.active]
        for drafter in asked:
            while not drafter.ready(IndexingBudget()):
                pass
        return propose_all(asked, np.full(len(asked), 16, np.int32))

    @property
    def reasons(self) -> list[str]:
        return [drafter.stats.drafting_disabled_reason for drafter in self.drafters]


KINDS = ("head", "hybrid", "trie", "head", "hybrid")


def test_the_strategies_of_all_tenants_ask_a_model_in_one_call() -> None:
    model = Model(right=2, share=0.1)
    step = Step(model, KINDS, rows_each=2)
    together = step.propose()
    assert model.calls == [8]
    alone = [propose_all([drafter], np.array([16], np.int32))[0] for drafter in step.drafters]
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
    before = [drafter.stats.draft_seconds for drafter in step.drafters]
    model.seconds = 0.5
    step.propose()
    spent = [drafter.stats.draft_seconds - earlier for drafter, earlier in zip(step.drafters, before, strict=True)]
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


def test_right_levels_follow_one_path() -> None:
    tree = DraftTree.of([7, 8, 9, 9, 5], [-1, -1, 0, 1, 3], [0.5, 0.4, 0.3, 0.3, 0.2])

    def right(*written: int) -> int:
        return int(right_levels(tree.tokens, tree.parents, np.array(written, np.int32)))

    assert [right(8, 9, 5, 1), right(7, 9, 5), right(8, 9), right(4), right()] == [3, 2, 2, 0, 0]


def test_a_hybrid_has_it_as_a_source_while_it_is_offered() -> None:
    with offered("head", lambda **options: ModelStrategy(Model(1, 0.1), **options)):
        made = create("head", depth=3)
        assert isinstance(made, ModelStrategy)
        assert made.gains.gained.shape[1] == 4
        for name in ("head", "hybrid"):
            warm_up(name)
        hybrid: Any = create("hybrid", depth=3)
    assert [*hybrid.parts] == ["trie", "head"]
    assert [*create("hybrid").parts] == ["trie"]  # type: ignore[attr-defined]
