"""Records that are copied: out of a memory, into one, and from an arm's to its tenant's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from draftwood_memory.config import MemoryOverrides
from draftwood_memory.errors import MemoryPurgedError, NewerMemoryError, WrongTypeError
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.memory import Memory
from draftwood_memory.records import Int32Array, Kind, Record, split
from draftwood_memory.replication.replica import Replica
from draftwood_memory.store.naming import MemoryName, arm_part

_PURGED = "the memory was purged while it was being filled"


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
        names = {one.name for one in memory.residents.all() if one.name.arm == self.arm}
        if memory.memories is not None:
            part = memory.naming.part(self.arm)
            tags = [
                tag for tag in await memory.memories.catalogue.tags(memory.naming.fingerprint) if arm_part(tag) == part
            ]
            names |= {name for one in await memory.memories.info(tags) if (name := memory.name_of(one)) is not None}
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
            records = [one for one in await _records(memory, replica, arm) if _identity(one) not in known]
            generation = memory.residents.open(name).generation or 0 if metadata is None else metadata.generation
            if records:
                with suppress(MemoryPurgedError):
                    await _add(memory, replica, name, generation, records)
        await _learned(memory, name)
        return len(records)


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
                generation = resident.generation or 0
                if self.progress.generation not in (None, generation):
                    raise MemoryPurgedError(_PURGED)
                await _add(memory, replica, self.name, generation, records)
            await _learned(memory, self.name)
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
    return [logged.record for logged in resident.log]


async def _add(
    memory: Memory, replica: Replica | None, name: MemoryName, generation: int, records: list[Record]
) -> None:
    """Adds records to a memory in a generation, in the store and here; its strategies learn them later.

    Raises:
        MemoryPurgedError, MemoryStoreError: those are added that the store has.
    """
    resident = memory.residents.get(name)

    def add(added: list[Record], id_: bytes | None = None) -> None:
        if resident is None or (replica is not None and resident.generation != generation):
            return
        with resident.lock:
            for record in added:
                resident.add(LoggedRecord(record, id_))
        memory.between_steps.learn_later(resident, added)

    if replica is None:
        add(records)
        return
    metadata = await replica.records.append(name, generation, records, add)
    if resident is not None:
        await replica.apply_metadata(resident, metadata)
    if metadata.generation != generation:
        raise MemoryPurgedError(_PURGED)


async def _learned(memory: Memory, name: MemoryName) -> None:
    """Waits, without the replica's lock, until what was added to a memory is learned here."""
    resident = memory.residents.get(name)
    if resident is not None:
        await memory.between_steps.learned(resident)


def _identity(record: Record) -> tuple[int, int, bytes]:
    """A copy of a record has the same."""
    return record.learned_at, record.request, record.tokens.tobytes()
