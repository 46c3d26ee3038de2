"""What is asked of a store about a memory, and what it answers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TypeAlias

from draftwood_memory.store.naming import SCHEMA

Entry: TypeAlias = tuple[bytes, bytes]
"""Id and value."""


@dataclass(frozen=True, slots=True)
class MemoryMetadata:
    """What the store says of a memory.

    Attributes:
        exists: the tenant has a hash.
        newer: a program with a higher `SCHEMA` wrote to it.
        purged_since: seconds since the generation began, by the store's clock; None if there was no purge.
    """

    generation: int
    exists: bool
    newer: bool
    purged_since: float | None

    @classmethod
    def of(cls, answer: list[bytes | None], now: float) -> MemoryMetadata:
        """From the fields `v`, `g` and `g:ARM` of the tenant's hash."""
        version, *generations = answer
        generation = max(int(one or 0) for one in generations)
        since = max(0.0, now - generation / 1e6) if generation else None
        return cls(generation, version is not None, int(version or 0) > SCHEMA, since)

    def is_current(self, generation: int | None, began: float) -> bool:
        """Whether no purge came after a request that began then, in `generation` if that was known.

        Args:
            began: on the clock of `time.monotonic`.
        """
        in_time = self.purged_since is None or time.monotonic() - began < self.purged_since
        return generation in (None, self.generation) and in_time


@dataclass(frozen=True, slots=True)
class Append:
    """An entry to be written, and what the hash is to say of its memory.

    Attributes:
        first_id: the oldest entry that is kept; None if that is not known.
        max_bytes: of the stream, roughly, if `first_id` is not known.
        expiry: seconds until the memory is deleted if nothing more is written; 0 for never.
        tokens: of the memory; None if they are not known.
    """

    tag: str
    generation: int
    name: bytes
    value: bytes
    first_id: bytes | None
    max_bytes: int
    expiry: float
    tokens: int | None


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """Size of a memory in the store.

    Attributes:
        name: encoded; b"" if it is missing.
        bytes: of the stream, as the store estimates it.
    """

    tag: str
    name: bytes
    generation: int
    tokens: int
    bytes: int
    entries: int
    newer: bool
