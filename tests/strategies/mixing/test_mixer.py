"""The mixture: its gradient is a gradient, and its probabilities become acceptance rates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood_strategies import DraftTree, Feedback
from draftwood_strategies.mixing.candidates import (
    SOURCES,
    Weights,
    chance_bin,
    level_of,
    prior_weights,
    to_probabilities,
)
from draftwood_strategies.mixing.learning import ACCEPTED
from draftwood_strategies.mixing.mixture import Mixture, MixtureDrafter
from draftwood_strategies.successors import SuccessorTable
from tests.strategies.arrays import ids
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


def test_probabilities_are_a_softmax() -> None:
    logits: Any = np.random.default_rng(1).normal(0.0, 30.0, 7)
    found = np.empty(7)
    to_probabilities(logits, 7, found)
    weights = np.exp(logits - logits.max())
    assert found == pytest.approx(weights / weights.sum())


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


def test_nodes_count_for_a_source_that_has_the_token() -> None:
    mixture = Mixture(SuccessorTable(4096))
    sequence = MixtureDrafter(mixture, ids(1))
    sequence.draft([DraftTree.of([5, 6], [-1, 0], [0.9, 0.8]), DraftTree.of([9], scores=[0.9])], 8)
    sequence.observe(ids(5, 6, 7), None)
    assert sequence.counts[ACCEPTED].tolist()[:2] == [2, 0]
    sequence.draft([], 8)
    sequence.observe(ids(1), Feedback(ids(7), ids(-1), ids(1), np.arange(8, dtype=np.int32)[None]))
    sequence.draft([], 8)
    sequence.observe(ids(3), Feedback(ids(1), ids(-1), ids(3), np.arange(8, dtype=np.int32)[None]))
    unknown = sequence.draft([], 8)
    assert unknown.scores.max() == pytest.approx(0.07), "the table has no row for 3, so the nodes are filled ones"


def test_weights_stay_bounded_however_long_the_traffic() -> None:
    mixture = Mixture(None)
    sequence = MixtureDrafter(mixture, ids(1))
    for _ in range(4000):
        sequence.draft([DraftTree.of([7], scores=[0.99])], 4)
        sequence.observe(ids(8), None)
    for name, weights in mixture.weights._asdict().items():
        assert np.isfinite(weights).all()
        assert name == "seen" or np.abs(weights).max() <= 8.0


def test_the_first_tokens_count_more_than_later_ones() -> None:
    """So the weights adapt soon to text that the prior was not fitted to."""

    def step(seen: float) -> float:
        mixture = Mixture(None)
        mixture.weights.seen[:] = seen
        sequence, before = MixtureDrafter(mixture, ids(1)), mixture.weights.escapes.copy()
        sequence.draft([DraftTree.of([7], scores=[0.9])], 4)
        sequence.observe(ids(8), None)
        assert mixture.weights.seen.sum() == pytest.approx(seen * mixture.weights.seen.size + 1)
        return float((mixture.weights.escapes - before).max())

    later = step(1e6)
    assert later > 0
    assert step(0) == pytest.approx(5 * later, rel=0.01)
    assert step(40) == pytest.approx(3 * later, rel=0.01)


def test_bins_cover_all_probabilities_in_order() -> None:
    chances = np.concatenate([[1e-4], np.linspace(0.001, 0.999, 200), [1.0]])
    for bin_of in (chance_bin, level_of):
        bins = [int(bin_of(chance)) for chance in chances]
        assert bins == sorted(bins)
    assert (chance_bin(1e-4), chance_bin(1.0)) == (0, 7)
    assert (level_of(0.0), level_of(1.0)) == (0, 3)


def test_the_prior_prefers_better_ranks_and_steadier_rows() -> None:
    prior = prior_weights()
    assert (np.diff(prior.ranks[:, 1:, 0], axis=-1) <= 0).all()
    assert (np.diff(prior.ranks[:, 1:, 0, :, 0], axis=-1) > 0).all()
    assert prior.trust.shape[0] == SOURCES
