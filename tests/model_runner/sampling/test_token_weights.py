"""Weights of tokens are their probabilities, as integers."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.sampling.token_weights import WEIGHT_BITS, token_weights


def test_weights_are_probabilities() -> None:
    scores = np.linspace(-30.0, 7.0, 10_001, dtype=np.float32)
    expected = np.exp((scores - scores[-1]).astype(np.float64)) * 2.0**WEIGHT_BITS
    assert token_weights(scores) == pytest.approx(expected, rel=2e-7, abs=1.5)
    assert token_weights(scores)[-1] == 2.0**WEIGHT_BITS


def test_weights_stay_what_they_are() -> None:
    """Written down once: a seed must write the same text after an upgrade, and on every device."""
    scores = np.array([0.0, -0.5, -1.0, -10.0, -23.0, -24.9, -25.0, -np.inf], np.float32)
    assert token_weights(scores).tolist() == [17179869184.0, 10420117504.0, 6320120832.0, 779964.0, 1.0, 0.0, 0.0, 0.0]
