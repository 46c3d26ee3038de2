"""Limits of the memories of one process."""

from __future__ import annotations

from dataclasses import dataclass

ROUND_SECONDS = 0.2
"""Between two rounds with the store. A record needs one round to be sent and one to be read: `draftwood bench share`
measured 161 ms at the median and 400 ms at the 99th percentile. Half of it would halve the lag, and double the commands
of an idle process (ten a second with 1,000 tenants)."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How much one memory holds. The oldest records are evicted first, the newest one never.

    Attributes:
        tokens: upper bound of the tokens.
        bytes: upper bound of the sum of `Record.weight`.
    """

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Limits of the memories of one process.

    Attributes:
        tokens: of one memory.
        bytes: of one memory in the store, log and snapshot together.
        max_resident: memories in this process.
        idle_seconds: a memory that no request used for so long is evicted from this process.
        ttl: seconds after its last record until the store deletes a memory; 0 for never.
        round_seconds: between two rounds with the store.
    """

    tokens: int = 1_000_000
    bytes: int = 16 << 20
    max_resident: int = 1000
    idle_seconds: float = 900.0
    ttl: float = 0.0
    round_seconds: float = ROUND_SECONDS

    @property
    def capacity(self) -> Capacity:
        """Of the records: half of the bytes, since the snapshot holds them all."""
        return Capacity(self.tokens, self.bytes // 2)

    @property
    def log_bytes(self) -> int:
        """Of the log between two folds: the other half of the bytes."""
        return self.bytes // 2
