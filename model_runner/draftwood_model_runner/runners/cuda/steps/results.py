"""What a step leaves on the host, and the step itself while the device computes it."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.runners.base import Logprobs, Predictions
from draftwood_model_runner.runners.device_errors import device_errors
from draftwood_strategies.draft import Int32Array

TOP = 8
"""Most probable tokens that each step gives: what token recycling keeps of each row."""


class Results(NamedTuple):
    """What a step predicts. The host's parts are there once the device has come so far.

    Attributes:
        logits: [R, vocab], on the device.
        top: int32[R, TOP + 1], on the host: the most probable tokens, best first, and the chosen one.
        more: int32[R, k], more of the most probable tokens, if they were asked for.
        chooses: tokens were chosen.
        logprobs: as `Logprobs`, on the host.
    """

    logits: torch.Tensor
    top: torch.Tensor
    more: Int32Array | None
    chooses: bool
    logprobs: tuple[torch.Tensor, ...] | None

    def predictions(self) -> Predictions:
        """Copies, as the next step writes to the same memory."""
        found = self.top.numpy().copy()
        return Predictions(
            self.logits,
            found[:, 0].copy(),
            found[:, :TOP].copy() if self.more is None else self.more,
            found[:, TOP].copy() if self.chooses else None,
            None if self.logprobs is None else Logprobs(*(part.numpy() for part in self.logprobs)),
        )


class Clock:
    """Tells when the device has come to the end of a step, and how long it took, without what was queued before."""

    def __init__(self, device: torch.device) -> None:
        self._began = time.perf_counter()
        self._events: Any = None
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            self._events[0].record()

    def stop(self) -> None:
        """The step ends here."""
        self._seconds = time.perf_counter() - self._began
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> float:
        """Waits for the end; returns the seconds."""
        if self._events is None:
            return self._seconds
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class CudaStep:
    """Implements `runners.base.StepInFlight`."""

    def __init__(self, results: Results, clock: Clock, what: str) -> None:
        self._results, self._clock, self._what = results, clock, what

    def wait(self) -> tuple[Predictions, float]:
        with device_errors(self._what):
            seconds = self._clock.wait()
            return self._results.predictions(), seconds
