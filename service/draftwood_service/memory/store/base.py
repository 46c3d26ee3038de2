"""The interface of a memory store: for each memory an ordered log, a snapshot of it, and an epoch that a purge raises.

A store handles tags, positions and bytes; it has no notion of tokens, models or tenants. Every call that changes a
memory is one atomic step that checks its preconditions, so any number of processes may call, fail and retry.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from draftwood_service.memory.errors import MemoryStoreError

SCHEMA = 2
"""Version of everything that is stored of a memory: keys, fields of the meta hash, formats of values, their encryption.
Raised by every change that an older server cannot read. A store refuses changes of a memory with a higher one."""
INSTANCE_SECONDS = 100.0
"""A process that has not registered for so long has ended. Not tuned: it outlasts three registrations."""
TOMBSTONE_SECONDS = 30 * 24 * 3600
"""How long a purged memory's epoch is kept if nothing is learned after the purge. Not tuned: it has to outlast every
replica that has not seen the purge yet."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a store enforces for each memory.

    Attributes:
        log_bytes: of the log's values together; a log that has more refuses entries until it is folded.
        ttl: seconds after its last record until a memory is deleted; 0 for never.
    """

    log_bytes: int
    ttl: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A record for the log.

    Attributes:
        seq: the source's sequence number.
        tokens: number of its tokens, for statistics.
        value: the encoded record.
    """

    seq: int
    tokens: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Append:
    """Entries of one source for one memory, in ascending order of their sequence numbers.

    Attributes:
        limits: of this memory; None for the store's.
        epoch: of the memory, as the writer knows it.
        name: the memory's encoded name, for lists of memories.
        after: the source's sequence number that the store confirmed last, 0 for none. A store that does not have it has
            lost records; it appends nothing until the writer has read that, since the new mark would hide the records
            that are to be sent again.
    """

    tag: str
    epoch: int
    source: str
    name: bytes
    entries: SequenceOf[Entry]
    after: int = 0
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """All entries are in the log, by this call or an earlier one.

    Attributes:
        position: of the log's last entry.
        unfolded: number of entries since the snapshot.
        folded: number of records in the snapshot.
    """

    position: int
    unfolded: int
    folded: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Nothing was appended: the memory was purged and has a later epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LogFull:
    """Nothing was appended: the log has reached its quota of bytes and must be folded first."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was appended: the log lacks records that the writer sent before."""


AppendResult = Appended | Stale | LogFull | Lost | MemoryStoreError


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What to read of one memory.

    Attributes:
        position: of the reader's last entry; 0 for none.
        source: the source to return the mark of.
    """

    tag: str
    position: int
    source: str


@dataclass(frozen=True, slots=True)
class Page:
    """The part of a memory after a reader's position.

    Attributes:
        epoch: None if the store has nothing of this memory.
        position, chain: of the log's last entry.
        start: the position before the first entry; if it is not the reader's, the reader starts over with `snapshot`.
        before: the chain before the first entry; the log's own if there is no entry.
        values: the entries' values, in order.
        snapshot: encoded; None if the reader needs none, or there is none.
        snapshot_missing: the memory has been folded, and its snapshot is gone.
        mark: the highest sequence number of the reader's source in the log.
        since_purge: seconds since the last purge, by the store's clock; None if there was none.
        expires_in: seconds until the memory is deleted if nothing is appended; None for never.
        newer: a server with a higher `SCHEMA` wrote to the memory: values may be unreadable here, and every change is
            refused.
    """

    epoch: int | None
    position: int = 0
    chain: str = ""
    start: int = 0
    before: str = ""
    values: SequenceOf[bytes] = ()
    snapshot: bytes | None = None
    snapshot_missing: bool = False
    mark: int = 0
    since_purge: float | None = None
    expires_in: float | None = None
    newer: bool = False


@dataclass(frozen=True, slots=True)
class Fold:
    """A snapshot that replaces the log up to `position`.

    Attributes:
        limits: of this memory; None for the store's.
        marks: the highest sequence number of each source; for `seed`.
        tail: number of entries before `position` that stay in the log, so that a process slightly behind can read on.
    """

    tag: str
    epoch: int
    position: int
    chain: str
    value: bytes
    tokens: int
    records: int
    name: bytes = b""
    marks: dict[str, int] = field(default_factory=dict)
    tail: int = 0
    limits: Limits | None = None


@dataclass(frozen=True, slots=True)
class StoredMemoryInfo:
    """Size and age of a memory in the store.

    Attributes:
        name: encoded; b"" if only the epoch is stored.
        bytes: of log and snapshot.
        snapshot_age: seconds; None without a snapshot.
        newer: as in `Page`.
    """

    tag: str
    name: bytes
    epoch: int
    position: int
    tokens: int
    bytes: int
    log_entries: int
    snapshot_age: float | None
    newer: bool = False


class MemoryStore(Protocol):
    """Called from one event loop. Every method may raise `MemoryStoreError`.

    Whatever would change a memory that has a higher schema than `SCHEMA` changes nothing: `append` returns and `purge`
    raises NewerMemoryError, `fold`, `seed` and `set_aside` return False.

    Attributes:
        shared: other processes may write to it.
        description: its address for operators, without passwords.
    """

    shared: bool
    description: str

    async def append(self, appends: SequenceOf[Append]) -> list[AppendResult]:
        """Appends to several memories and announces it; the result of each, in order. Known entries are skipped."""

    async def read(self, requests: SequenceOf[ReadRequest]) -> list[Page | MemoryStoreError]:
        """The page of each memory, or the error that only this memory has, in order."""

    async def activity(self, after: int) -> tuple[int, list[str]]:
        """The number of announced writes, and the tags that were written to after the write number `after`.

        A number below an earlier one means that the store lost writes.
        """

    async def lease(self, tag: str, holder: str, seconds: float) -> bool:
        """Takes the right to fold a memory for so long; False if another holder has it."""

    async def fold(self, fold: Fold, holder: str) -> bool:
        """Writes the snapshot, trims the log and ends the lease; False if the log has moved on or the lease is lost."""

    async def seed(self, fold: Fold) -> bool:
        """Creates a memory from a snapshot; False if the store has something of this memory."""

    async def purge(self, tag: str, at_least: int, only_raise: bool = False) -> int:
        """Deletes a memory's records and raises its epoch.

        Args:
            at_least: lower bound of the new epoch.
            only_raise: do nothing if the epoch is `at_least` or more already.

        Returns:
            The memory's epoch now.
        """

    async def set_aside(self, tag: str, snapshot: bytes) -> bool:
        """Moves an unreadable snapshot to another key; False if it has been replaced meanwhile."""

    async def tags(self, fingerprint: str | None = None) -> list[str]:
        """All memories of a model, by default of this store's, the latest written first."""

    async def register(self, kind: str, instance: str, settings: str) -> list[str]:
        """Notes that a process uses memories of a kind (see `Naming.kind`) now, and with which settings.

        Returns:
            The settings of the other processes of the model that did so within `INSTANCE_SECONDS`.
        """

    async def kinds(self) -> dict[str, float]:
        """For each kind of memories, the seconds since a process noted that it uses them."""

    async def info(self, tags: SequenceOf[str]) -> list[StoredMemoryInfo]:
        """Of those memories that the store has something of."""

    async def close(self) -> None: ...
