"""Purges: of a tenant, and of arms of experiments."""

from __future__ import annotations

import time
from collections.abc import Set as SetOf
from contextlib import suppress
from dataclasses import dataclass, replace

from draftwood_memory.errors import NewerMemoryError, WrongTypeError
from draftwood_memory.local.resident import Resident
from draftwood_memory.memory import Memory
from draftwood_memory.replication.replica import Replica
from draftwood_memory.store.naming import Naming, arm_part, fingerprint_of, tenant_part


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
        catalogue, found = memory.replica.memories.catalogue, set[tuple[str, str | None]]()
        for fingerprint in {memory.naming.fingerprint, *map(fingerprint_of, await catalogue.kinds())}:
            parts = {naming.part(arm) for naming in _namings(memory) for arm in self.arms}
            tags = await catalogue.tags(fingerprint)
            found |= {(tenant_part(tag), arm_part(tag)) for tag in tags if arm_part(tag) in parts}
        with suppress(NewerMemoryError):
            return (await _purge(memory.replica, found)).memories
        return 0


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
    """Purges tenants, or some of their arms, by their names in keys. Returns when all processes have applied it.

    Raises:
        NewerMemoryError, WrongTypeError: a newer version, or another program, wrote to some; the others are purged.
        MemoryStoreError: the store failed; nothing is certain.
    """
    purged: dict[str, int] = {}
    refused: NewerMemoryError | WrongTypeError | None = None
    latest = b"0-0"
    async with replica.lock:
        for part, arm in sorted(memories, key=str):
            try:
                purged |= await replica.memories.purge(part, arm, at_least)
            except (NewerMemoryError, WrongTypeError) as error:
                refused = error
            latest = await replica.processes.announce(part)
        await replica.purged(frozenset(part for part, _ in memories))
    final_in = await replica.processes.wait(latest)
    if refused is not None:
        raise refused
    return PurgeResult(len(purged), sum(purged.values()), final_in)
