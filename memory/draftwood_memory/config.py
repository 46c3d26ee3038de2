"""Limits of the memories of one process and of one tenant's, and what is evicted beyond them."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

_SHARE_OF_RAM = 4
"""A quarter. Half of what is free goes to keys and values on a CPU, and weights and the system need the rest."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
Item = TypeVar("Item")


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
class MemoryOverrides:
    """Overrides of `MemoryConfig` for one tenant's memory. None keeps the process's value.

    Attributes:
        forked: an arm's empty memory starts as a copy of its tenant's.
        max_tokens, max_bytes: of the memory; at most those of the process.
        idle_ttl: seconds after its last record until the memory is deleted.
        max_age: seconds until a record is dropped; at most that of the process.
    """

    forked: bool = False
    max_tokens: int | None = None
    max_bytes: int | None = None
    idle_ttl: float | None = None
    max_age: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Limits of the memories of one process.

    Attributes:
        tokens: of one memory.
        bytes: of one memory, in the store and its records in RAM.
        max_resident: memories in this process.
        max_bytes: of all memories in this process, records and indexes.
        idle_seconds: a memory that no request used for so long is evicted from this process, if there is a store.
        ttl: seconds after its last record until a memory is deleted; 0 for never.
        max_age: seconds until a record is dropped; 0 for never.
        orphan_ttl: seconds after which the store deletes a memory that no process wrote to or loaded; 0 for never.
    """

    tokens: int = 1_000_000
    bytes: int = 16 << 20
    max_resident: int = 1000
    max_bytes: int = 1 << 40
    idle_seconds: float = 900.0
    ttl: float = 0.0
    max_age: float = 0.0
    orphan_ttl: float = 30 * 24 * 3600.0

    def under(self, overrides: MemoryOverrides) -> MemoryConfig:
        """The limits of a memory with these overrides."""
        return replace(
            self,
            tokens=min(self.tokens, overrides.max_tokens or self.tokens),
            bytes=min(self.bytes, overrides.max_bytes or self.bytes),
            ttl=self.ttl if overrides.idle_ttl is None else overrides.idle_ttl,
            max_age=_shorter(self.max_age, overrides.max_age or 0.0),
        )

    @property
    def stored_seconds(self) -> float:
        """How long the store keeps a memory after its last record, all of which are too old by then; 0 for ever."""
        return _shorter(self.ttl, self.max_age)

    @property
    def expiry(self) -> float:
        """How long the store keeps a memory after a write, or a load if only `orphan_ttl` applies; 0 for ever."""
        return self.stored_seconds or self.orphan_ttl

    def oldest(self, now: float) -> float:
        """The Unix time before which records are too old at `now`."""
        return now - self.max_age if self.max_age else -math.inf

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.tokens, self.bytes)


def _shorter(first: float, second: float) -> float:
    """The shorter of two durations, where 0 means endless."""
    return min(first or second, second or first)


def default_max_bytes(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """A quarter of the RAM of the machine, or of the container if that has less."""
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no limit: the file is absent, or reads "max"
        ram = min(ram, int(cgroup_limit.read_text(encoding="ascii")))
    return ram // _SHARE_OF_RAM


def surplus(
    items: SequenceOf[tuple[Item, str, int]], limit: int, kept: Callable[[Item], bool] = lambda _: False
) -> Iterator[Item]:
    """The items to evict, one after the other, until the others fit: of tenants that hold more than their share.

    A share is the limit divided by the tenants that hold something. So no tenant loses anything to another while it
    holds less than that.

    Args:
        items: item, tenant and size, the least recently used first.
        kept: whether an item cannot be evicted.
    """
    held: Counter[str] = Counter()
    for _, tenant, size in items:
        held[tenant] += size
    excess, share = sum(held.values()) - limit, limit / max(1, len(held))
    for item, tenant, size in items:
        if excess <= 0:
            return
        if held[tenant] > share and not kept(item):
            held[tenant] -= size
            excess -= size
            yield item
