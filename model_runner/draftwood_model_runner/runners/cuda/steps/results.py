"""What a step leaves on the host, and the step itself while the device computes it."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch

from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.runners.base import Predictions
from draftwood_model_runner.runners.cuda.states.rows import LiveState
from draftwood_model_runner.runners.cuda.states.shapes import STATE_NODES
from draftwood_model_runner.runners.device_errors import device_errors
from draftwood_strategies.draft import Float32Array, Int32Array

TOP = 8
"""Most probable tokens that each step gives: what token recycling keeps of each row."""


class Logprobs(NamedTuple):
    """Log-probabilities by the model's own logits; rows of sequences that report none have no meaning.

    Attributes:
        sampled: float32[R], of the token that is written.
        top_tokens: int32[R, k], the most probable tokens, best first.
        top: float32[R, k], theirs.
    """

    sampled: Float32Array
    top_tokens: Int32Array
    top: Float32Array

    def at(self, row: int, count: int) -> TokenLogprobs:
        """Those of a row, with `count` of the most probable tokens."""
        return TokenLogprobs(
            float(self.sampled[row]), self.top_tokens[row, :count].tolist(), self.top[row, :count].tolist()
        )


class HostResults(NamedTuple):
    """What a step predicts and chooses, on the host.

    Attributes:
        predictions: the logits are on the device.
        sampled: int32[R], the token that is written after each, or `NOT_SAMPLED`; None if no sampling was given.
        logprobs: if a sequence reports them.
    """

    predictions: Predictions
    sampled: Int32Array | None
    logprobs: Logprobs | None


class Results(NamedTuple):
    """What a step predicts and chooses. The host's parts are there once the device has come so far.

    Attributes:
        logits: [R, vocab], on the device.
        top: int32[R, TOP + 1], on the host: the most probable tokens, best first, and the chosen one.
        more: int32[R, k], more of the most probable tokens, if they were asked for.
        has_samples: tokens were chosen.
        logprobs: as `Logprobs`, on the host.
    """

    logits: torch.Tensor
    top: torch.Tensor
    more: Int32Array | None
    has_samples: bool
    logprobs: tuple[torch.Tensor, ...] | None

    def on_host(self) -> HostResults:
        """Copies, as the next step writes to the same memory."""
        found = self.top.numpy().copy()
        top_tokens = found[:, :TOP].copy() if self.more is None else self.more
        return HostResults(
            Predictions(self.logits, found[:, 0].copy(), top_tokens),
            found[:, TOP].copy() if self.has_samples else None,
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


class LaunchedStep:
    """A step that the device computes.

    Args:
        states: of recurrent layers, of each batch row that has one.
    """

    def __init__(self, results: Results, clock: Clock, what: str, states: SequenceOf[LiveState | None] = ()) -> None:
        self._results, self._clock, self._what, self._states = results, clock, what, states

    def accept(self, row: int, nodes: list[int]) -> None:
        """Tells which nodes of a batch row's tree the walk accepted: its next step replays them."""
        if self._states and (state := self._states[row]) is not None:
            assert all(node < STATE_NODES for node in nodes), "a larger tree than `draft_limits` allows"
            state.accepted = nodes

    def wait(self) -> tuple[HostResults, float]:
        """Its results, and the seconds that the device took.

        Raises:
            DeviceMemoryError, DeviceLostError: as `runners.base.Runner.step`.
        """
        with device_errors(self._what):
            seconds = self._clock.wait()
            return self._results.on_host(), seconds
