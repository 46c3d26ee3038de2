"""How many draft nodes a step verifies: where expected tokens per second are highest. No torch.

The choice is that of vLLM's adaptive verification, carried over to trees: sort the scores of all sequences' nodes,
and take as many as maximise (sequences + sum of the best scores) / step time. Scores never grow along a path, so the
best nodes are a tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from strategies import DraftTree

KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_SMOOTHING = 0.05
_ROUNDS = 8


class StepTimeCurve:
    """Seconds that one forward pass takes over n tokens: linear between measured sizes.

    Two laws that noise must not break: more tokens never take less time, and never more time a token.

    Args:
        seconds: size -> measured seconds; at least one size.
    """

    def __init__(self, seconds: dict[int, float]) -> None:
        self.sizes = np.array(sorted(seconds), np.float64)
        self._measured = np.array([seconds[int(n)] for n in self.sizes], np.float64)
        self.seconds = self._lawful()

    def __call__(self, tokens: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds for each number of tokens; beyond the largest size, along the last slope."""
        tokens = np.asarray(tokens)
        at = np.interp(tokens, self.sizes, self.seconds)
        if len(self.sizes) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
            at = at + slope * np.maximum(tokens - self.sizes[-1], 0)
        return np.asarray(at)

    def observe(self, tokens: int, seconds: float) -> None:
        """Draws the curve a little towards a step that was just timed."""
        if tokens > self.sizes[-1]:
            return
        nearest = int(np.argmin(np.abs(self.sizes - tokens)))
        # A step far from what was expected met another process, not another curve.
        ratio = min(max(seconds / float(self(tokens)), 0.5), 2.0)
        self._measured[nearest] = self.seconds[nearest] * (1.0 + _SMOOTHING * (ratio - 1.0))
        self.seconds = self._lawful()

    def _lawful(self) -> npt.NDArray[np.float64]:
        per_token = np.minimum.accumulate(self._measured / self.sizes)
        return np.maximum.accumulate(per_token * self.sizes)


def measure(step: Callable[[int], float], largest: int, limit: float) -> StepTimeCurve:
    """The curve of `step(n)`, which runs n tokens and returns the seconds that it took.

    Sizes are timed in turn, round after round, and the fastest run of each counts, so that a burst of other load does
    not bend the curve.

    Args:
        largest: the largest size of interest.
        limit: seconds after which no further round begins; the first is always run whole.
    """
    sizes = [n for n in KNOTS if n < largest] + [largest]
    seconds = dict.fromkeys(sizes, float("inf"))
    step(largest)  # the first run of all pays for allocations
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        for size in sizes:
            seconds[size] = min(seconds[size], step(size))
        if time.perf_counter() - started > limit:
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
