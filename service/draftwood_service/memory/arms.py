"""The memories of an experiment's arms."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftwood_service.memory.errors import NewerMemoryError
from draftwood_service.memory.naming import Naming, fingerprint_of

if TYPE_CHECKING:
    from draftwood_service.memory.manager import MemoryManager


@dataclass(frozen=True, slots=True)
class PurgeArms:
    """Deletes the memories of arms on all replicas: of all tenants and models, with plain and with hidden names.

    Attributes:
        arms: labels; the empty one, a tenant's memory outside of experiments, is not among them.
    """

    arms: tuple[str, ...]

    async def run(self, memory: MemoryManager) -> int:
        """The number of memories; those that a newer version of this program wrote to are left."""
        assert all(self.arms)
        async with memory.replica.lock:
            own = memory.naming
            namings = (own, Naming(own.fingerprint))
            found: list[str] = []
            for fingerprint in sorted({own.fingerprint, *map(fingerprint_of, await memory.store.kinds())}):
                tags = await memory.store.tags(fingerprint)
                found += [t for t in tags if any(n.is_of_arm(t, arm) for n in namings for arm in self.arms)]
            purged = 0
            for tag in found:
                resident = memory.residents.by_tag(tag)
                known = 0 if resident is None or resident.epoch is None else resident.epoch + 1
                with suppress(NewerMemoryError):
                    await memory.store.purge(tag, known)
                    purged += 1
                if resident is not None:
                    await memory.replica.follower.refresh(resident)
            return purged
