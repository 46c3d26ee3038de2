"""What operators do with memories: statistics, export, filling, purging.

Each operation is a frozen dataclass that can be pickled; `run` is executed on the memory thread. An operation holds the
replica's lock while it uses memories or store, so that it does not overlap with a round.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from draftwood_model_runner.request import MemoryTerms
from draftwood_service.memory.codec import Kind, Record, split
from draftwood_service.memory.errors import (
    CorruptValueError,
    MemoryPurgedError,
    MemoryStoreError,
    NewerMemoryError,
    StoreFullError,
)
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.naming import MemoryName, Naming, fingerprint_of
from draftwood_service.memory.orphans import ORPHANED_SECONDS, OrphanedMemory, PurgeResult, orphans, purge_all
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.pusher import append_of
from draftwood_service.memory.replica.residents import Resident
from draftwood_service.memory.store.base import Append, Appended, LogFull, Stale, StoredMemoryInfo
from draftwood_strategies.draft import Int32Array

_FULL_TRIES = 25
_FULL_SECONDS = 0.2
"""Tries to append to a full log, and the pause between two: five seconds for this or another process to fold it. Not
tuned: a fold of a million tokens takes a fifth of a second."""

Result_co = TypeVar("Result_co", covariant=True)
Result = TypeVar("Result")


class MemoryOperation(Protocol[Result_co]):
    """An operation on memories. `run` may raise `MemoryStoreError`."""

    async def run(self, memory: MemoryManager) -> Result_co: ...


def submit(operation: MemoryOperation[Result], memory: MemoryManager) -> Future[Result]:
    """Runs an operation on the memory thread. From any thread.

    Raises:
        MemoryStoreError: from the future.
    """
    return memory.thread.submit(operation.run(memory))


@dataclass(frozen=True, slots=True)
class TenantMemoryStatistics:
    """One memory, in the store and in this process.

    Attributes:
        resident: it is in this process, with indexes of `index_bytes`.
    """

    name: MemoryName
    stored: StoredMemoryInfo
    resident: bool
    index_bytes: int


@dataclass(frozen=True, slots=True)
class StatisticsReport:
    """The memories of a store, and this process's use of it.

    Attributes:
        memories: the latest written first.
        following: `first` of the next page; None if there is none.
        store: its address, without passwords.
        healthy: the latest round with the store succeeded.
        max_bytes: bound of all memories in this process.
        known: there is a memory in the store or in this process.
    """

    memories: list[TenantMemoryStatistics]
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

    async def run(self, memory: MemoryManager) -> StatisticsReport:
        async with memory.replica.lock:
            tags = await memory.store.tags() if self.tenant is None else await _tags_of(memory, self.tenant)
            end = self.first + self.limit
            found = await self._memories(memory, tags[self.first : end])
            known = bool(found) or any(memory.residents.by_tag(tag) is not None for tag in tags)
        following = end if end < len(tags) else None
        return StatisticsReport(
            memories=found,
            following=following,
            store=memory.store.description,
            healthy=memory.thread.healthy,
            counters=memory.counters(),
            max_bytes=memory.config.max_bytes,
            known=known,
        )

    async def _memories(self, memory: MemoryManager, tags: list[str]) -> list[TenantMemoryStatistics]:
        found: list[TenantMemoryStatistics] = []
        for info in await memory.store.info(tags):
            try:
                name = memory.codec.decode_name(info.tag, info.name)
            except CorruptValueError:
                continue
            resident = memory.residents.by_tag(info.tag)
            found.append(
                TenantMemoryStatistics(
                    name, info, resident is not None, 0 if resident is None else resident.index_bytes
                )
            )
        return found


@dataclass(frozen=True, slots=True)
class ExportMemory:
    """All records of one memory, the oldest first."""

    name: MemoryName

    async def run(self, memory: MemoryManager) -> list[Record]:
        async with memory.replica.lock:
            resident = memory.residents.open(self.name)
            await memory.replica.follower.refresh(resident)
            return [*resident.log]


@dataclass(frozen=True, slots=True)
class PurgeMemory:
    """Deletes all records of a tenant's memories on all replicas: of all models, with plain and with hidden names.

    Attributes:
        arm: deletes the memory of this arm alone, and of this model; None: all of the tenant.

    Raises:
        NewerMemoryError: a newer version wrote to some; the others are purged.
    """

    tenant: str
    arm: str | None = None

    async def run(self, memory: MemoryManager) -> PurgeResult:
        async with memory.replica.lock:
            if self.arm is None:
                tags = [*await _tags_of(memory, self.tenant), *await _tags_elsewhere(memory, self.tenant)]
            else:
                tags = [memory.naming.tag(MemoryName(self.tenant, self.arm))]
            tokens = sum(info.tokens for info in await memory.store.info(tags))
            newer: NewerMemoryError | None = None
            for tag in tags:
                try:
                    await _purge(memory, tag)
                except NewerMemoryError as error:
                    newer = error
            if newer is not None:
                raise newer
            return PurgeResult(len(tags), tokens)


@dataclass(frozen=True, slots=True)
class ListOrphans:
    """The memories that no process uses, ordered by tag."""

    async def run(self, memory: MemoryManager) -> list[OrphanedMemory]:
        async with memory.replica.lock:
            return await orphans(memory.store, memory.naming, memory.codec, ORPHANED_SECONDS)


@dataclass(frozen=True, slots=True)
class PurgeOrphans:
    """Deletes the memories that no process uses.

    Attributes:
        fingerprint: only those of this model; "" for all.
    """

    fingerprint: str = ""

    async def run(self, memory: MemoryManager) -> PurgeResult:
        async with memory.replica.lock:
            found = await orphans(memory.store, memory.naming, memory.codec, ORPHANED_SECONDS)
            chosen = [one for one in found if self.fingerprint in ("", one.fingerprint)]
            return await purge_all(memory.store, chosen)


@dataclass(frozen=True, slots=True)
class FillProgress:
    """How far one import into one memory has come; the next `FillMemory` of the import continues from it.

    Attributes:
        source: identifies the import in its records. A source of its own, so that it does not share the sequence
            numbers of the outbox.
        epoch: of the memory at the first append; None before.
        records, tokens: confirmed by the store.
    """

    source: str = field(default_factory=lambda: secrets.token_hex(8))
    epoch: int | None = None
    records: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class FillMemory:
    """Appends sequences, int32[n] each, to a memory. Ends when the store has confirmed them.

    Attributes:
        terms: of the tenant.

    Raises:
        MemoryPurgedError: the memory was purged since the import's first append.
        StoreFullError: the store, or the memory's log, stays full.
        MemoryStoreError: the store failed; earlier operations of the import are stored.
    """

    name: MemoryName
    kind: Kind
    sequences: list[Int32Array]
    progress: FillProgress
    terms: MemoryTerms

    async def run(self, memory: MemoryManager) -> FillProgress:
        records = self._records()
        if not records:
            return self.progress
        memory.residents.open(self.name, self.terms)
        resident = memory.residents.pin(self.name)
        try:
            epoch = await self._append(memory, resident, records)
        finally:
            memory.residents.unpin(resident)
        memory.thread.wake()
        tokens = self.progress.tokens + sum(int(record.tokens.size) for record in records)
        return replace(self.progress, epoch=epoch, records=records[-1].seq, tokens=tokens)

    def _records(self) -> list[Record]:
        pieces = [piece for tokens in self.sequences for piece in split(tokens)]
        first = self.progress.records + 1
        source, now = self.progress.source, int(time.time())
        return [Record(source, seq, self.kind, piece, now) for seq, piece in enumerate(pieces, first)]

    async def _append(self, memory: MemoryManager, resident: Resident, records: list[Record]) -> int:
        """Appends, and tries again while the log is full, with pauses outside of the lock; returns the epoch."""
        epoch = self.progress.epoch
        for _ in range(_FULL_TRIES):
            async with memory.replica.lock:
                if resident.epoch is None:
                    await memory.replica.follower.refresh(resident)
                if epoch is None:
                    epoch = resident.epoch or 0
                append = append_of(memory.codec, resident, epoch, self.progress.source, records)
                if await _try_append(memory, resident, append):
                    return epoch
            await asyncio.sleep(_FULL_SECONDS)
        raise StoreFullError("the memory's log is full and was not folded in time")


async def _try_append(memory: MemoryManager, resident: Resident, append: Append) -> bool:
    """Whether the store has the entries; if the log is full, it is folded."""
    [result] = await memory.store.append([append])
    if isinstance(result, Appended):
        resident.note_append(result)
        return True
    if isinstance(result, Stale):
        raise MemoryPurgedError("the memory was purged while it was being filled")
    if isinstance(result, MemoryStoreError):
        raise result
    assert isinstance(result, LogFull)
    await memory.replica.follower.refresh(resident)
    resident.fold_due = True
    await memory.replica.folder.fold()
    return False


async def _tags_of(memory: MemoryManager, tenant: str) -> list[str]:
    """The tags of a tenant's memories: the one outside of experiments, and those that the store lists."""
    own = memory.naming.tag(MemoryName(tenant))
    prefix = memory.naming.tenant_prefix(tenant)
    return [own, *(tag for tag in await memory.store.tags() if tag.startswith(prefix) and tag != own)]


async def _tags_elsewhere(memory: MemoryManager, tenant: str) -> list[str]:
    """The tags of a tenant's memories that this process does not use: of other models, and with plain names."""
    own = memory.naming
    fingerprints = {own.fingerprint, *map(fingerprint_of, await memory.store.kinds())}
    found: list[str] = []
    for fingerprint in sorted(fingerprints):
        namings = {Naming(fingerprint, own.secret), Naming(fingerprint)} - {own}
        prefixes = tuple(naming.tenant_prefix(tenant) for naming in namings)
        found += [tag for tag in await memory.store.tags(fingerprint) if tag.startswith(prefixes)]
    return found


async def _purge(memory: MemoryManager, tag: str) -> None:
    resident = memory.residents.by_tag(tag)
    known = None if resident is None else resident.epoch
    await memory.store.purge(tag, 0 if known is None else known + 1)
    if resident is not None:
        await memory.replica.follower.refresh(resident)
