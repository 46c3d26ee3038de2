"""How many draft nodes a step verifies: where expected tokens per second are highest. No torch.

The choice is that of vLLM's adaptive verification, carried over to trees: sort the scores of all sequences' nodes,
and take as many as maximise (tokens that the step runs anyway + sum of the best scores) / step time. Scores never grow
along a path, so the best nodes are a tree. A prompt's token counts like one that is written: beside a prompt drafts are
narrow, lest its first token come late.

Where a draft costs something beside its nodes, as with attention that takes longer for a sequence with several tokens,
those sequences draft that get most for their time.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import DraftTrees, Float32Array, Int32Array
from draftwood_strategies.native import sizes_between


def worthwhile_score(
    scores: Float32Array,
    base_tokens: int,
    step_times: Callable[[int, int], npt.NDArray[np.float64]],
    exponent: float = 1.0,
) -> float:
    """The score below which a node is not worth its time in this step.

    Args:
        scores: float32[n], of all nodes that the step's sequences propose.
        base_tokens: tokens that the step runs anyway.
        step_times: (n, m) -> seconds that the step takes with n, n + 1, ... m tokens, float64[m - n + 1].
        exponent: a node counts as its score to this power.
    """
    if not scores.size:
        return 0.0
    seconds = step_times(base_tokens, base_tokens + scores.size)
    return float(_least_worthwhile(np.sort(scores), base_tokens, seconds, exponent))


def worthwhile_drafts(
    trees: DraftTrees,
    base_tokens: int,
    step_times: Callable[[int, int], npt.NDArray[np.float64]],
    of_draft: float,
) -> DraftTrees:
    """The trees, emptied where the nodes that are worth their time are not worth what a draft costs beside them.

    Args:
        base_tokens, step_times: as for `worthwhile_score`.
        of_draft: seconds that each draft adds beside its nodes.
    """
    if not trees.scores.size:
        return trees
    seconds = step_times(base_tokens, base_tokens + trees.scores.size)
    least = float(_least_worthwhile(np.sort(trees.scores), base_tokens, seconds, 1.0))
    chosen = _chosen_drafts(trees.scores, trees.begins, least, base_tokens, seconds, of_draft)
    sizes = sizes_between(trees.begins)
    if chosen[sizes > 0].all():
        return trees
    kept = np.repeat(chosen, sizes)
    begins = np.zeros_like(trees.begins)
    np.cumsum(np.where(chosen, sizes, 0), out=begins[1:])
    return DraftTrees(trees.tokens[kept], trees.parents[kept], trees.scores[kept], begins)


@numba.njit(cache=True, nogil=True)
def _chosen_drafts(
    scores: Float32Array,
    begins: Int32Array,
    least: float,
    base_tokens: int,
    seconds: npt.NDArray[np.float64],
    of_draft: float,
) -> npt.NDArray[np.bool_]:
    """bool[s], the sequences with the most expected tokens for the time of their drafts: so many that the step writes
    the most tokens per second."""
    rows = begins.shape[0] - 1
    gains, nodes = np.zeros(rows), np.zeros(rows, np.int64)
    for row in range(rows):
        for i in range(begins[row], begins[row + 1]):
            if scores[i] >= least:
                gains[row] += scores[i]
                nodes[row] += 1
    of_node = (seconds[nodes.sum()] - seconds[0]) / max(nodes.sum(), 1)
    order = np.argsort(-gains / np.maximum(of_draft + of_node * nodes, 1e-12))
    tokens, verified, best, count = float(base_tokens), 0, base_tokens / seconds[0], 0
    for taken in range(rows):
        tokens += gains[order[taken]]
        verified += nodes[order[taken]]
        rate = tokens / (seconds[verified] + of_draft * (taken + 1))
        if nodes[order[taken]] and rate > best:
            best, count = rate, taken + 1
    chosen = np.zeros(rows, np.bool_)
    chosen[order[:count]] = True
    return chosen


@numba.njit(cache=True, nogil=True)
def _least_worthwhile(
    scores: Float32Array, base_tokens: int, seconds: npt.NDArray[np.float64], exponent: float
) -> float:
    """As `worthwhile_score`; `scores` grow."""
    tokens, best, least = float(base_tokens), base_tokens / seconds[0], np.inf
    for taken in range(1, seconds.shape[0]):
        score = scores[scores.shape[0] - taken]
        tokens += score**exponent
        if tokens / seconds[taken] > best:
            best, least = tokens / seconds[taken], score
    return least
