"""How a memory knows the device: as a strategy that only learns. A new instance of it is an empty region.

So what the store brings, purges and evictions reach the device by the ways that tries on the host have.
"""

from __future__ import annotations

from queue import SimpleQueue
from typing import TypeAlias

from draftwood_memory.records import Int32Array
from draftwood_strategies.base import Drafter
from draftwood_strategies.registry import register

STRATEGY = "_device"
"""Not for requests."""
Changes: TypeAlias = "SimpleQueue[tuple[str, Int32Array | None]]"
"""Names of regions, each with a text that it learns, or None where it is empty from now on."""


class _Region:
    """A region of the device. Any thread."""

    top_k = 0

    def __init__(self, changes: Changes, region: str) -> None:
        self._changes, self._region = changes, region
        changes.put((region, None))

    def start(self, prompt: Int32Array) -> Drafter:
        """Raises RuntimeError: nothing is drafted on the host."""
        raise RuntimeError(f"strategy {STRATEGY!r} drafts on the device alone")

    def learn(self, tokens: Int32Array) -> None:
        """Learns a whole sequence, int32[n]."""
        self._changes.put((self._region, tokens))


class Regions:
    """Makes the strategy.

    Attributes:
        changes: of the process's engine, of which there is one.
    """

    def __init__(self) -> None:
        self.changes: Changes = SimpleQueue()

    def __call__(self, region: str = "") -> _Region:
        return _Region(self.changes, region)


REGIONS = register(STRATEGY)(Regions())
