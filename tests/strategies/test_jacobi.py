"""The jacobi strategy, against a plain implementation of the published algorithm."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood_strategies import DraftTree, Feedback, JacobiStrategy
from draftwood_strategies.jacobi import JacobiDrafter, NgramPool
from tests.strategies.arrays import ids
from tests.strategies.toy_model import VOCAB, ToyModel, run

Model = Callable[[list[int]], int]


class Published:
    """Lookahead Decoding, greedy, one sequence, level by level as the paper draws it; the model runs once for every
    token of the window, on the text that this token sees."""

    def __init__(self, window: int, n: int, guesses: int, prompt: list[int], first_level: list[int]) -> None:
        self.w, self.n, self.g = window, n, guesses
        self.text = [*prompt]
        self.levels = [[*first_level]]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        for start in range(len(prompt) - n + 1):
            self._remember(prompt[start], tuple(prompt[start + 1 : start + n]))

    def step(self, model: Model) -> list[int]:
        current = self.text[-1]
        found = self._verify(model, self.pool.get(current, []))
        newest = self.levels[-1]
        predicted = [model(self.text + self._seen_by(len(self.levels) - 1, i)) for i in range(len(newest))]
        if len(self.levels) == 1:
            self.levels = [self.levels[0][1:], predicted]
        elif len(self.levels) < self.n - 1:
            self.levels = [level[1:] for level in self.levels] + [predicted[1:]]
        else:
            for i in range(self.w):
                key = current if i == 0 else self.levels[0][i - 1]
                self._remember(key, (*(self.levels[k][i] for k in range(1, self.n - 1)), predicted[i]))
            self.levels[0] = self.levels[1][1:]
            for k in range(1, self.n - 2):
                self.levels[k] = self.levels[k + 1]
            self.levels[self.n - 2] = predicted
        self.text += found
        return found

    def _seen_by(self, level: int, column: int) -> list[int]:
        """The window's tokens that one of its tokens sees, itself the last."""
        if level == 0:
            return self.levels[0][: column + 1]
        return self.levels[0][:column] + [self.levels[k][column] for k in range(1, level + 1)]

    def _verify(self, model: Model, guesses: list[tuple[int, ...]]) -> list[int]:
        """The longest right beginning of any guess, and the model's token after it."""
        best: list[int] = []
        for guess in guesses:
            right: list[int] = []
            for token in guess:
                if token != model(self.text + right):
                    break
                right.append(token)
            best = max(best, right, key=len)
        return [*best, model(self.text + best)]

    def _remember(self, key: int, rest: tuple[int, ...]) -> None:
        known = [one for one in self.pool.get(key, []) if one != rest]
        self.pool[key] = [*known, rest][-self.g :]


def pool_of(drafter: JacobiDrafter) -> dict[int, list[tuple[int, ...]]]:
    return {token: rests for token in range(VOCAB) if (rests := drafter.pool.after(token))}


@settings(max_examples=30)
@given(
    window=st.integers(1, 6),
    n=st.integers(3, 6),
    guesses=st.integers(1, 4),
    prompt=st.lists(st.integers(0, 4), min_size=1, max_size=20),
    seed=st.integers(0, 5),
)
def test_it_is_the_published_algorithm(window: int, n: int, guesses: int, prompt: list[int], seed: int) -> None:
    model = ToyModel(seed, vocab=5)
    drafter = JacobiStrategy(window=window, ngram=n, guesses=guesses).start(np.array(prompt, np.int32))
    published = Published(window, n, guesses, prompt, [])
    for step in range(25):
        tree = drafter.propose(1000)
        tree.check(vocab_size=5)
        assert drafter.window is not None
        if step == 0:
            assert len(drafter.window.levels[0]) == window + n - 3
            assert set(drafter.window.levels[0]) <= set(prompt)
            published.levels = [[*drafter.window.levels[0]]]
        text = [*published.text]
        found = published.step(lambda text: int(model.top(text)[0]))
        accepted, feedback = model.verify(text, tree, top_k=0)
        # The window's own paths are verified too, so a step may find more than the published one, never less.
        assert accepted[: len(found)] == found
        drafter.observe(np.array(found, np.int32), feedback)
        assert drafter.window.levels == published.levels
        assert pool_of(drafter) == published.pool


def test_it_drafts_for_a_model_that_repeats_itself_and_learns_what_guesses_are_worth() -> None:
    model, strategy = ToyModel(1, vocab=6), JacobiStrategy()
    run(model, strategy.start(ids(1, 2)), [1, 2], 200, 128, top_k=0)
    steps = run(model, strategy.start(ids(1, 2)), [1, 2], 200, 128, top_k=0)
    assert np.mean(steps) > 3.0
    assert max(steps) >= 5, "all four tokens of a guess and the model's own"
    assert strategy.rates.first[0] > 0.3
    assert strategy.nbytes > 0


@pytest.mark.parametrize("budget", [1, 6, 16, 200])
def test_the_budget_bounds_the_draft_and_the_window(budget: int) -> None:
    strategy = JacobiStrategy()
    drafter = strategy.start(np.arange(20, dtype=np.int32))
    columns = 0 if drafter.propose(budget) is None or drafter.window is None else drafter.window.columns
    assert columns == min(10, (budget // 2 + 1) // 4)
    model = ToyModel(2)
    run(model, strategy.start(ids(3, 4)), [3, 4], 60, budget, top_k=0)


def test_a_window_that_was_pruned_away_waits_and_one_that_lost_columns_goes_on() -> None:
    prompt = ids(*range(8))
    model, strategy = ToyModel(), JacobiStrategy(window=4, ngram=4)
    drafter = strategy.start(prompt)
    tree = drafter.propose(64)
    assert drafter.window is not None
    before = [[*level] for level in drafter.window.levels]
    text = prompt.tolist()
    accepted, feedback = model.verify(text, DraftTree.of([]))
    drafter.observe(np.array(accepted, np.int32), feedback)
    assert drafter.window.levels == before
    text += accepted
    for kept in (3, 2, 5, 9, 9, 9, 9):
        tree = drafter.propose(64)
        part = DraftTree(tree.tokens[:kept], tree.parents[:kept], tree.scores[:kept])
        accepted, feedback = model.verify(text, part)
        drafter.observe(np.array(accepted, np.int32), feedback)
        text += accepted
    assert [len(level) for level in drafter.window.levels] == [3, 4, 4]
    in_text = {tuple(text[i : i + 4]) for i in range(len(text))}
    model_made = {(key, *rest) for key, rests in pool_of(drafter).items() for rest in rests} - in_text
    for gram in model_made:
        assert gram[-1] in [int(model.top([before, *gram[:-1]])[0]) for before in range(VOCAB)]


def test_a_tenants_sequences_share_what_windows_found_and_no_prompt() -> None:
    model, strategy = ToyModel(1, vocab=6), JacobiStrategy()
    run(model, strategy.start(ids(1, 2)), [1, 2], 100, 128, top_k=0)
    strategy.start(np.arange(1000, 1020, dtype=np.int32)).propose(64)
    assert len(strategy.pool) > 0
    assert not any(strategy.pool.after(token) for token in range(1000, 1020))
    fresh = strategy.start(ids(1, 2))
    assert len(fresh.propose(128)) > len(JacobiStrategy().start(ids(1, 2)).propose(128))


def test_the_pool_keeps_the_newest() -> None:
    pool = NgramPool(guesses=2, keys=3)
    for ngram in ((1, 2, 3), (1, 4, 5), (1, 2, 3), (1, 6, 7)):
        pool.add(ngram)
    assert pool.after(1) == [(2, 3), (6, 7)]
    for key in (2, 3, 1, 4):
        pool.add((key, 9, 9))
    assert [bool(pool.after(key)) for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(pool) == 4


def test_without_feedback_it_goes_on() -> None:
    drafter = JacobiStrategy().start(ids(1, 2, 3))
    for _ in range(3):
        drafter.propose(64)
        drafter.observe(ids(4), None)
    assert isinstance(drafter.propose(64), DraftTree)
    drafter.observe(ids(5), Feedback(ids(4), ids(-1), ids(5)))
