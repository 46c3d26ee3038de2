"""What operators do with memories: statistics, export, filling, purging, and those that no process uses.

Each operation is a frozen dataclass that can be pickled; `Memory.submit` runs it on the memory thread. Each may raise
MemoryStoreError.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from collections.abc import Set as SetOf
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from draftwood_memory.config import Terms
from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import CorruptValueError, MemoryPurgedError, NewerMemoryError
from draftwood_memory.memory import Memory
from draftwood_memory.record_log import Held
from draftwood_memory.records import Int32Array, Kind, Record, split
from draftwood_memory.replica import Replica
from draftwood_memory.residents import Resident
from draftwood_memory.store import legacy
from draftwood_memory.store.memories import Memories, StoredMemory
from draftwood_memory.store.naming import KINDS_KEY, MemoryName, Naming, arm_part, fingerprint_of, kind_of, tenant_part

ORPHANED_SECONDS = 3600.0
"""A kind of memories that no process has used for so long is orphaned. Not tuned: longer than a restart takes."""
_PURGED = "the memory was purged while it was being filled"


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """One memory, in the store and in this process.

    Attributes:
        resident: it is in this process, with indexes of `index_bytes`.
    """

    name: MemoryName
    stored: StoredMemory
    resident: bool
    index_bytes: int


@dataclass(frozen=True, slots=True)
class StatisticsReport:
    """The memories of a store, and this process's use of it.

    Attributes:
        memories: the latest written first.
        following: `first` of the next page; None if there is none.
        store: its address, without passwords.
        healthy: the latest call to the store succeeded.
        max_bytes: bound of all memories in this process.
        known: there is a memory in the store or in this process.
    """

    memories: list[MemoryStatistics]
    following: int | None
    store: str
    healthy: bool
    counters: MemoryCounters
    max_bytes: int
    known: bool


@dataclass(frozen=True, slots=True)
class GetStatistics:
    """Statistics of one tenant's memories, or of all tenants' with None.

    Memories that hold no records since a purge, or that cannot be decoded here, are left out.

    Attributes:
        first: how many memories are skipped.
        limit: of the memories looked at.
    """

    tenant: str | None
    first: int = 0
    limit: int = 1000

    async def run(self, memory: Memory) -> StatisticsReport:
        here = {one.tag: one for one in memory.residents.all()}
        if memory.memories is None:
            tags = [tag for tag, one in reversed(here.items()) if self.tenant in (None, one.name.tenant)]
        elif self.tenant is None:
            tags = await memory.memories.tags(memory.naming.fingerprint)
        else:
            part = memory.naming.part(self.tenant)
            tags = sorted(await memory.memories.tags_of(part, memory.naming.fingerprint))
        end = self.first + self.limit
        found = await self._stored(memory, tags[self.first : end])
        statistics = []
        for name, stored in found:
            resident = here.get(stored.tag)
            index_bytes = 0 if resident is None else resident.index_bytes
            statistics.append(MemoryStatistics(name, stored, resident is not None, index_bytes))
        return StatisticsReport(
            memories=statistics,
            following=end if end < len(tags) else None,
            store="memory" if memory.memories is None else memory.memories.client.description,
            healthy=memory.thread.healthy,
            counters=memory.counters(),
            max_bytes=memory.config.max_bytes,
            known=bool(found) or any(one.name.tenant == self.tenant for one in here.values()),
        )

    async def _stored(self, memory: Memory, tags: list[str]) -> list[tuple[MemoryName, StoredMemory]]:
        if memory.memories is None:
            some = [one for one in memory.residents.all() if one.tag in tags and len(one.log)]
            sizes = {one.tag: (one.log.tokens, one.log.nbytes, len(one.log), False) for one in some}
            return [
                (one.name, StoredMemory(one.tag, b"", one.generation or 0, *sizes[one.tag])) for one in reversed(some)
            ]
        found = []
        for stored in await memory.memories.info(tags):
            name = _name(memory, stored)
            if name is not None:
                found.append((name, stored))
        return found


@dataclass(frozen=True, slots=True)
class ExportMemory:
    """All records of one memory, the oldest first; none if it does not exist. It is not loaded into this process."""

    name: MemoryName

    async def run(self, memory: Memory) -> list[Record]:
        async with _locked(memory) as replica:
            return await _records(memory, replica, self.name)


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """How many memories were emptied, and how many tokens they had in the store.

    Attributes:
        final_in: seconds until processes that cannot reach the store have forgotten the records, too; 0 if none is
            known that holds some.
    """

    memories: int
    tokens: int
    final_in: float = 0.0


@dataclass(frozen=True, slots=True)
class PurgeMemory:
    """Deletes all records of a tenant on all replicas: of all models and arms, with plain and with hidden names.

    Ends when all processes that reach the store have applied it.

    Raises:
        NewerMemoryError: a newer version wrote to some; the others are purged.
    """

    tenant: str

    async def run(self, memory: Memory) -> PurgeResult:
        own = [one for one in memory.residents.all() if one.name.tenant == self.tenant]
        if memory.replica is None:
            return _purge_here(own)
        for naming in _namings(memory):
            prefix = naming.tenant_prefix(self.tenant)
            await legacy.purge(memory.replica.memories.client, naming.fingerprint, prefix)
        at_least = max([one.generation or 0 for one in own], default=-1) + 1
        tenants = {(naming.part(self.tenant), None) for naming in _namings(memory)}
        purged = await _purge(memory.replica, tenants, at_least)
        return replace(purged, memories=max(purged.memories, 1))


@dataclass(frozen=True, slots=True)
class PurgeArms:
    """Deletes the memories of arms on all replicas: of all tenants and models, with plain and with hidden names.

    Those that a newer version of this program wrote to are left.

    Attributes:
        arms: labels; the empty one, a tenant's memory outside of experiments, is not among them.
    """

    arms: tuple[str, ...]

    async def run(self, memory: Memory) -> int:
        """The number of memories that were emptied."""
        assert all(self.arms)
        if memory.replica is None:
            return _purge_here([one for one in memory.residents.all() if one.name.arm in self.arms]).memories
        found: set[tuple[str, str | None]] = set()
        for fingerprint in {memory.naming.fingerprint, *map(fingerprint_of, await _kinds(memory.replica.memories))}:
            parts = {naming.part(arm) for naming in _namings(memory) for arm in self.arms}
            tags = await memory.replica.memories.tags(fingerprint)
            found |= {(tenant_part(tag), arm_part(tag)) for tag in tags if arm_part(tag) in parts}
        with suppress(NewerMemoryError):
            return (await _purge(memory.replica, found)).memories
        return 0


@dataclass(frozen=True, slots=True)
class AdoptArm:
    """Adds the records of an arm's memory to the memory of each tenant that has them. Those that it has stay once.

    So an operation that was interrupted can be repeated. A purge while it runs keeps it from adding what was purged.

    Attributes:
        arm: its label.

    Raises:
        MemoryStoreError: the store failed; the memories of some tenants may have been added to.
    """

    arm: str

    async def run(self, memory: Memory) -> int:
        """The number of records that were added."""
        names = {one.name for one in memory.residents.all() if one.name.arm == self.arm}
        if memory.memories is not None:
            part = memory.naming.part(self.arm)
            tags = [tag for tag in await memory.memories.tags(memory.naming.fingerprint) if arm_part(tag) == part]
            names |= {name for one in await memory.memories.info(tags) if (name := _name(memory, one)) is not None}
        return sum([await self._adopt(memory, name) for name in sorted(names)])

    async def _adopt(self, memory: Memory, arm: MemoryName) -> int:
        name = MemoryName(arm.tenant)
        if arm in memory.residents:  # requests use it here, and will use the tenant's
            memory.residents.open(name)
        async with _locked(memory) as replica:
            [head] = [None] if replica is None else await replica.memories.heads([memory.naming.tag(name)])
            if head is not None and head.newer:
                return 0
            known = {_identity(record) for record in await _records(memory, replica, name)}
            records = [one for one in await _records(memory, replica, arm) if _identity(one) not in known]
            generation = memory.residents.open(name).generation or 0 if head is None else head.generation
            if records:
                with suppress(MemoryPurgedError):
                    await _add(memory, replica, name, generation, records)
            return len(records)


@dataclass(frozen=True, slots=True)
class OrphanedMemory:
    """A memory that no process uses: its model is not served any more, or not with its key for names.

    Attributes:
        name: None if it cannot be decrypted here.
        unserved: seconds since a process noted that it uses memories of this kind.
    """

    name: MemoryName | None
    stored: StoredMemory
    unserved: float

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.stored.tag)


@dataclass(frozen=True, slots=True)
class ListOrphans:
    """The memories that no process has used for an hour, ordered by tag."""

    async def run(self, memory: Memory) -> list[OrphanedMemory]:
        if memory.memories is None:
            return []
        kinds = await _kinds(memory.memories)
        kinds.pop(memory.naming.kind, None)
        unserved = {kind: since for kind, since in kinds.items() if since >= ORPHANED_SECONDS}
        found: list[OrphanedMemory] = []
        for fingerprint in sorted({fingerprint_of(kind) for kind in unserved}):
            tags = sorted(tag for tag in await memory.memories.tags(fingerprint) if kind_of(tag) in unserved)
            for info in await memory.memories.info(tags):
                found.append(OrphanedMemory(_name(memory, info), info, unserved[kind_of(info.tag)]))
        return found


@dataclass(frozen=True, slots=True)
class PurgeOrphans:
    """Deletes the memories that no process uses, except those that a newer version wrote to.

    Attributes:
        fingerprint: only those of this model; "" for all.
    """

    fingerprint: str = ""

    async def run(self, memory: Memory) -> PurgeResult:
        chosen = [one.stored for one in await ListOrphans().run(memory) if self.fingerprint in ("", one.fingerprint)]
        chosen = [one for one in chosen if not one.newer]
        for one in chosen:
            assert memory.memories is not None
            await memory.memories.delete(one.tag, one.generation)
        return PurgeResult(len(chosen), sum(one.tokens for one in chosen))


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far one import into one memory has come; the next `FillMemory` of the import continues from it.

    Attributes:
        generation: of the memory at the first append; None before.
        records, tokens: confirmed by the store.
    """

    generation: int | None = None
    records: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FillMemory:
    """Adds sequences, int32[n] each, to a memory. Ends when the store has confirmed them.

    Attributes:
        terms: of the tenant.

    Raises:
        MemoryPurgedError: the memory was purged since the import's first append.
        StoreFullError: the store is full.
        MemoryStoreError: the store failed; earlier operations of the import are stored.
    """

    name: MemoryName
    kind: Kind
    sequences: list[Int32Array]
    progress: FillProgress
    terms: Terms

    async def run(self, memory: Memory) -> FillProgress:
        now = int(memory.clock.now())
        records = [Record(self.kind, piece, now) for tokens in self.sequences for piece in split(tokens)]
        if not records:
            return self.progress
        resident = memory.residents.pin(self.name, self.terms)
        try:
            async with _locked(memory) as replica:
                if replica is not None:
                    await replica.refresh(resident)
                    if resident.newer:
                        raise NewerMemoryError()
                generation = resident.generation or 0
                if self.progress.generation not in (None, generation):
                    raise MemoryPurgedError(_PURGED)
                await _add(memory, replica, self.name, generation, records)
        finally:
            memory.residents.unpin(resident)
        tokens = self.progress.tokens + sum(int(record.tokens.size) for record in records)
        return FillProgress(generation, self.progress.records + len(records), tokens)


async def _records(memory: Memory, replica: Replica | None, name: MemoryName) -> list[Record]:
    """All records of a memory, which is not loaded into this process for it."""
    resident = memory.residents.get(name)
    if replica is not None and (resident is None or not resident.loaded):
        return (await replica.stored(name))[1]
    if resident is None:
        return []
    if replica is not None:
        await replica.refresh(resident)
    return [held.record for held in resident.log]


async def _add(
    memory: Memory, replica: Replica | None, name: MemoryName, generation: int, records: list[Record]
) -> None:
    """Adds records to a memory in a generation, in the store and here. Raises MemoryPurgedError, MemoryStoreError."""
    resident = memory.residents.get(name)
    if resident is not None and (replica is None or resident.generation == generation):
        with resident.lock:
            for record in records:
                resident.add(Held(record))
    if replica is not None:
        head = await replica.append(name, generation, records)
        if resident is not None:
            await replica.agree(resident, head)
        if head.generation != generation:
            raise MemoryPurgedError(_PURGED)
    if resident is not None:
        await memory.learn_records(resident, records)


def _identity(record: Record) -> tuple[int, int, bytes]:
    """A copy of a record has the same."""
    return record.learned_at, record.request, record.tokens.tobytes()


def _namings(memory: Memory) -> set[Naming]:
    """That of the memory, and plain names, from before encryption was switched on."""
    return {memory.naming, Naming(memory.naming.fingerprint)}


def _purge_here(own: list[Resident]) -> PurgeResult:
    """Without a store."""
    tokens = sum(one.log.tokens for one in own)
    for one in own:
        one.reset((one.generation or 0) + 1, time.monotonic())
        one.loaded = True
    return PurgeResult(len(own), tokens)


async def _purge(replica: Replica, memories: SetOf[tuple[str, str | None]], at_least: int = 0) -> PurgeResult:
    """Purges tenants, or arms of theirs, by their names in keys. Ends when all processes know of it.

    Raises:
        NewerMemoryError: a newer version wrote to some; the others are purged.
        MemoryStoreError: the store failed; nothing is certain.
    """
    purged: dict[str, int] = {}
    newer: NewerMemoryError | None = None
    latest = b"0-0"
    async with replica.lock:
        for part, arm in sorted(memories, key=str):
            try:
                purged |= await replica.memories.purge(part, arm, at_least)
            except NewerMemoryError as error:
                newer = error
            latest = await replica.processes.announce(part)
        await replica.purged(frozenset(part for part, _ in memories))
    final_in = await replica.processes.wait(latest)
    if newer is not None:
        raise newer
    return PurgeResult(len(purged), sum(purged.values()), final_in)


@asynccontextmanager
async def _locked(memory: Memory) -> AsyncIterator[Replica | None]:
    """No round runs meanwhile."""
    if memory.replica is None:
        yield None
    else:
        async with memory.replica.lock:
            yield memory.replica


async def _kinds(memories: Memories) -> dict[str, float]:
    """For each kind of memories, the seconds since a process noted that it uses them."""
    found = await memories.client.command("ZRANGE", KINDS_KEY, 0, -1, "WITHSCORES")
    now = memories.clock.now()
    return {kind.decode(): max(0.0, now - float(at)) for kind, at in zip(found[::2], found[1::2], strict=True)}


def _name(memory: Memory, stored: StoredMemory) -> MemoryName | None:
    try:
        return memory.codec.decode_name(stored.tag, stored.name)
    except CorruptValueError:
        return None
