"""Where memories rest: an ordered log a memory, a snapshot folded from it, and an epoch that a purge raises.

A store knows tags, positions and bytes; nothing of tokens, models or tenants' names. Every call that changes a memory
is one atomic step that checks what it builds on, so any number of processes may call, fail and call again.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from service.memory.errors import MemoryStoreError

TOMBSTONE_SECONDS = 30 * 24 * 3600
"""How long a purged memory's epoch is remembered where nothing is learned after it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a store enforces for each memory.

    Attributes:
        log_bytes: the log's values together; a log that has more takes nothing before it is folded.
        ttl: seconds after its last record that a memory is forgotten; 0 for never.
    """

    log_bytes: int
    ttl: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A record for the log.

    Attributes:
        seq: its source's count.
        tokens: how many it holds, for statistics.
        value: the record, sealed.
    """

    seq: int
    tokens: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Append:
    """Entries of one source for one memory, in the order of their counts.

    Attributes:
        epoch: the life of the memory that they belong to.
        name: the memory's name, sealed, for lists of memories.
        after: the source's count that the store confirmed last, 0 for none. A store that does not hold this lost
            something, and takes nothing before the writer has seen that: its mark would hide what is to be sent again.
    """

    tag: str
    epoch: int
    source: str
    name: bytes
    entries: SequenceOf[Entry]
    after: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """All entries are in the log, now or before.

    Attributes:
        position: of the log's last entry.
        unfolded: entries since the snapshot.
        folded: records of the snapshot.
    """

    position: int
    unfolded: int
    folded: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Nothing was appended: the memory was purged, and is in a later life."""

    epoch: int


@dataclass(frozen=True, slots=True)
class LogFull:
    """Nothing was appended: the log holds as many bytes as it may, until it is folded."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Nothing was appended: the log does not hold what the writer sent before."""


AppendResult = Appended | Stale | LogFull | Lost | MemoryStoreError


@dataclass(frozen=True, slots=True)
class Want:
    """A reader that stands after `position`; 0 for one that has nothing.

    Attributes:
        source: whose mark it wants to know.
    """

    tag: str
    position: int
    source: str


@dataclass(frozen=True, slots=True)
class Page:
    """What a memory holds after a reader's position.

    Attributes:
        epoch: None where the store holds nothing of this memory.
        position, chain: where the log ends.
        start: the position before the first entry; where it is not the reader's, begin anew with `snapshot`.
        before: the chain before the first entry; the log's own where there is none.
        values: the entries' values, in order.
        snapshot: sealed; None where the reader needs none, or there is none.
        snapshot_position: what the snapshot covers; 0 for none.
        snapshot_missing: the memory has been folded, and its snapshot is gone.
        mark: the highest count of the reader's source that the log took.
        since_purge: seconds since the last purge, by the store's clock; None where there was none.
        expires_in: seconds until it is forgotten if nothing comes; None for never.
    """

    epoch: int | None
    position: int = 0
    chain: str = ""
    start: int = 0
    before: str = ""
    values: SequenceOf[bytes] = ()
    snapshot: bytes | None = None
    snapshot_position: int = 0
    snapshot_missing: bool = False
    mark: int = 0
    since_purge: float | None = None
    expires_in: float | None = None


@dataclass(frozen=True, slots=True)
class Fold:
    """A snapshot to put in the place of the log up to `position`.

    Attributes:
        marks: the highest count of each source; for `seed`.
        tail: how many entries before `position` stay in the log, so that a process that lags a little reads on.
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


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store knows of a memory.

    Attributes:
        name: sealed; b"" where it holds nothing but an epoch.
        bytes: of log and snapshot.
        snapshot_age: seconds; None without one.
    """

    tag: str
    name: bytes
    epoch: int
    position: int
    tokens: int
    bytes: int
    log_entries: int
    snapshot_age: float | None


class MemoryStore(Protocol):
    """Called from one event loop. Every method may raise `MemoryStoreError`.

    Attributes:
        shared: other processes may write to it.
        shown: where it is, for operators, without passwords.
    """

    shared: bool
    shown: str

    async def append(self, appends: SequenceOf[Append]) -> list[AppendResult]:
        """Appends to several memories and tells everybody; the result of each in order. Known entries are left out."""

    async def read(self, wants: SequenceOf[Want]) -> list[Page | MemoryStoreError]: ...

    async def activity(self, turn: int) -> tuple[int, list[str]]:
        """The turn that it is now, and the tags that were written to after `turn`. A turn that went back says that the
        store lost something."""

    async def lease(self, tag: str, holder: str, seconds: float) -> bool:
        """Whether `holder` alone may fold this memory for so long."""

    async def fold(self, fold: Fold, holder: str) -> bool:
        """Puts the snapshot in, trims the log and ends the lease; False where that is not due any more."""

    async def seed(self, fold: Fold) -> bool:
        """Begins a memory that the store holds nothing of with a snapshot; False where it holds something."""

    async def purge(self, tag: str, at_least: int, only_raise: bool = False) -> int:
        """Empties a memory for good and begins its next life.

        Args:
            at_least: no lower epoch than this comes out.
            only_raise: do nothing where the epoch is `at_least` already.

        Returns:
            The memory's epoch now.
        """

    async def set_aside(self, tag: str, snapshot: bytes) -> bool:
        """Moves a snapshot that cannot be read out of the way; False where it is another one by now."""

    async def tags(self) -> list[str]:
        """All memories, those written to last first."""

    async def facts(self, tags: SequenceOf[str]) -> list[Facts]:
        """Of those that the store knows something of."""

    async def close(self) -> None: ...
