"""What top-p and min-p keep, also of tokens that share a score: transformers' warpers, and sums of exact numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopPLogitsWarper

from draftwood_model_runner.runners.token_weights import (
    WEIGHT_BITS,
    BoolArray,
    dropped_share,
    kept_by_min_p,
    kept_by_top_p,
    token_weights,
)
from draftwood_strategies.draft import Float32Array

TOP_PS = [0.999, 0.95, 0.9, 0.8, 0.5, 0.1, 0.001, 1e-9]


def tied(seed: int, vocab: int, deviation: float, masked: float = 0.0) -> Float32Array:
    """Logits of bfloat16, many of them equal, both zeros among them; a share of -inf."""
    random = np.random.default_rng(seed)
    scores = torch.from_numpy(random.standard_normal(vocab) * deviation).bfloat16().float().numpy()
    scores[: vocab // 20] = 0.0
    scores[vocab // 20 : vocab // 10] = -0.0
    scores[1:][random.random(vocab - 1) < masked] = -np.inf
    return scores


def by_warper(warper: Any, scores: Float32Array) -> BoolArray:
    kept: BoolArray = torch.isfinite(warper(None, torch.from_numpy(scores)[None])[0]).numpy()
    return kept


def plainly(scores: Float32Array, top_p: float) -> BoolArray:
    """The rule as `token_weights` states it, one token after the other."""
    weights, kept = [int(weight) for weight in token_weights(scores)], np.ones(scores.size, np.bool_)
    limit, total = math.floor(sum(weights) * dropped_share(top_p)), 0
    order = sorted(range(scores.size), key=lambda token: (scores[token], token))
    for token in order[:-1]:
        total += weights[token]
        if total > limit:
            break
        kept[token] = False
    return kept


@given(
    seed=st.integers(0, 2**16),
    vocab=st.sampled_from([20, 300, 5_000]),
    deviation=st.sampled_from([0.01, 1.0, 4.0]),
    top_p=st.sampled_from(TOP_PS),
    masked=st.sampled_from([0.0, 0.7]),
)
@settings(max_examples=100, derandomize=True, deadline=None)
def test_top_p_is_the_rule(seed: int, vocab: int, deviation: float, top_p: float, masked: float) -> None:
    scores = tied(seed, vocab, deviation, masked)
    assert (kept_by_top_p(scores, top_p) == plainly(scores, top_p)).all()


@pytest.mark.parametrize("deviation", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", TOP_PS)
def test_top_p_keeps_as_many_as_transformers(top_p: float, deviation: float) -> None:
    """Of each score as many tokens; which of them, transformers' sort leaves open. One more or less at the edge is the
    rounding of its sums, where what is left out has the probability 1 - p but for 1e-6."""
    for seed in range(20):
        scores = tied(seed, 2_000, deviation)
        expected, kept = by_warper(TopPLogitsWarper(top_p), scores), kept_by_top_p(scores, top_p)
        if sorted(scores[kept]) != sorted(scores[expected]):
            weights = token_weights(scores).astype(np.float64)
            assert abs(kept.sum() - expected.sum()) <= 1
            assert weights[~kept].sum() / weights.sum() == pytest.approx(1 - top_p, abs=1e-6)


@pytest.mark.parametrize("deviation", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("min_p", [1.0, 0.5, 0.1, 0.01, 1e-6])
def test_min_p_keeps_what_transformers_keeps(min_p: float, deviation: float) -> None:
    for seed in range(20):
        scores = tied(seed, 2_000, deviation)
        assert (kept_by_min_p(scores, min_p) == by_warper(MinPLogitsWarper(min_p), scores)).all()


def test_of_equal_scores_those_with_the_highest_ids_are_kept() -> None:
    kept = kept_by_top_p(np.full(50, 3.5, np.float32), 0.9)
    assert np.flatnonzero(kept).tolist() == [*range(5, 50)]


def test_weights_are_probabilities() -> None:
    scores = np.linspace(-30.0, 7.0, 10_001, dtype=np.float32)
    expected = np.exp((scores - scores[-1]).astype(np.float64)) * 2.0**WEIGHT_BITS
    assert token_weights(scores) == pytest.approx(expected, rel=2e-7, abs=1.5)
    assert token_weights(scores)[-1] == 2.0**WEIGHT_BITS


def test_what_cannot_be_sampled_from_keeps_its_shape() -> None:
    scores = np.full(40, -np.inf, np.float32)
    scores[7] = 2.0
    assert np.flatnonzero(kept_by_top_p(scores, 0.9)).tolist() == [7]
    assert np.flatnonzero(kept_by_min_p(scores, 0.9)).tolist() == [7]
