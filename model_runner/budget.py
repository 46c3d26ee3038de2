"""How many draft nodes a step verifies: where expected tokens per second are highest. No torch.

The choice is that of vLLM's adaptive verification, carried over to trees: sort the scores of all sequences' nodes,
and take as many as maximise (sequences + sum of the best scores) / step time. Scores never grow along a path, so the
best nodes are a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from strategies import DraftTree


def worthwhile_score(
    trees: SequenceOf[DraftTree], base_tokens: int, step_time: Callable[[npt.ArrayLike], npt.NDArray[np.float64]]
) -> float:
    """The score below which a node is not worth its time in this step.

    Args:
        trees: what the step's sequences propose.
        base_tokens: tokens that the step runs anyway.
        step_time: number of tokens -> seconds that the step takes.
    """
    drafted = [tree.scores for tree in trees if len(tree)]
    if not drafted:
        return 0.0
    best_first = np.sort(drafted[0] if len(drafted) == 1 else np.concatenate(drafted))[::-1]
    cost = step_time(np.arange(base_tokens, base_tokens + best_first.size + 1))
    rates = (best_first.cumsum(dtype=np.float64) + len(trees)) / cost[1:]
    best = int(rates.argmax())
    return float(best_first[best]) if rates[best] > len(trees) / cost[0] else float("inf")
