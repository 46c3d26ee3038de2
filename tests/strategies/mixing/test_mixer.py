"""The mixture: its gradient is a gradient, its probabilities become acceptance rates, and its nodes have sources."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies import DraftTree
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.mixing.candidates import (
    SOURCES,
    Weights,
)
from draftwood_strategies.mixing.drafting import MixedDraft
from draftwood_strategies.mixing.learning import attribute
from draftwood_strategies.mixing.mixture import Mixture, MixtureDrafter
from draftwood_strategies.successors import SuccessorTable
from tests.strategies.arrays import ids
from tests.strategies.test_draft import trees
from tests.strategies.toy_model import ToyModel

BUDGET = 32


def chance_of(tree: DraftTree, token: int) -> float:
    """The probability of a token at the root; 0 where the draft does not hold it."""
    return float(tree.scores[(tree.parents == -1) & (tree.tokens == token)].sum())


def some_tree(random: np.random.Generator) -> DraftTree:
    tokens = random.permutation(10)[:6]
    shares = np.sort(random.dirichlet(np.ones(7))[:6])[::-1]
    return DraftTree.of(tokens, np.full(6, -1), shares)


def with_table(mixture: Mixture) -> MixtureDrafter:
    """A sequence with a table that has rows for its end."""
    sequence, model, text = MixtureDrafter(mixture, ids(1)), ToyModel(3, vocab=10), [1]
    for _ in range(12):
        sequence.propose(BUDGET)
        accepted, feedback = model.verify(text, DraftTree.of([]))
        sequence.observe(np.array(accepted, np.int32), feedback)
        text += accepted
    return sequence


def test_one_step_of_learning_goes_up_the_gradient_of_the_log_probability() -> None:
    """Each weight that moved, against a finite difference of the logarithm of the probability."""
    random = np.random.default_rng(5)
    mixture = Mixture(SuccessorTable(4096))
    sequence = with_table(mixture)
    mixture.weights.seen[:] = 1e9
    trees = [some_tree(random), some_tree(random)]
    draft = sequence.draft(trees, BUDGET)
    target = int(draft.tokens[(draft.parents == -1)][1])
    tail = sequence.tail.copy()
    before = Weights(*(weights.copy() for weights in mixture.weights))
    sequence.observe(ids(target), None)
    moved = Weights(*(weights.copy() for weights in mixture.weights))

    def log_probability() -> float:
        return float(np.log(chance_of(sequence.draft(trees, BUDGET), target)))

    sequence.tail[:] = tail
    for name, rate in (("ranks", 0.03), ("escapes", 0.03), ("trust", 0.003), ("bias", 0.03)):
        old, new, live = getattr(before, name), getattr(moved, name), getattr(mixture.weights, name)
        for weights, source in zip(mixture.weights, before, strict=True):
            weights[...] = source
        changed = np.argwhere(old != new)
        assert len(changed) > 0
        for at in map(tuple, changed):
            live[at] = old[at] + 0.05
            above = log_probability()
            live[at] = old[at] - 0.05
            slope = (above - log_probability()) / 0.1
            live[at] = old[at]
            assert (new[at] - old[at]) / rate == pytest.approx(slope, abs=0.02)


@pytest.mark.parametrize(("score", "rate"), [(0.95, 0.2), (0.1, 0.7), (0.5, 0.5)])
def test_scores_become_acceptance_rates(score: float, rate: float) -> None:
    random, mixture = np.random.default_rng(2), Mixture(None)
    sequence = MixtureDrafter(mixture, ids(1))
    late = []
    for step in range(3000):
        tree = sequence.draft([DraftTree.of([7], scores=[score])], 4)
        if step >= 1000:
            late.append(chance_of(tree, 7))
        sequence.observe(ids(7 if random.random() < rate else 8), None)
    assert np.mean(late) == pytest.approx(rate, abs=0.04)


def test_weights_stay_bounded_however_long_the_traffic() -> None:
    mixture = Mixture(None)
    sequence = MixtureDrafter(mixture, ids(1))
    for _ in range(4000):
        sequence.draft([DraftTree.of([7], scores=[0.99])], 4)
        sequence.observe(ids(8), None)
    for name, weights in mixture.weights._asdict().items():
        assert np.isfinite(weights).all()
        assert name == "seen" or np.abs(weights).max() <= 8.0


def counted(drafted: DraftTree, sources: Int32Array, verified: DraftTree, accepted: Int32Array) -> list[list[int]]:
    """[source] -> nodes verified and accepted."""
    counts = np.zeros((2, SOURCES + 1), np.int64)
    tokens, parents = np.append(ids(99), verified.tokens), np.append(ids(-1), verified.parents + 1)
    draft = MixedDraft(drafted.tokens, drafted.parents, drafted.scores, sources)
    attribute(draft, len(drafted), True, tokens, parents, accepted, np.empty(len(drafted), np.int32), counts)
    found: list[list[int]] = counts.T.tolist()
    return found


@pytest.mark.parametrize(
    ("accepted", "expected"),
    [((5, 6, 9), [[2, 2], [1, 0]]), ((5, 6, 7), [[2, 2], [1, 1]]), ((9,), [[2, 0], [1, 0]])],
    ids=["two of three", "an end within the draft", "none"],
)
def test_nodes_count_for_their_source(accepted: tuple[int, ...], expected: list[list[int]]) -> None:
    chain = DraftTree.of([5, 6, 7])
    assert counted(chain, ids(0, 0, 1), chain, ids(*accepted))[:2] == expected


def test_pruned_and_foreign_nodes_are_told_apart() -> None:
    """6 was pruned; 8 -> 5 was forced by a grammar, and only looks like the root's 5."""
    drafted = DraftTree.of([5, 6, 7], [-1, -1, 0])
    verified = DraftTree.of([8, 5, 5, 7], [-1, 0, -1, 2])
    counts = counted(drafted, ids(0, 1, 2), verified, ids(8, 5, 3))
    assert counts[:3] == [[1, 0], [0, 0], [1, 0]]


@given(trees(), st.integers(0, 20))
def test_every_verified_node_of_a_draft_has_one_source(drafted: DraftTree, budget: int) -> None:
    sources = np.arange(len(drafted), dtype=np.int32) % (SOURCES + 1)
    verified = drafted.pruned(budget)
    counts = counted(drafted, sources, verified, ids(10**6))
    assert sum(count[0] for count in counts) == len(verified)
    assert all(count[1] == 0 for count in counts)
