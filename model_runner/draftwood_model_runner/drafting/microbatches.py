"""Whether to compute the running sequences as two microbatches in turn: the host works on one while the device computes
the other. No torch.

A step waits for what the host does before and after it: scheduling, drafting, verification, learning. Two steps of half
of the sequences hide that time, but read the weights twice. If a step takes as long as its arithmetic, with many
sequences or many draft tokens, that costs little; if it takes as long as reading the weights, it costs nearly twice as
much. So the step-time model decides. Asynchronous scheduling (vLLM) and the overlap scheduler (SGLang) begin the next
step of all sequences beforehand and need no microbatches, but cannot draft from what the step before has written.
"""

from __future__ import annotations

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.budgeting.step_time import StepTimes

_SMOOTHING = 0.1
"""Weight of the latest step in the mean of the host's time."""
_LEAST_GAIN = 0.05
"""Share of the time of a step that two microbatches must save."""


class MicrobatchPolicy:
    """Decides before each step; one thread calls all methods.

    Args:
        step_times: the step-time model; None for no microbatches.
    """

    def __init__(self, step_times: StepTimes | None) -> None:
        self._step_times = step_times
        self._host_seconds = 0.0
        self._latest: StepBatch | None = None

    def observe(self, batch: StepBatch, host_seconds: float) -> None:
        """A step in which no prompt was read, and the seconds that the host worked before and after it."""
        if self._step_times is None:
            return
        per_row = host_seconds / batch.rows
        self._host_seconds += (_SMOOTHING if self._latest else 1.0) * (per_row - self._host_seconds)
        self._latest = batch

    def microbatch(self, running: int) -> int | None:
        """Decoding sequences of the next step at most: half of the running ones if that pays; None for all."""
        return -(-running // 2) if running >= 2 and self._pays(running) else None

    def _pays(self, running: int) -> bool:
        if self._step_times is None or self._latest is None:
            return False
        tokens = self._latest.size * running // self._latest.rows
        host, context = self._host_seconds * running, self._latest.mean_context
        whole = self._step_times.at(tokens, running, context) + host
        halves = 2 * self._step_times.at(-(-tokens // 2), -(-running // 2), context)
        return max(halves, host) <= (1.0 - _LEAST_GAIN) * whole
