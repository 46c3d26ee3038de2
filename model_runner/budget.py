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

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SMOOTHING = 0.05


class StepTimeCurve:
    """Seconds that one forward pass takes over n tokens, piecewise linear between measured sizes, never falling.

    Args:
        seconds: size -> measured seconds; at least one size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        self._sizes = np.array(sorted(seconds), np.float64)
        self._raw = np.array([seconds[int(n)] for n in self._sizes], np.float64)
        self._seconds = np.maximum.accumulate(self._raw)

    def __call__(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds for each number of tokens; beyond the largest size, along the last slope."""
        at = np.interp(tokens, self._sizes, self._seconds)
        if len(self._sizes) < 2:
            return at
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._sizes[-1] - self._sizes[-2])
        return np.asarray(at + slope * np.maximum(tokens - self._sizes[-1], 0))

    def observe(self, tokens: int, seconds: float) -> None:
        """Draws the curve a little towards a step that was just timed."""
        if tokens > self._sizes[-1]:
            return
        nearest = int(np.argmin(np.abs(self._sizes - tokens)))
        expected = float(self(np.array([tokens]))[0])
        # A step far slower than expected met another process, not another curve.
        ratio = min(seconds / expected, 2.0)
        self._raw[nearest] += _SMOOTHING * (ratio - 1.0) * self._raw[nearest]
        self._seconds = np.maximum.accumulate(self._raw)


def measure(step: Callable[[int], float], largest: int, limit: float) -> StepTimeCurve:
    """The curve of `step(n)`, which runs n tokens and returns its seconds: three runs a size, the fastest counts.

    Args:
        largest: the largest size of interest.
        limit: seconds after which no further size is begun.
    """
    step(1)
    seconds: dict[int, float] = {}
    spent = 0.0
    for size in (n for n in KNOTS if n < 2 * largest or n == 1):
        runs = [step(size) for _ in range(3)]
        seconds[size] = min(runs)
        spent += sum(runs)
        if spent > limit and len(seconds) > 1:
            break
    return StepTimeCurve(seconds)


def worthwhile_score(trees: SequenceOf[DraftTree], base_tokens: int, curve: StepTimeCurve) -> float:
    """The score below which a node is not worth its time in this step.

    Args:
        trees: what the step's sequences propose.
        base_tokens: tokens that the step runs anyway.
        curve: what a step costs.
    """
    scores = np.concatenate([tree.scores for tree in trees]) if trees else np.empty(0, np.float32)
    if scores.size == 0:
        return 0.0
    best_first = -np.sort(-scores)
    gain = len(trees) + np.concatenate([[0.0], np.cumsum(best_first, dtype=np.float64)])
    cost = curve(base_tokens + np.arange(scores.size + 1))
    count = int(np.argmax(gain / cost))
    return float(best_first[count - 1]) if count else float("inf")
