"""What top-k, top-p and min-p keep, also of tokens that share a score: transformers' warpers, and exact sums. A token
is drawn from these alone, as if all had been given noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from draftwood_model_runner.request import SamplingParams as Draw
from draftwood_model_runner.sampling.draws import BoolArray, draw_token, gumbel_noise, kept_tokens
from draftwood_model_runner.sampling.selection import dropped_share, least_weight, token_weights
from draftwood_strategies.arrays import Float32Array

TOP_PS = [0.999, 0.95, 0.9, 0.8, 0.5, 0.1, 0.001, 1e-9]
VOCABS = [1, 20, 63, 64, 65, 300, 5_000]
"""Around the size of a block, and more tokens than there are blocks or bins."""


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


def plainly(scores: Float32Array, draw: Draw) -> tuple[BoolArray, Float32Array]:
    """The tokens that are kept, by the rule as `token_weights` states it, one after the other; and the scores over the
    temperature."""
    scores = TemperatureLogitsWarper(draw.temperature)(None, torch.from_numpy(scores)[None])[0].numpy()
    left = scores
    if draw.top_k:
        left = TopKLogitsWarper(draw.top_k)(None, torch.from_numpy(scores)[None])[0].numpy()
    kept = np.isfinite(left)
    if draw.top_p < 1.0:
        weights = [int(weight) for weight in token_weights(left)]
        limit, total = math.floor(sum(weights) * dropped_share(draw.top_p)), 0
        order = sorted(range(scores.size), key=lambda token: (left[token], token))
        for token in order[:-1]:
            total += weights[token]
            if total > limit:
                break
            kept[token] = False
    return kept & (token_weights(left) >= least_weight(draw.min_p)), scores


draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 20, 250, 4_999]),
    top_p=st.sampled_from([1.0, *TOP_PS]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0]),
)
logits = st.builds(
    tied,
    seed=st.integers(0, 2**16),
    vocab=st.sampled_from(VOCABS),
    deviation=st.sampled_from([0.01, 1.0, 4.0, 15.0]),
    masked=st.sampled_from([0.0, 0.7]),
)


@given(scores=logits, draw=draws, seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
@settings(max_examples=100, derandomize=True, deadline=None)
def test_a_token_is_drawn_from_what_the_rule_keeps(scores: Float32Array, draw: Draw, seed: int, position: int) -> None:
    kept, cooled = plainly(scores, draw)
    assert (kept_tokens(scores, draw) == kept).all()
    sums = np.where(kept, cooled.astype(np.float64) + gumbel_noise(scores.size, seed, position), -np.inf)
    assert draw_token(scores, replace(draw, seed=seed), position) == int(sums.argmax())


def test_weights_stay_what_they_are() -> None:
    """Written down once: a seed must write the same text after an upgrade, and on every device."""
    scores = np.array([0.0, -0.5, -1.0, -10.0, -23.0, -24.9, -25.0, -np.inf], np.float32)
    assert token_weights(scores).tolist() == [17179869184.0, 10420117504.0, 6320120832.0, 779964.0, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("deviation", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", TOP_PS)
def test_top_p_keeps_as_many_as_transformers(top_p: float, deviation: float) -> None:
    """Of each score as many tokens; which of them, transformers' sort leaves open. One more or less at the edge is the
    rounding of its sums, where what is left out has the probability 1 - p but for 1e-6."""
    for seed in range(20):
        scores = tied(seed, 2_000, deviation)
        expected, kept = (
            by_warper(TopPLogitsWarper(top_p), scores),
            kept_tokens(scores, Draw(1.0, 0, top_p, 0.0)),
        )
        if sorted(scores[kept]) != sorted(scores[expected]):
            weights = token_weights(scores).astype(np.float64)
            assert abs(kept.sum() - expected.sum()) <= 1
            assert weights[~kept].sum() / weights.sum() == pytest.approx(1 - top_p, abs=1e-6)


@pytest.mark.parametrize("min_p", [1.0, 0.5, 0.1, 0.01, 1e-6])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    for seed in range(20):
        for deviation in (0.01, 1.0, 4.0):
            scores = tied(seed, 2_000, deviation)
            kept = kept_tokens(scores, Draw(1.0, 0, 1.0, min_p))
            assert (kept == by_warper(MinPLogitsWarper(min_p), scores)).all()


@pytest.mark.parametrize("draw", [Draw(0.7, 0, 1.0, 0.0), Draw(0.7, 20, 0.9, 0.0), Draw(0.7, 0, 0.9, 0.1)])
def test_what_cannot_be_sampled_from_still_gives_a_token(draw: Draw) -> None:
    scores = np.full(200, -np.inf, np.float32)
    assert draw_token(scores, draw, 1) == 0
    scores[130] = 2.0
    assert np.flatnonzero(kept_tokens(scores, draw)).tolist() == [130]
    assert draw_token(scores, draw, 1) == 130
    scores[[50, 70]] = np.inf
    assert draw_token(scores, draw, 1) == 50
    assert 0 <= draw_token(np.full(200, np.nan, np.float32), draw, 1) < 200


@given(st.floats(1e-5, 1e-3), st.integers(0, 2**32), st.sampled_from([1.0, 1e-9, 1e-45]), st.sampled_from([0.0, 1e-45]))
def test_a_low_temperature_draws_the_greatest(temperature: float, seed: int, top_p: float, min_p: float) -> None:
    """Noise is below 50, so 0.05 over the temperature at most; the scores over it are far outside of float16."""
    scores = np.random.default_rng(seed).permutation(np.linspace(-1000.0, 1000.0, 300).astype(np.float32))
    draw = Draw(temperature=temperature, top_p=top_p, min_p=min_p, seed=seed)
    assert draw_token(scores, draw, seed) == scores.argmax()


@given(st.floats(0.0, 1e-5, exclude_max=True))
def test_below_the_least_temperature_decoding_is_greedy(temperature: float) -> None:
    assert Draw(temperature=temperature).temperature == 0.0


def test_noise_is_a_fixed_function_of_seed_and_position() -> None:
    """Written down once: a seed must write the same text after an upgrade."""
    assert gumbel_noise(3, seed=42, position=7).tolist() == pytest.approx([0.8400811, 2.1012643, 0.5258192], abs=1e-6)
    assert (gumbel_noise(64, 1, 2) != gumbel_noise(64, 2, 1)).all()
    assert (gumbel_noise(64, 2**64 - 1, 2) != gumbel_noise(64, 2**64 - 2, 2)).all()
    assert (gumbel_noise(100, 5, 9)[:50] == gumbel_noise(50, 5, 9)).all()


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(4096, seed, 0) for seed in range(50)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert np.isfinite(noise).all()


def test_with_a_real_vocabulary() -> None:
    """Scores without ties, as many as a model of today has."""
    scores = (np.random.default_rng(4).standard_normal(151_936) * 2.5).astype(np.float32)
    for draw in (
        Draw(0.6, 20, 0.95, 0),
        Draw(1.0, 0, 0.95, 0),
        Draw(0.6, 5_000, 0.9, 0.01),
        Draw(1.3, 0, 1.0, 0),
    ):
        kept, cooled = plainly(scores, draw)
        assert (kept_tokens(scores, draw) == kept).all()
        for seed in range(5):
            noise = gumbel_noise(scores.size, seed, 77)
            assert draw_token(scores, replace(draw, seed=seed), 77) == int(
                np.where(kept, cooled + noise, -np.inf).argmax()
            )
