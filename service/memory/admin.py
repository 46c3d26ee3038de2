"""What operators do with memories: look, export, fill, purge. For the event loop; the work is the memory's thread's."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from service.memory.codec.records import Kind, Record, parts
from service.memory.errors import (
    CorruptValueError,
    MemoryPurgedError,
    MemoryStoreError,
    StoreFullError,
)
from service.memory.names import MemoryName
from service.memory.replica.residents import Resident
from service.memory.store.base import Append, Appended, Facts, LogFull, Stale
from service.memory.tenants import TenantMemory
from strategies.draft import Int32Array

_FULL_TRIES = 25
_FULL_SECONDS = 0.2

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """A memory, as the store and this process have it."""

    name: MemoryName
    stored: Facts
    resident: bool
    index_bytes: int


class MemoryAdmin:
    """Operators' view of a `TenantMemory`. Every method may raise `MemoryStoreError`."""

    def __init__(self, memory: TenantMemory) -> None:
        self._memory = memory

    async def statistics(self, tenant: str | None) -> list[MemoryFacts]:
        """Of one tenant or all, those written to last first; without those that were purged or cannot be read."""
        return await self._do(self._statistics(tenant))

    async def export(self, name: MemoryName) -> list[Record]:
        """All that a memory holds, the oldest first."""
        return await self._do(self._export(name))

    async def purge(self, tenant: str) -> tuple[int, int]:
        """Empties a tenant's memories; returns how many, and how many tokens they held in the store."""
        return await self._do(self._purge(tenant))

    def intake(self, name: MemoryName) -> Intake:
        """For filling a memory."""
        return Intake(self._memory, name)

    async def _do(self, work: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(self._memory.thread.submit(work))

    async def _statistics(self, tenant: str | None) -> list[MemoryFacts]:
        memory = self._memory
        found: list[MemoryFacts] = []
        for facts in await memory.store.facts(await self._tags(tenant)):
            try:
                name = memory.sealed.open_name(facts.tag, facts.name)
            except CorruptValueError:
                continue
            resident = memory.residents.tagged(facts.tag)
            found.append(MemoryFacts(name, facts, resident is not None, 0 if resident is None else resident.nbytes))
        return found

    async def _tags(self, tenant: str | None) -> list[str]:
        """Of all memories, or of a tenant's: those that the store lists, and the one outside of experiments."""
        tags = await self._memory.store.tags()
        if tenant is None:
            return tags
        own = self._memory.naming.tag(MemoryName(tenant))
        prefix = self._memory.naming.tenant_prefix(tenant)
        return [own, *(tag for tag in tags if tag.startswith(prefix) and tag != own)]

    async def _export(self, name: MemoryName) -> list[Record]:
        resident = self._memory.residents.open(name)
        await self._memory.replica.refresh(resident)
        return [*resident.log]

    async def _purge(self, tenant: str) -> tuple[int, int]:
        memory = self._memory
        tags = await self._tags(tenant)
        tokens = sum(facts.tokens for facts in await memory.store.facts(tags))
        for tag in tags:
            resident = memory.residents.tagged(tag)
            await memory.store.purge(tag, 0 if resident is None or resident.epoch is None else resident.epoch + 1)
            if resident is not None:
                await memory.replica.refresh(resident)
        return len(tags), tokens


class Intake:
    """Fills one memory. A source of its own, so that it neither waits for the outbox nor overtakes it.

    Attributes:
        records, tokens: what the store has confirmed so far.
    """

    def __init__(self, memory: TenantMemory, name: MemoryName) -> None:
        self._memory = memory
        self._name = name
        self._source = secrets.token_hex(8)
        self._epoch: int | None = None
        self.records = 0
        self.tokens = 0

    async def add(self, kind: Kind, sequences: Iterable[Int32Array]) -> None:
        """Returns when the store has confirmed the sequences, int32[n] each.

        Raises:
            MemoryPurgedError: the memory was purged since the first call.
            MemoryStoreError: the store failed; what came before this call is in it.
        """
        records: list[Record] = []
        for tokens in sequences:
            for part in parts(tokens):
                records.append(Record(self._source, self.records + len(records) + 1, kind, part))
        if records:
            resident = self._memory.residents.begin(self._name)
            try:
                await asyncio.wrap_future(self._memory.thread.submit(self._append(resident, records)))
            finally:
                self._memory.residents.end(resident)
            self.records += len(records)
            self.tokens += sum(int(record.tokens.size) for record in records)
            self._memory.thread.wake()

    async def _append(self, resident: Resident, records: list[Record]) -> None:
        memory = self._memory
        if resident.epoch is None:
            await memory.replica.refresh(resident)
        if self._epoch is None:
            self._epoch = resident.epoch or 0
        name = memory.sealed.name(resident.tag, resident.name)
        entries = [memory.sealed.entry(resident.tag, record) for record in records]
        append = Append(resident.tag, self._epoch, self._source, name, entries)
        for _ in range(_FULL_TRIES):
            [result] = await memory.store.append([append])
            if isinstance(result, Appended):
                memory.replica.grew(resident, result)
                return
            if isinstance(result, Stale):
                raise MemoryPurgedError("the memory was purged while it was being filled")
            if isinstance(result, MemoryStoreError):
                raise result
            assert isinstance(result, LogFull)
            await memory.replica.refresh(resident)
            resident.fold_due = True
            await memory.replica.fold()
            await asyncio.sleep(_FULL_SECONDS)
        raise StoreFullError("the memory's log is full, and nobody folds it")
