"""How many draft nodes a step verifies: where expected tokens per second are highest. No torch.

The choice is that of vLLM's adaptive verification, carried over to trees: sort the scores of all sequences' nodes,
and take as many as maximise (tokens that the step runs anyway + sum of the best scores) / step time, or none if that
is less than 5% more than without drafts: the best of many estimates is too high where they hardly differ, and the
host's work is not in them. Scores never grow along a path, so the best nodes are a tree. A prompt's token counts like
one that is written, so drafts beside a prompt are narrow and do not delay its first token.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from draftwood_strategies.budgeting.step_time import StepSeconds
from draftwood_strategies.draft import DraftTrees, Float32Array

_LEAST_GAIN = 1.05
"""Expected tokens per second, over those without drafts, from which on nodes are taken."""


def min_worthwhile_score(
    scores: Float32Array,
    base_tokens: int,
    step_times: StepSeconds,
    exponent: float = 1.0,
) -> float:
    """The score below which a node is not worth its time in this step; infinite if none is.

    Args:
        scores: float32[n], of all nodes that the step's sequences propose.
        base_tokens: tokens that the step runs anyway.
        step_times: (n, m) -> seconds that the step takes with n, n + 1, ... m tokens, float64[m - n + 1].
        exponent: a node counts as its score to this power.
    """
    if not scores.size:
        return 0.0
    seconds = step_times(base_tokens, base_tokens + scores.size)
    return float(_min_worthwhile(np.sort(scores), base_tokens, seconds, exponent))


def with_drafts(step_times: StepSeconds, trees: DraftTrees, seconds: float) -> StepSeconds:
    """The time of a step that verifies the best nodes of trees; every further draft costs so many seconds more."""
    if not seconds or len(trees) < 2:
        return step_times
    drafts = np.repeat(np.arange(len(trees)), np.diff(trees.offsets))[np.argsort(-trees.scores, kind="stable")]
    first = np.zeros(drafts.size + 1)
    first[1 + np.unique(drafts, return_index=True)[1]] = seconds
    further = np.maximum(np.cumsum(first) - seconds, 0.0)
    return lambda fewest, most: step_times(fewest, most) + further[: most - fewest + 1]


def with_change(step_times: StepSeconds, size: int, seconds: float) -> StepSeconds:
    """The time of a step that takes so many seconds longer if its number of tokens is not `size`."""
    if not seconds:
        return step_times

    def changed(fewest: int, most: int) -> npt.NDArray[np.float64]:
        taken = step_times(fewest, most) + seconds
        if fewest <= size <= most:
            taken[size - fewest] -= seconds
        return taken

    return changed


@numba.njit(cache=True, nogil=True)
def _min_worthwhile(scores: Float32Array, base_tokens: int, seconds: npt.NDArray[np.float64], exponent: float) -> float:
    """As `min_worthwhile_score`; `scores` grow."""
    tokens, best, least = float(base_tokens), _LEAST_GAIN * base_tokens / seconds[0], np.inf
    for taken in range(1, seconds.shape[0]):
        score = scores[scores.shape[0] - taken]
        tokens += score**exponent
        if taken < scores.shape[0] and scores[scores.shape[0] - taken - 1] == score:
            continue  # equal scores are taken together, and the next node may begin a block (`StepTimes.per_padding`)
        if tokens / seconds[taken] > best:
            best, least = tokens / seconds[taken], score
    return least
