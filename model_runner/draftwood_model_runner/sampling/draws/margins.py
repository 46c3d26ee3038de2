"""How close a sample was to another one: by how much scores would have to be off. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def sampling_margin(
    scores: npt.NDArray[np.float64], kept: npt.NDArray[np.bool_], noise: npt.NDArray[np.float64], token: int
) -> float:
    """By how much scores would have to be off for `token` to win; infinite for a token with a score of -inf.

    The token must be among those that are kept, and each kept one with a larger sum of score and noise must either lose
    to it or be left out. A token crosses the edge of what is kept at its distance to the nearest one on the other side:
    exact for top-k. For top-p it is an estimate, since what counts there is the sum of all probabilities before it.

    Args:
        scores: float64[vocab], over the temperature; -inf for what is forbidden.
        kept: bool[vocab], what top-k, top-p and min-p keep.
        noise: float64[vocab], Gumbel noise.
        token: not the one that won.
    """
    if not np.isfinite(scores[token]):
        return float("inf")
    sums = scores + noise
    to_enter = 0.0 if kept[token] else float(scores[kept].min() - scores[token])
    ahead = kept & (sums > sums[token])
    if not ahead.any():
        return to_enter
    edge = float(scores[~kept].max()) if not kept.all() else -np.inf
    return max(to_enter, float(np.minimum(sums[ahead] - sums[token], scores[ahead] - edge).max()))
