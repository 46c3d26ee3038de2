"""A strategy that does as tests tell it, a hybrid of such, and a clock that they set."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from draftwood_strategies import Drafter, DraftTree, Feedback, HybridStrategy
from draftwood_strategies.arrays import Int32Array


class Clock:
    """Seconds that pass only when somebody lets them."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class FakeStrategy:
    """A strategy and its drafter in one, with counts of its calls.

    Args:
        tree: what it proposes, of whatever class.
        raises_in: the call in which it raises.
        clock: on which each call takes the seconds told.
    """

    def __init__(
        self, tree: Any = None, *, raises_in: str = "", top_k: int = 0, clock: Clock | None = None, **seconds: float
    ) -> None:
        self.tree = DraftTree.of([5, 6]) if tree is None else tree
        self.raises_in = raises_in
        self.top_k = top_k
        self.clock = clock
        self.seconds = seconds
        self.proposed = self.observed = self.closed = 0
        self.feedback: Feedback | None = None

    def _do(self, call: str) -> None:
        if self.clock is not None:
            self.clock.now += self.seconds.get(call, 0.0)
        if call == self.raises_in:
            raise RuntimeError(f"broken {call}")

    def start(self, prompt: Int32Array) -> Drafter:
        self._do("start")
        return self

    def propose(self, budget: int) -> DraftTree:
        self.proposed += 1
        self._do("propose")
        tree: DraftTree = self.tree
        return tree

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self.observed += 1
        self.feedback = feedback
        self._do("observe")

    def close(self) -> None:
        self.closed += 1
        self._do("close")


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What Draftwood logged, without what libraries say of earlier tests' objects as they are collected."""
    return [record for record in caplog.records if record.name.startswith("draftwood")]


def hybrid_of(sources: str = "none", **parts: Any) -> HybridStrategy:
    """A hybrid of these parts, and of the successor table among `sources` if there is one."""
    hybrid = HybridStrategy(sources=sources)
    hybrid.parts = parts
    return hybrid
