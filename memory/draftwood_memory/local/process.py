"""What the parts of a memory in one process have in common."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.local.between_steps import BetweenSteps
from draftwood_memory.local.outbox import Outbox
from draftwood_memory.local.residents import Residents
from draftwood_memory.records import Codec
from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.naming import Naming


@dataclass(frozen=True, slots=True)
class Process:
    """The memories of one model in this process, and what names, encodes and counts them.

    Attributes:
        id: identifies this process in the store, `WRITER_BYTES` bytes.
        between_steps: where strategies learn.
    """

    id: bytes
    naming: Naming
    codec: Codec
    clock: StoreClock
    residents: Residents
    outbox: Outbox
    counters: MemoryCounters
    between_steps: BetweenSteps
