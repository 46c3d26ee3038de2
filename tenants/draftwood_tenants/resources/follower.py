"""A copy of all resources in this process, which follows the store.

`ResourceFollower` looks at the store a few times a second. A store that has lost resources gets them again from the
copy. Beside the copy, `PresenceNote` tells later processes whether there were any resources, for a start while the
store does not answer, and `ClockWatch` notices that the clocks of store and server differ.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_tenants.resources.store import ConflictError, Cursor, Page, Resource, ResourceStore, Write

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.3
"""Polling interval, so that every server follows a change within a second."""
_TRIES = 8
"""To restore what a store has lost, while others write to it."""
TOLERATED_SECONDS = 2.0
"""Difference of two clocks that is none; those that are kept by NTP differ by milliseconds."""
_NONE, _SOME = "none", "some"
_VALID_SECONDS = 86_400.0
"""How long "none" is believed while the store does not answer. A restart takes minutes."""
_REWRITE_SECONDS = 3_600.0
"""Minimum interval between two writes of the same word."""
_RETRY_SECONDS = 1.0
"""Until `end` cancels a task again that did not end."""


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
        """The store's revision at the latest look."""
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
            await asyncio.sleep(POLL_SECONDS)
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
        missing = [resource for key, resource in self if key not in known]
        return [Write(resource.kind, resource.name, resource.value, 0) for resource in missing]

    def newer_than(self, other: _Copy, revision: int) -> list[Write]:
        """Writes of what is newer than `other`, a reading of the store at an earlier revision."""
        writes = []
        for key, resource in self:
            if resource.revision > revision and key not in other.unreadable:
                old = other.get(key)
                writes.append(Write(resource.kind, resource.name, resource.value, old.revision if old else 0))
        return writes

    def __iter__(self) -> Iterator[tuple[str, Resource]]:
        return ((key, self.of_kind[kind][name]) for key, (kind, name) in self.names.items())


class PresenceNote:
    """A file of one word. A folder that cannot be used counts as one without the file.

    Attributes:
        path: of the file.

    Args:
        store: identifies it.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: Path, store: str, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / f"tenants-{hashlib.sha256(store.encode()).hexdigest()[:16]}"
        self._clock = clock
        self._noted: tuple[str, float] = ("", 0.0)

    async def none_lately(self) -> bool:
        """Whether there were none within the last day."""
        word, at = await asyncio.to_thread(self._read)
        return word == _NONE and abs(self._clock() - at) < _VALID_SECONDS

    async def had_some(self) -> bool:
        """Whether there were some, however long ago."""
        word = self._noted[0] or (await asyncio.to_thread(self._read))[0]
        return word == _SOME

    async def note(self, some: bool) -> None:
        """Writes it for later processes."""
        word, now = _SOME if some else _NONE, self._clock()
        if self._noted[0] != word or now - self._noted[1] > _REWRITE_SECONDS:
            self._noted = word, now
            await asyncio.to_thread(self._write, word)

    def _read(self) -> tuple[str, float]:
        try:
            return self.path.read_text(encoding="ascii"), self.path.stat().st_mtime
        except (OSError, ValueError):
            return "", 0.0

    def _write(self, word: str) -> None:
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", dir=self.path.parent, delete=False) as file:
                file.write(word)
            Path(file.name).replace(self.path)


class ClockWatch:
    """Compares the two clocks, and logs when they begin and cease to differ.

    Attributes:
        skew: seconds by which this process's clock is ahead of the store's at least; negative if it is behind; 0 while
            the difference is tolerated.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.skew = 0.0
        self._clock = clock

    @contextmanager
    def timing(self) -> Iterator[Callable[[float | None], None]]:
        """Around a call that asks the store for its time, which goes to what this returns."""
        began = self._clock()
        yield lambda stored: None if stored is None else self._compare(began, stored, self._clock())

    def _compare(self, began: float, stored: float, ended: float) -> None:
        """The store read its clock at some moment of the call: only what is outside of it is a difference."""
        skew = began - stored if stored < began else min(0.0, ended - stored)
        if abs(skew) <= TOLERATED_SECONDS:
            skew = 0.0
        if skew and not self.skew:
            affected = "expiry of credentials, times of experiments, ages of records"
            _log.warning(
                "the clock of this server differs from the store's; set it by NTP: %.1f s ahead; affected: %s",
                skew,
                affected,
            )
        if self.skew and not skew:
            _log.info("the clock of this server agrees with the store's again")
        self.skew = skew


async def end(tasks: Iterable[asyncio.Task[None] | None]) -> None:
    """Cancels tasks and waits until they have ended.

    Tries again, since a task misses a cancellation that arrives while one of its connections fails.
    """
    pending = {task for task in tasks if task is not None}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_RETRY_SECONDS)
