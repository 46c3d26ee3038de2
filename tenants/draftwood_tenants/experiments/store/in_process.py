"""Counts in the memory of this process: they end with it."""

from __future__ import annotations

from collections.abc import Mapping

from draftwood_tenants.experiments.counters import Origin
from draftwood_tenants.experiments.store.base import EncodedSnapshot, Target


class InProcessCounts:
    """A `CountStore` without a server."""

    def __init__(self) -> None:
        self._counts: dict[Target, dict[Origin, EncodedSnapshot]] = {}
        self._history: dict[Target, bytes] = {}
        self._deleted: dict[str, str] = {}

    async def write(self, target: Target, snapshot: EncodedSnapshot) -> None:
        of_target = self._counts.setdefault(target, {})
        known = of_target.get(snapshot.origin)
        if (known is None or snapshot.sequence > known.sequence) and not self._is_deleted(target):
            of_target[snapshot.origin] = snapshot

    async def read(self, target: Target, known: Mapping[Origin, int]) -> list[EncodedSnapshot]:
        stored = self._counts.get(target, {}).values()
        return [one for one in stored if one.sequence > known.get(one.origin, -1)]

    async def write_history(self, target: Target, data: bytes) -> None:
        if not self._is_deleted(target):
            self._history[target] = data

    async def read_history(self, target: Target) -> bytes:
        return self._history.get(target, b"")

    async def delete(self, target: Target) -> None:
        self._deleted[target.name] = target.definition
        for one in [one for one in self._counts if one.name == target.name]:
            del self._counts[one]
        for one in [one for one in self._history if one.name == target.name]:
            del self._history[one]

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        return True

    def _is_deleted(self, target: Target) -> bool:
        return self._deleted.get(target.name) == target.definition
