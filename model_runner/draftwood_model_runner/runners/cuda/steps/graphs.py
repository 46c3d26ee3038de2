"""Whole steps as CUDA graphs: one launch in place of the hundreds that a forward pass makes.

A graph is captured for each padded size and each number of rows of attention's parts; which sequences share a step, and
how long their contexts are, is in the arrays that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from draftwood_model_runner.runners.cuda.steps.forward import SIZES, Forward, PreparedStep

_log = logging.getLogger(__name__)


class Replayable(Protocol):
    """A captured step."""

    def replay(self) -> torch.Tensor:
        """Runs it on what the fixed arrays hold; returns its logits."""


class _Key(NamedTuple):
    tokens: int
    rows: int


class Graphs:
    """The captured steps of a runner.

    Attributes:
        reason: why no step is replayed; empty if they are.

    Args:
        capture: captures a step that is ready.
    """

    def __init__(self, forward: Forward, capture: Callable[[PreparedStep], Replayable]) -> None:
        self._forward, self._capture_step = forward, capture
        self._graphs: dict[_Key, Replayable] = {}
        self.reason = ""

    def capture_all(self) -> None:
        """Captures steps of all sizes, the largest first, of padding only: a capture notes what is launched, not what
        is in the arrays."""
        for size in sorted(SIZES, reverse=True):
            for rows in self._forward.row_choices:
                if not self.reason:
                    self._capture(self._forward.prepare_padding(size, rows))

    @property
    def sizes(self) -> set[int]:
        """Tokens of the captured steps."""
        return {key.tokens for key in self._graphs}

    def run(self, ready: PreparedStep) -> bool:
        """Replays a step, if it is one that a graph can be captured of."""
        if not ready.fixed or self.reason:
            return False
        key = _Key(ready.tokens, ready.rows)
        if key not in self._graphs:
            self._capture(ready)
        if self.reason:
            return False
        self._forward.logits = self._graphs[key].replay()
        return True

    def _capture(self, ready: PreparedStep) -> None:
        try:
            self._graphs[_Key(ready.tokens, ready.rows)] = self._capture_step(ready)
        except Exception as error:
            self._graphs.clear()
            self.reason = f"a step of {ready.tokens} tokens cannot be captured: {type(error).__name__}: {error}"
            _log.warning("steps run without CUDA graphs, which takes longer: %s", self.reason)


class CudaCapture:
    """Captures steps as CUDA graphs in one pool of memory.

    The pool lends its memory to one stream only, and what a step returns could not be lent again: so all are captured
    on one stream, and leave their logits in one tensor, which the first and largest one allocates.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._stream = torch.cuda.Stream(forward.device)
        self._pool: Any = None
        self._logits: torch.Tensor | None = None

    def __call__(self, ready: PreparedStep) -> Replayable:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            logits = self._forward.launch(ready)  # compiles kernels, and lets libraries choose theirs
            if self._logits is None:
                self._logits = torch.empty_like(logits)
            del logits
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            kept = self._logits[: ready.logit_rows]
            kept.copy_(self._forward.launch(ready))
        self._pool = self._pool or graph.pool()
        return _CudaGraph(graph, kept)


class _CudaGraph(NamedTuple):
    """Implements `Replayable`."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.logits


CAPTURES: dict[str, Callable[[Forward], Callable[[PreparedStep], Replayable]]] = {"cuda": CudaCapture}
"""By type of device, what captures its steps. Steps of other devices run as they are."""
