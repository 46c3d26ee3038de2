"""One process's copy of the memories that it uses: loads them, sends what is learned here, reads what others learn.

Every method runs on the memory thread, and with `lock` if it uses memories. Whatever fails is done again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TypeAlias

from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import CorruptValueError, MemoryStoreError, StoreFullError, StoreUnavailableError
from draftwood_memory.outbox import Outbox, Waiting
from draftwood_memory.record_log import Held
from draftwood_memory.records import Codec, Record, runs
from draftwood_memory.residents import Resident, Residents
from draftwood_memory.store.eviction import make_room
from draftwood_memory.store.memories import Append, Entry, Head, Memories
from draftwood_memory.store.naming import MemoryName, Naming, tenant_part
from draftwood_memory.store.processes import RENEW_SECONDS, Processes, id_order

_log = logging.getLogger(__name__)

_PAGE = 1000
"""Entries of one read. Not tuned: any number near works."""
_PUSH_TOKENS = 1 << 18
"""Sent in one round trip at most. Not tuned: it bounds the size of a message."""
_RETRY_SECONDS = 30.0
"""Between two reads of a memory that the store cannot serve. Not tuned."""
_RESTORE_SECONDS = 1.0
"""For the process that restores a lost memory to write it, before the others load it. Not tuned."""
_LISTED_SECONDS = 10.0
"""A memory is listed as written to at most so often. Not tuned: the list orders what is preloaded, and evicted."""
_USE_SECONDS = 600.0
"""Between two notes of which memories were used, if only to draft from. Not tuned: less than any memory's expiry."""
_ROOM_SECONDS = 2.0
"""Between two looks for memories to delete in a full store. Not tuned: a look asks for the size of each."""
_CHECKED = 500
"""Memories that are compared with the store's in one round trip. Not tuned."""

LearnRecords: TypeAlias = Callable[[Resident, SequenceOf[Record]], Awaitable[None]]
"""Lets the published strategies of a memory learn records, on the thread that they belong to."""


class Replica:
    """Keeps the memories of this process and the store's alike, as far as a cache needs it.

    Args:
        writer: identifies this process in entries.

    Attributes:
        lock: held while memories, or the store's, are changed.
        processes: the others that use the store, and which purges they have applied.
    """

    def __init__(
        self,
        memories: Memories,
        residents: Residents,
        outbox: Outbox,
        codec: Codec,
        naming: Naming,
        writer: bytes,
        learn: LearnRecords,
        counters: MemoryCounters,
    ) -> None:
        self.memories = memories
        self.processes = Processes(memories.client, memories.clock, writer.hex())
        self.lock = asyncio.Lock()
        self._residents = residents
        self._outbox = outbox
        self._codec = codec
        self._naming = naming
        self._writer = writer
        self._learn = learn
        self._counters = counters
        self._listed: dict[str, float] = {}
        self._used_at = time.monotonic()
        self._room_at = -_ROOM_SECONDS
        self._joined = self._refused = False

    async def join(self) -> None:
        """Keeps this process among those that purges wait for. Before anything is loaded, and often."""
        if not self._joined:
            await self.processes.apply(await self.processes.latest())
            self._joined = True
        elif time.monotonic() - self.processes.reached_at > RENEW_SECONDS:
            await self.apply_purges()

    async def apply_purges(self) -> None:
        """Empties the memories that others have purged, and says so. Raises MemoryStoreError."""
        latest, parts = await self.processes.missed()
        if parts:
            await self.purged(parts)
        await self.processes.apply(latest)

    async def load(self) -> None:
        """Reads memories and builds strategies that are new in this process. Raises StoreUnavailableError."""
        for resident in self._residents.all():
            if not resident.loaded and resident.retry_at < time.monotonic():
                try:
                    await self.refresh(resident)
                except StoreUnavailableError:
                    raise
                except MemoryStoreError as error:
                    resident.retry_at = time.monotonic() + _RETRY_SECONDS
                    _log.error("memory %s cannot be read: %s", resident.tag, error)
            elif resident.loaded and resident.unbuilt:
                resident.build([*resident.unbuilt])

    async def refresh(self, resident: Resident) -> None:
        """Reads a memory up to the store's latest entry, and builds its strategies. Raises MemoryStoreError."""
        [head] = await self.memories.heads([resident.tag])
        await self.agree(resident, head)
        assert resident.generation is not None
        if resident.loaded:
            found = await self.memories.read(resident.tag, resident.generation, resident.position, _PAGE)
            await self.take(resident, resident.generation, found)
            return
        with resident.lock:
            resident.learned_meanwhile = []
            unsent = [one.held for one in self._outbox.of(resident.name)]
        try:
            held, position = await self._read(resident.tag, resident.generation)
            if not held and resident.forked:
                held, position = await self._fork(resident), b"0-0"
        except BaseException:
            resident.learned_meanwhile = None
            raise
        resident.replace_log([*held, *unsent], position)
        if held:
            await self._list([resident.tag])
            await self._renew(resident)
        resident.build([*resident.strategies])

    async def _renew(self, resident: Resident) -> None:
        """A memory is used: the time after which the store deletes it as unused begins anew."""
        if not resident.config.stored_seconds and resident.config.orphan_ttl:
            await self.memories.renew(resident.tag, resident.generation or 0, resident.config.orphan_ttl)

    async def agree(self, resident: Resident, head: Head) -> None:
        """Takes over what the store says of a memory. A purge empties it. Raises MemoryStoreError."""
        known = resident.generation
        if head.newer and not resident.newer:
            _log.warning("memory %s is of a newer version; it is read, not written", resident.tag)
        resident.newer = head.newer
        if known is not None and head.generation < known:
            if not head.newer:
                await self.memories.raise_again(resident.tag, known, head.generation)
            return
        if known == head.generation:
            return
        purged_at = None if head.purged_since is None else time.monotonic() - head.purged_since
        if known is not None or purged_at is not None:
            self._counters.purges += known is not None
            resident.reset(head.generation, purged_at)
        resident.generation = head.generation
        self._counters.stale += self._outbox.discard(
            resident.name, lambda one: not resident.is_current(one.generation, one.began)
        )

    async def take(self, resident: Resident, generation: int, found: SequenceOf[Entry]) -> None:
        """Learns entries that were read after `resident.position` in a generation."""
        found = [one for one in found if id_order(one[0]) > id_order(resident.position)]
        if not found or not resident.loaded or resident.generation != generation:
            return
        resident.position = found[-1][0]
        held = self._decoded(resident.tag, generation, found, others_only=True)
        with resident.lock:
            for one in held:
                resident.add(one)
        self._counters.received += len(held)
        await self._learn(resident, [one.record for one in held])

    async def check(self, live_only: bool) -> None:
        """Compares memories with the store's, which may have lost something. Raises MemoryStoreError."""
        residents = [one for one in self._residents.all() if one.live or not live_only]
        for start in range(0, len(residents), _CHECKED):
            some = residents[start : start + _CHECKED]
            for resident, head in zip(some, await self.memories.heads([one.tag for one in some]), strict=True):
                await self.agree(resident, head)
                if not head.known and resident.loaded and len(resident.log):
                    await self._restore(resident)
            some = [one for one in some if one.loaded]
            ids = await self.memories.last_ids([(one.tag, one.generation or 0) for one in some])
            for resident, last in zip(some, ids, strict=True):
                if id_order(last) < id_order(resident.position):
                    resident.position = last
                    self._counters.reloads += 1

    async def purged(self, parts: frozenset[str]) -> None:
        """Some tenants, by their names in keys, were purged. Raises MemoryStoreError."""
        some = [one for one in self._residents.all() if tenant_part(one.tag) in parts]
        for resident, head in zip(some, await self.memories.heads([one.tag for one in some]), strict=True):
            await self.agree(resident, head)

    async def push(self) -> None:
        """Sends the outbox. Raises StoreUnavailableError."""
        while taken := self._outbox.take(_PUSH_TOKENS):
            unsent = taken
            try:
                unsent = await self._send(taken)
            finally:
                self._outbox.settle(unsent)
            if unsent:
                return

    async def stored(self, name: MemoryName) -> tuple[Head, list[Record]]:
        """What the store says of a memory and the records that it and the outbox hold. Raises MemoryStoreError."""
        tag = self._naming.tag(name)
        [head] = await self.memories.heads([tag])
        held, _ = await self._read(tag, head.generation)
        unsent = [one.held for one in self._outbox.of(name) if _is_current(one, head)]
        return head, [one.record for one in (*held, *unsent)]

    async def append(self, name: MemoryName, generation: int, records: SequenceOf[Record]) -> Head:
        """Writes records to a memory at once, as an import does; what the store says of it then.

        Raises:
            MemoryStoreError: some may be written.
        """
        tag, resident = self._naming.tag(name), self._residents.get(name)
        head = Head(generation, True, False, None)
        await self.make_room()  # an import can fill a store faster than the checks come
        await self._list([tag])
        for run in runs(records):
            [answer] = await self.memories.append([self._append_of(name, resident, generation, run)])
            if isinstance(answer, StoreFullError):
                await self.make_room(is_full=True)
                [answer] = await self.memories.append([self._append_of(name, resident, generation, run)])
            if isinstance(answer, MemoryStoreError):
                raise answer
            head = answer[1]
            if head.generation != generation:
                await self.memories.unlink(tag, generation)
                break
        return head

    async def make_room(self, is_full: bool = False) -> None:
        """Deletes memories from a store that is nearly full, or refused a write. Raises MemoryStoreError."""
        now = time.monotonic()
        if now - self._room_at >= _ROOM_SECONDS:
            self._room_at = now
            await make_room(self.memories, self._naming.fingerprint, is_full)

    async def note_use(self) -> None:
        """Memories that are only drafted from count as used, too. Raises MemoryStoreError."""
        now = time.monotonic()
        if now - self._used_at < _USE_SECONDS:
            return
        used = [one for one in self._residents.all() if one.loaded and one.used_at >= self._used_at]
        await self._list([one.tag for one in used])
        for one in used:
            await self._renew(one)
        await self.memories.forget_listed(self._naming.fingerprint)
        self._used_at = now

    async def _send(self, taken: list[Waiting]) -> list[Waiting]:
        """Those that could not be sent now."""
        groups: dict[MemoryName, list[Waiting]] = {}
        for one in taken:
            groups.setdefault(one.name, []).append(one)
        heads = await self._heads(groups)
        sent: list[tuple[MemoryName, int, list[Waiting]]] = []
        unsent: list[Waiting] = []
        for name, waiting in groups.items():
            if (head := heads[name]) is None:
                unsent += waiting
            elif head.newer:
                self._counters.newer_records += len(waiting)
            else:
                current = [one for one in waiting if _is_current(one, head)]
                self._counters.stale += len(waiting) - len(current)
                sent += [(name, head.generation, run) for run in runs(current, record=_record_of)]
        await self._list([self._naming.tag(name) for name, _, _ in sent])
        for _, _, run in sent:
            for one in run:  # its time was this process's, if it was learned before the store's was known
                one.held.record = replace(_record_of(one), learned_at=int(self.memories.clock.at(one.learned)))
        appends = [
            self._append_of(name, self._residents.get(name), generation, [*map(_record_of, run)])
            for name, generation, run in sent
        ]
        answers = await self.memories.append(appends)
        for (name, generation, run), append, answer in zip(sent, appends, answers, strict=True):
            if isinstance(answer, MemoryStoreError):
                unsent += run
                self._refuse(append.tag, answer)
            else:
                await self._sent(self._residents.get(name), generation, run, append.tag, *answer)
        if any(isinstance(answer, StoreFullError) for answer in answers):
            await self.make_room(is_full=True)
        return unsent

    async def _heads(self, names: Iterable[MemoryName]) -> dict[MemoryName, Head | None]:
        """What is known here of each memory, or, if it is not in this process, to the store; None: nothing yet."""
        found: dict[MemoryName, Head | None] = {}
        away = []
        for name in names:
            if (resident := self._residents.get(name)) is None:
                away.append(name)
            elif resident.generation is None:
                found[name] = None
            else:
                since = None if resident.purged_at is None else time.monotonic() - resident.purged_at
                found[name] = Head(resident.generation, True, resident.newer, since)
        heads = await self.memories.heads([self._naming.tag(name) for name in away])
        return found | dict(zip(away, heads, strict=True))

    async def _sent(
        self, resident: Resident | None, generation: int, run: list[Waiting], tag: str, id_: bytes, head: Head
    ) -> None:
        self._refused = False
        if head.generation > generation:
            self._counters.stale += len(run)
            await self.memories.unlink(tag, generation)
        else:
            self._counters.pushed += len(run)
            self._counters.last_lag = time.monotonic() - run[0].learned
            for one in run:
                one.held.id = id_
        if resident is not None and resident.generation == generation:
            await self.agree(resident, head)

    def _refuse(self, tag: str, error: MemoryStoreError) -> None:
        if isinstance(error, StoreUnavailableError):
            raise error
        if not self._refused:
            self._refused = True  # logged once, until the store accepts records again
            _log.error("store refuses learned records of %s: %s", tag, error)

    def _append_of(
        self, name: MemoryName, resident: Resident | None, generation: int, run: SequenceOf[Record]
    ) -> Append:
        tag = self._naming.tag(name)
        log = resident.log if resident is not None and resident.loaded else None
        config = self._residents.config_of(name)
        return Append(
            tag=tag,
            generation=generation,
            name=self._codec.encode_name(tag, name),
            value=self._codec.encode(tag, generation, self._writer, run),
            first_id=log.first_id if log is not None and log.trimmed else None,
            max_bytes=config.bytes,
            expiry=config.expiry,
            tokens=None if log is None else log.tokens,
        )

    async def _list(self, tags: Iterable[str]) -> None:
        """Memories are listed before they are written to, so that there is none that the list does not have."""
        now = time.monotonic()
        due = [tag for tag in dict.fromkeys(tags) if now - self._listed.get(tag, -_LISTED_SECONDS) >= _LISTED_SECONDS]
        try:
            await self.memories.announce(due, self.memories.clock.now())
        except StoreFullError:
            await self.make_room(is_full=True)
            return
        self._listed = {tag: at for tag, at in self._listed.items() if now - at < _LISTED_SECONDS}
        self._listed |= dict.fromkeys(due, now)

    async def _read(self, tag: str, generation: int) -> tuple[list[Held], bytes]:
        """All records of a stream, and the id of its last entry."""
        held: list[Held] = []
        position = b"0-0"
        while found := await self.memories.read(tag, generation, position, _PAGE):
            held += self._decoded(tag, generation, found)
            position = found[-1][0]
            if len(found) < _PAGE:
                break
        return held, position

    def _decoded(self, tag: str, generation: int, found: Iterable[Entry], others_only: bool = False) -> list[Held]:
        """The records of entries; of other processes only, or of all. What cannot be decoded is logged and counted."""
        held: list[Held] = []
        for id_, value in found:
            try:
                writer, records = self._codec.decode(tag, generation, value)
            except CorruptValueError as error:
                self._counters.unreadable += 1
                _log.error("entry %s of memory %s cannot be read: %s", id_.decode(), tag, error)
                continue
            if not (others_only and writer == self._writer):
                stored_at = id_order(id_)[0] // 1000  # by the store's clock: no record is younger than its entry is old
                held += [Held(replace(one, learned_at=min(one.learned_at, stored_at)), id_) for one in records]
        return held

    async def _fork(self, resident: Resident) -> list[Held]:
        """The records of the tenant's memory, which an arm's begins with, if no process has begun it before."""
        if resident.newer or not await self.memories.claim(resident.tag):
            return []
        _, records = await self.stored(MemoryName(resident.name.tenant))
        assert resident.generation is not None
        await self.append(resident.name, resident.generation, records)
        return [Held(record) for record in records]

    async def _restore(self, resident: Resident) -> None:
        """Writes a memory that the store has lost; one of the processes that have it does."""
        assert resident.generation is not None
        unsent = {id(one.held) for one in self._outbox.of(resident.name)}
        records = [held.record for held in resident.log if id(held) not in unsent]
        if not records:
            return
        if not await self.memories.claim(resident.tag):
            resident.loaded, resident.retry_at = False, time.monotonic() + _RESTORE_SECONDS
            return
        await self.append(resident.name, resident.generation, records)
        self._counters.restored += 1
        _log.warning("memory %s restored to a store that had lost it", resident.tag)


def _record_of(one: Waiting) -> Record:
    return one.held.record


def _is_current(one: Waiting, head: Head) -> bool:
    """Whether no purge came after the request that a record is of had begun."""
    in_time = head.purged_since is None or time.monotonic() - one.began < head.purged_since
    return one.generation in (None, head.generation) and in_time
