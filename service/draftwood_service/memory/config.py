"""Limits of the memories of one process."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from draftwood_model_runner.request import MemoryTerms

_SHARE_OF_RAM = 4
"""A quarter. Half of what is free goes to keys and values on a CPU, and weights and the system need the rest."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
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
        max_bytes: of all memories in this process, records and indexes.
        idle_seconds: a memory that no request used for so long is evicted from this process.
        ttl: seconds after its last record until the store deletes a memory; 0 for never.
        max_age: seconds until a record is dropped; 0 for never.
        orphan_ttl: seconds after which memories that no process uses are deleted; 0 for never.
        round_seconds: between two rounds with the store.
    """

    tokens: int = 1_000_000
    bytes: int = 16 << 20
    max_resident: int = 1000
    max_bytes: int = 1 << 40
    idle_seconds: float = 900.0
    ttl: float = 0.0
    max_age: float = 0.0
    orphan_ttl: float = 30 * 24 * 3600.0
    round_seconds: float = ROUND_SECONDS

    def under(self, terms: MemoryTerms) -> MemoryConfig:
        """The limits of a memory with these terms."""
        return replace(
            self,
            tokens=min(self.tokens, terms.max_tokens or self.tokens),
            bytes=min(self.bytes, terms.max_bytes or self.bytes),
            ttl=self.ttl if terms.idle_ttl is None else terms.idle_ttl,
            max_age=_shorter(self.max_age, terms.max_age or 0.0),
        )

    @property
    def stored_seconds(self) -> float:
        """How long the store keeps a memory after its last record, all of which are too old by then; 0 for ever."""
        return _shorter(self.ttl, self.max_age)

    def oldest(self, now: float) -> float:
        """The Unix time before which records are too old at `now`."""
        return now - self.max_age if self.max_age else -math.inf

    @property
    def capacity(self) -> Capacity:
        """Of the records: half of the bytes, since the snapshot holds them all."""
        return Capacity(self.tokens, self.bytes // 2)

    @property
    def log_bytes(self) -> int:
        """Of the log between two folds: the other half of the bytes."""
        return self.bytes // 2


def _shorter(first: float, second: float) -> float:
    """Of two durations, of which 0 is endless."""
    return min(first or second, second or first)


def default_max_bytes(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """A quarter of the RAM of the machine, or of the container if that has less."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit: the file is absent, or reads "max"
        ram = min(ram, int(cgroup_limit.read_text(encoding="ascii")))
    return ram // _SHARE_OF_RAM
