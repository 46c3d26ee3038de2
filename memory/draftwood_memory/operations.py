"""What operators do with memories: statistics, export, filling, purging, and those that no process uses.

Each operation is a frozen dataclass that can be pickled; `Memory.submit` runs it on the memory thread. Each may raise
MemoryStoreError.
"""

from __future__ import annotations

import time
from collections.abc import Set as SetOf
from contextlib import suppress
from dataclasses import dataclass, replace

from draftwood_memory.config import MemoryOverrides
from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import MemoryPurgedError, MemoryStoreError, NewerMemoryError, WrongTypeError
from draftwood_memory.memory import Memory
from draftwood_memory.records import Int32Array, Kind, LoggedRecord, Record, split
from draftwood_memory.replica import Replica
from draftwood_memory.resident import Resident
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import MemoryName, Naming, arm_part, fingerprint_of, kind_of, tenant_part
from draftwood_memory.store.stored import StoredMemory

_PURGED = "the memory was purged while it was being filled"
ORPHANED_SECONDS = 3600.0
"""A kind of memories that no process has used for so long is orphaned: longer than a restart takes."""


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
        memories: the latest written first; those in this process, the latest used first, if the store fails.
        following: `first` of the next page; None if there is none.
        store: its address, without passwords.
        healthy: the latest call to the store succeeded.
        max_bytes: bound of all memories in this process.
        exists: there is a memory in the store or in this process.
    """

    memories: list[MemoryStatistics]
    following: int | None
    store: str
    healthy: bool
    counters: MemoryCounters
    max_bytes: int
    exists: bool


@dataclass(frozen=True, slots=True)
class GetStatistics:
    """Statistics of one tenant's memories, or of all tenants' with None. Without an answer of the store, of those in
    this process.

    Memories that hold no records since a purge, or that cannot be decoded here, are left out.

    Attributes:
        first: how many memories are skipped.
        limit: of the memories looked at.

    Raises:
        MemoryStoreError: the store failed, and nothing of the tenant is in this process.
    """

    tenant: str | None
    first: int = 0
    limit: int = 1000

    async def run(self, memory: Memory) -> StatisticsReport:
        here = {resident.tag: resident for resident in memory.residents.all()}
        is_here = any(resident.name.tenant == self.tenant for resident in here.values())
        healthy = memory.thread.healthy
        try:
            tags, page = await self._page(memory, memory.memories)
        except MemoryStoreError:
            if self.tenant is not None and not is_here:
                raise  # the store may have it
            healthy, (tags, page) = False, await self._page(memory, None)
        statistics = []
        for name, stored in page:
            resident = here.get(stored.tag)
            index_bytes = 0 if resident is None else resident.index_bytes
            statistics.append(MemoryStatistics(name, stored, resident is not None, index_bytes))
        end = self.first + self.limit
        return StatisticsReport(
            memories=statistics,
            following=end if end < len(tags) else None,
            store="memory" if memory.memories is None else memory.memories.client.description,
            healthy=healthy,
            counters=memory.counters(),
            max_bytes=memory.config.max_bytes,
            exists=bool(page) or is_here,
        )

    async def _page(
        self, memory: Memory, store: Memories | None
    ) -> tuple[list[str], list[tuple[MemoryName, StoredMemory]]]:
        """All tags, and the memories of the page: of this process without a store. Raises MemoryStoreError."""
        if store is None:
            residents = [r for r in reversed(memory.residents.all()) if self.tenant in (None, r.name.tenant)]
            tags = [resident.tag for resident in residents]
        elif self.tenant is None:
            tags = await store.catalogue.tags(memory.naming.fingerprint)
        else:
            part = memory.naming.part(self.tenant)
            tags = sorted(await store.tags_of(part, memory.naming.fingerprint))
        shown = slice(self.first, self.first + self.limit)
        if store is not None:
            infos = [(memory.name_of(info), info) for info in await store.info(tags[shown])]
            return tags, [(name, info) for name, info in infos if name is not None]
        memories = []
        for resident in residents[shown]:
            if len(resident.log):
                sizes = resident.log.tokens, resident.log.nbytes, len(resident.log), resident.newer
                stored = StoredMemory(resident.tag, b"", resident.epoch or 0, *sizes)
                memories.append((resident.name, stored))
        return tags, memories


@dataclass(frozen=True, slots=True)
class ExportMemory:
    """All records of one memory, the oldest first; none if it does not exist. It is not loaded into this process."""

    name: MemoryName

    async def run(self, memory: Memory) -> list[Record]:
        async with memory.locked() as replica:
            return await _records(memory, replica, self.name)


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
        names = {resident.name for resident in memory.residents.all() if resident.name.arm == self.arm}
        if memory.memories is not None:
            part = memory.naming.part(self.arm)
            tags = [
                tag for tag in await memory.memories.catalogue.tags(memory.naming.fingerprint) if arm_part(tag) == part
            ]
            names |= {
                name for stored in await memory.memories.info(tags) if (name := memory.name_of(stored)) is not None
            }
        added = 0
        for name in sorted(names):
            with suppress(WrongTypeError):  # this tenant's memory alone cannot be used
                added += await self._adopt(memory, name)
        return added

    async def _adopt(self, memory: Memory, arm: MemoryName) -> int:
        name = MemoryName(arm.tenant)
        if arm in memory.residents:  # requests use it here, and will use the tenant's
            memory.residents.open(name)
        async with memory.locked() as replica:
            metadata = None if replica is None else await replica.memories.metadata(memory.naming.tag(name))
            if metadata is not None and metadata.newer:
                return 0
            known = {_identity(record) for record in await _records(memory, replica, name)}
            records = [record for record in await _records(memory, replica, arm) if _identity(record) not in known]
            epoch = memory.residents.open(name).epoch or 0 if metadata is None else metadata.epoch
            if records:
                with suppress(MemoryPurgedError):
                    await _add(memory, replica, name, epoch, records)
        await _learned(memory, name)
        return len(records)


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far one import into one memory has come; the next `FillMemory` of the import continues from it.

    Attributes:
        epoch: of the memory at the first append; None before.
        records, tokens: confirmed by the store.
    """

    epoch: int | None = None
    records: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FillMemory:
    """Adds sequences, int32[n] each, to a memory. Ends when the store has confirmed them.

    Attributes:
        overrides: of the tenant.

    Raises:
        MemoryPurgedError: the memory was purged since the import's first append.
        StoreFullError: the store is full.
        MemoryStoreError: the store failed; earlier operations of the import are stored.
    """

    name: MemoryName
    kind: Kind
    sequences: list[Int32Array]
    progress: FillProgress
    overrides: MemoryOverrides

    async def run(self, memory: Memory) -> FillProgress:
        now = int(memory.clock.now())
        records = [Record(self.kind, piece, now) for tokens in self.sequences for piece in split(tokens)]
        if not records:
            return self.progress
        resident = memory.residents.pin(self.name, self.overrides)
        try:
            async with memory.locked() as replica:
                if replica is not None:
                    await replica.refresh(resident)
                    if resident.newer:
                        raise NewerMemoryError()
                epoch = resident.epoch or 0
                if self.progress.epoch not in (None, epoch):
                    raise MemoryPurgedError(_PURGED)
                await _add(memory, replica, self.name, epoch, records)
            await _learned(memory, self.name)
        finally:
            memory.residents.unpin(resident)
        tokens = self.progress.tokens + sum(int(record.tokens.size) for record in records)
        return FillProgress(epoch, self.progress.records + len(records), tokens)


async def _records(memory: Memory, replica: Replica | None, name: MemoryName) -> list[Record]:
    """All records of a memory, which is not loaded into this process for it."""
    resident = memory.residents.get(name)
    if replica is not None and (resident is None or not resident.loaded):
        return (await replica.stored(name))[1]
    if resident is None:
        return []
    if replica is not None:
        await replica.refresh(resident)
    return [logged.record for logged in resident.log]


async def _add(memory: Memory, replica: Replica | None, name: MemoryName, epoch: int, records: list[Record]) -> None:
    """Adds records to a memory in an epoch, in the store and here; its strategies learn them later.

    Raises:
        MemoryPurgedError, MemoryStoreError: those are added that the store has.
    """
    resident = memory.residents.get(name)

    def add(added: list[Record], id_: bytes | None = None) -> None:
        if resident is None or (replica is not None and resident.epoch != epoch):
            return
        with resident.lock:
            for record in added:
                resident.add(LoggedRecord(record, id_))
        memory.between_steps.learn_later(resident, added)

    if replica is None:
        add(records)
        return
    metadata = await replica.records.append(name, epoch, records, add)
    if resident is not None:
        await replica.apply_metadata(resident, metadata)
    if metadata.epoch != epoch:
        raise MemoryPurgedError(_PURGED)


async def _learned(memory: Memory, name: MemoryName) -> None:
    """Waits, without the replica's lock, until what was added to a memory is learned here."""
    resident = memory.residents.get(name)
    if resident is not None:
        await memory.between_steps.learned(resident)


def _identity(record: Record) -> tuple[int, int, bytes]:
    """A copy of a record has the same."""
    return record.learned_at, record.request, record.tokens.tobytes()


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
        own = [resident for resident in memory.residents.all() if resident.name.tenant == self.tenant]
        if memory.replica is None:
            return _purge_here(own)
        at_least = max([resident.epoch or 0 for resident in own], default=-1) + 1
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
            return _purge_here(
                [resident for resident in memory.residents.all() if resident.name.arm in self.arms]
            ).memories
        catalogue, purged = memory.replica.memories.catalogue, set[tuple[str, str | None]]()
        for fingerprint in {memory.naming.fingerprint, *map(fingerprint_of, await catalogue.kinds())}:
            parts = {naming.part(arm) for naming in _namings(memory) for arm in self.arms}
            tags = await catalogue.tags(fingerprint)
            purged |= {(tenant_part(tag), arm_part(tag)) for tag in tags if arm_part(tag) in parts}
        with suppress(NewerMemoryError):
            return (await _purge(memory.replica, purged)).memories
        return 0


def _namings(memory: Memory) -> set[Naming]:
    """That of the memory, and plain names, from before encryption was switched on."""
    return {memory.naming, Naming(memory.naming.fingerprint)}


def _purge_here(residents: list[Resident]) -> PurgeResult:
    """Without a store."""
    tokens = sum(resident.log.tokens for resident in residents)
    for resident in residents:
        resident.reset((resident.epoch or 0) + 1, time.monotonic())
        resident.loaded = True
    return PurgeResult(len(residents), tokens)


async def _purge(replica: Replica, memories: SetOf[tuple[str, str | None]], at_least: int = 0) -> PurgeResult:
    """Purges tenants, or some of their arms, by their names in keys. Returns when all processes have applied it.

    Raises:
        NewerMemoryError, WrongTypeError: a newer version, or another program, wrote to some; the others are purged.
        MemoryStoreError: the store failed; nothing is certain.
    """
    purged: dict[str, int] = {}
    refused: NewerMemoryError | WrongTypeError | None = None
    latest = 0
    async with replica.lock:
        for part, arm in sorted(memories, key=str):
            try:
                purged |= await replica.memories.purge(part, arm, at_least)
            except (NewerMemoryError, WrongTypeError) as error:
                refused = error
            latest = await replica.purges.announce(part)
        await replica.purged(frozenset(part for part, _ in memories))
    final_in = await replica.purges.wait(latest)
    if refused is not None:
        raise refused
    return PurgeResult(len(purged), sum(purged.values()), final_in)


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
        kinds = await memory.memories.catalogue.kinds()
        kinds.pop(memory.naming.kind, None)
        unserved = {kind: since for kind, since in kinds.items() if since >= ORPHANED_SECONDS}
        orphans: list[OrphanedMemory] = []
        for fingerprint in sorted({fingerprint_of(kind) for kind in unserved}):
            tags = sorted(tag for tag in await memory.memories.catalogue.tags(fingerprint) if kind_of(tag) in unserved)
            for info in await memory.memories.info(tags):
                orphans.append(OrphanedMemory(memory.name_of(info), info, unserved[kind_of(info.tag)]))
        return orphans


@dataclass(frozen=True, slots=True)
class PurgeOrphans:
    """Deletes the memories that no process uses, except those that a newer version wrote to.

    Attributes:
        fingerprint: only those of this model; "" for all.
    """

    fingerprint: str = ""

    async def run(self, memory: Memory) -> PurgeResult:
        chosen = [
            orphan.stored for orphan in await ListOrphans().run(memory) if self.fingerprint in ("", orphan.fingerprint)
        ]
        chosen = [stored for stored in chosen if not stored.newer]
        for stored in chosen:
            assert memory.memories is not None
            await memory.memories.delete(stored.tag, stored.epoch)
        return PurgeResult(len(chosen), sum(stored.tokens for stored in chosen))
