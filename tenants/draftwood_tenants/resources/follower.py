"""A copy of all resources in this process, which follows the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_tenants.resources.base import ConflictError, Cursor, Page, Resource, ResourceStore, Write
from draftwood_tenants.resources.clock import ClockWatch
from draftwood_tenants.resources.ending import end
from draftwood_tenants.resources.presence_note import PresenceNote

_log = logging.getLogger(__name__)

SECONDS = 0.3
"""Polling interval, so that every server follows a change within a second."""
_TRIES = 8
"""To restore what a store has lost, while others write to it."""


@dataclass(slots=True)
class _Copy:
    """What was read of a store.

    Attributes:
        of_kind: resources by kind and name.
        names: kind and name by key.
        unreadable: keys of resources that cannot be read here.
        foreign: those of them that may be any tenant's.
        deleted: keys that a reading of everything found deleted.
    """

    of_kind: dict[str, dict[str, Resource]] = field(default_factory=dict)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    unreadable: set[str] = field(default_factory=set)
    foreign: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)

    def apply(self, page: Page, before: _Copy) -> None:
        """Takes a page over. What cannot be read stays as it was here or `before`."""
        for key, resource in page.changes.items():
            self.unreadable.discard(key)
            self.foreign.discard(key)
            if resource is not None:
                self.put(key, resource)
            elif key in self.names:
                kind, name = self.names.pop(key)
                del self.of_kind[kind][name]
            elif self is not before:
                self.deleted.add(key)
        for key in page.unreadable:
            self.unreadable.add(key)
            if key not in self.names and (known := before.get(key)):
                self.put(key, known)
        self.foreign |= page.foreign

    def put(self, key: str, resource: Resource) -> None:
        self.names[key] = resource.kind, resource.name
        self.of_kind.setdefault(resource.kind, {})[resource.name] = resource

    def get(self, key: str) -> Resource | None:
        name = self.names.get(key)
        return None if name is None else self.of_kind[name[0]][name[1]]

    def lost_in(self, other: _Copy) -> list[Write]:
        """Writes of what `other`, a reading of another store, neither has nor knows as deleted."""
        known = other.names.keys() | other.unreadable | other.deleted
        return [Write(one.kind, one.name, one.value, 0) for key, one in self if key not in known]

    def newer_than(self, other: _Copy, revision: int) -> list[Write]:
        """Writes of what is newer than `other`, a reading of the store at an earlier revision."""
        newer = [(key, one) for key, one in self if one.revision > revision and key not in other.unreadable]
        there = [other.get(key) for key, _ in newer]
        pairs = zip(newer, there, strict=True)
        return [Write(one.kind, one.name, one.value, old.revision if old else 0) for (_, one), old in pairs]

    def __iter__(self) -> Iterator[tuple[str, Resource]]:
        return ((key, self.of_kind[kind][name]) for key, (kind, name) in self.names.items())


class ResourceFollower:
    """All resources of a store, as of its latest look. While the store does not answer, what was known stays.

    A store that has lost what it had gets it again from here.

    Attributes:
        synced: set once it is known which resources there are: they were read, or the last look of an earlier process
            found none.
        read: they were read, in this process.

    Args:
        presence_note: what earlier processes found; None where they leave nothing.
    """

    def __init__(self, store: ResourceStore, presence_note: PresenceNote | None = None) -> None:
        self.synced = asyncio.Event()
        self.read = False
        self._store = store
        self._presence_note = presence_note
        self._clock = ClockWatch()
        self._cursor = Cursor()
        self._lock = asyncio.Lock()
        self._copy = _Copy()
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def revision(self) -> int:
        """Of the store at the latest look."""
        return self._cursor.revision

    def of_kind(self, kind: str) -> Mapping[str, Resource]:
        """The resources of a kind by name. Not to be changed; replaced when much has changed."""
        return self._copy.of_kind.get(kind, {})

    def is_unknown(self, kind: str, name: str) -> bool:
        """Whether there may be a resource of this name, with a value that this process has never read."""
        if name in self.of_kind(kind):
            return False
        unreadable = self._copy.unreadable
        return not self.synced.is_set() or (bool(unreadable) and self._store.key(kind, name) in unreadable)

    async def start(self) -> None:
        """Looks once, and from now on. A store that does not answer is no error."""
        await self._look()
        unanswered = self._cursor == Cursor()
        if unanswered and self._presence_note is not None and await self._presence_note.none_lately():
            self.synced.set()
        if not self.synced.is_set():
            _log.error("the configuration of tenants is unknown; requests are refused until it was read")
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Ends the looks and the store's connections."""
        await end([self._task])
        await self._store.close()

    async def refresh(self) -> None:
        """Takes all changes up to now. Raises MemoryStoreError."""
        async with self._lock:
            for _ in range(_TRIES):
                if await self._refresh():
                    return
            raise StoreUnavailableError("the store lost configuration, and is written to by others; try again")

    async def write(self, writes: SequenceOf[Write], since: int | None = None) -> list[int]:
        """As `ResourceStore.write`; afterwards this copy has the writes."""
        revisions = await self._store.write(writes, since, self._cursor.store)
        await self.refresh()
        return revisions

    async def _refresh(self) -> bool:
        """False if the store had lost something, and has to be read again."""
        copy, cursor = self._copy, self._cursor
        while True:
            with self._clock.timing() as timed:
                page = await self._store.changes(cursor)
                timed(page.time)
            cursor = page.cursor
            if page.is_snapshot:
                copy = _Copy()
            copy.apply(page, self._copy)
            if copy is self._copy:
                self._cursor = cursor
            if not page.more:
                break
        if copy is not self._copy and (lost := self._lost(copy, cursor)):
            await self._restore(lost, cursor)
            return False
        copy.deleted.clear()
        self._copy, self._cursor = copy, cursor
        await self._note()
        return True

    def _lost(self, copy: _Copy, cursor: Cursor) -> list[Write]:
        """What the store had and has not any more, though nobody deleted it: it was emptied, replaced, or
        went back in time, as in a failover."""
        known = self._cursor
        if known.revision and (not cursor.revision or (known.store and cursor.store != known.store)):
            return self._copy.lost_in(copy)
        return self._copy.newer_than(copy, cursor.revision) if cursor.revision < known.revision else []

    async def _restore(self, lost: SequenceOf[Write], cursor: Cursor) -> None:
        """Writes what a store has lost, unless it is written to meanwhile."""
        store = cursor.store if cursor.revision else self._cursor.store
        try:
            await self._store.write(lost, cursor.revision, store)
        except ConflictError:
            await asyncio.sleep(0)  # another server restored it, or wrote to it
        else:
            _log.error("the store had lost configuration of tenants; %d resources were restored", len(lost))

    async def _note(self) -> None:
        """Notes that all was read, here and for later processes."""
        if not self.read and (problem := await self._incomplete()):
            return self._say(problem)
        self._say("")
        self.read = True
        self.synced.set()
        if self._presence_note is not None:
            await self._presence_note.note(bool(self._copy.names or self._copy.unreadable))

    async def _incomplete(self) -> str:
        """Why the first reading does not tell which tenants there are; "" if it does."""
        if not self._cursor.revision and self._presence_note is not None and await self._presence_note.had_some():
            return f"the store lost it: write it again, or delete {self._presence_note.path} if there shall be none"
        if self._copy.foreign:
            return "names of tenants are hidden with another key, or were stored before they were hidden"
        return ""

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(SECONDS)
            await self._look()

    async def _look(self) -> None:
        try:
            await self.refresh()
        except MemoryStoreError as error:
            self._say("the store does not answer", str(error))

    def _say(self, problem: str, error: str = "") -> None:
        """Logs what keeps this process from reading the configuration, once."""
        if problem and problem != self._problem:
            text = "the configuration of tenants cannot be read; what is known stays in use: %s"
            _log.warning(text, f"{problem}: {error}" if error else problem)
        if self._problem and not problem:
            _log.info("the configuration of tenants is read again")
        self._problem = problem
