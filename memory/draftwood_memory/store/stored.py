"""What is asked of a store about a memory and what it answers; its clock, by which records age."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeAlias

from draftwood_memory.store.naming import SCHEMA

Entry: TypeAlias = tuple[bytes, bytes]
"""Id and value."""
_log = logging.getLogger(__name__)
_SKEW_SECONDS = 30.0
"""Beyond it a difference to the store's clock is logged: more than any round trip, less than any age."""


@dataclass(frozen=True, slots=True)
class MemoryMetadata:
    """What the store says of a memory.

    Attributes:
        exists: the tenant has a hash.
        newer: a program with a higher `SCHEMA` wrote to it.
        purged_since: seconds since the epoch began, by the store's clock; None if there was no purge.
    """

    epoch: int
    exists: bool
    newer: bool
    purged_since: float | None

    @classmethod
    def of(cls, answer: list[bytes | None], now: float) -> MemoryMetadata:
        """From the fields `v`, `g` and `g:ARM` of the tenant's hash."""
        version, *epochs = answer
        epoch = max(int(epoch or 0) for epoch in epochs)
        since = max(0.0, now - epoch / 1e6) if epoch else None
        return cls(epoch, version is not None, int(version or 0) > SCHEMA, since)

    def is_current(self, epoch: int | None, began: float) -> bool:
        """Whether no purge came after a request that began then, in `epoch` if that was known.

        Args:
            began: on the clock of `time.monotonic`.
        """
        in_time = self.purged_since is None or time.monotonic() - began < self.purged_since
        return epoch in (None, self.epoch) and in_time


@dataclass(frozen=True, slots=True)
class Append:
    """Entries to be written, and what the hash is to say of their memory.

    Attributes:
        first_id: the oldest entry that is kept; None if that is not known.
        max_bytes: of the stream, roughly, if `first_id` is not known.
        expiry: seconds until the memory is deleted if nothing more is written; 0 for never.
        tokens: of the memory; None if they are not known.
        begins: they are the first ones: nothing is written if the store has the memory already.
    """

    tag: str
    epoch: int
    name: bytes
    values: SequenceOf[bytes]
    first_id: bytes | None
    max_bytes: int
    expiry: float
    tokens: int | None
    begins: bool = False


@dataclass(frozen=True, slots=True)
class StoredMemory:
    """Size of a memory in the store.

    Attributes:
        name: encoded; b"" if it is missing.
        bytes: of the stream, as the store estimates it.
    """

    tag: str
    name: bytes
    epoch: int
    tokens: int
    bytes: int
    entries: int
    newer: bool


class StoreClock:
    """Unix time: the store's once it has answered, this process's until then. Safe to call from any thread."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()
        self._logged = False

    def now(self) -> float:
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        """The Unix time at a time on the clock of `time.monotonic`."""
        return monotonic + self._ahead

    def synchronize(self, answer: list[Any]) -> float:
        """Sets the clock by the store's answer to TIME; returns it in seconds."""
        now = int(answer[0]) + int(answer[1]) / 1e6
        self._ahead = now - time.monotonic()
        skew = time.time() - now
        if abs(skew) > _SKEW_SECONDS and not self._logged:
            self._logged = True
            text = "this machine's clock is %.0f s %s the store's; ages of records are by the store's"
            _log.warning(text, abs(skew), "ahead of" if skew > 0 else "behind")
        return now
