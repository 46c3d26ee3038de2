"""Resources in the memory of this process: they end with it."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from draftwood_tenants.resources.base import MAX_DELETED, ConflictError, Cursor, Page, Resource, Write


class InProcessResources:
    """A `ResourceStore` without a server."""

    def __init__(self) -> None:
        self._resources: dict[str, Resource] = {}
        self._deleted: dict[str, int] = {}
        self._revision = 0
        self._floor = 0

    def key(self, kind: str, name: str) -> str:
        return f"{kind}:{name}"

    async def write(self, writes: SequenceOf[Write], since: int | None = None, store: str = "") -> list[int]:
        """Raises ConflictError. The process and its store end together, so `store` says nothing."""
        if since is not None and since != self._revision:
            raise ConflictError(None)
        for index, write in enumerate(writes):
            present = self._resources.get(self.key(write.kind, write.name))
            found = present.revision if present else 0
            if found != write.expected:
                raise ConflictError(index, found)
        return [self._apply(write) for write in writes]

    async def changes(self, after: Cursor) -> Page:
        """Everything in one page."""
        is_snapshot = after.floor != self._floor and after.revision < max(self._floor, 1)
        seen = 0 if is_snapshot else after.revision
        changed: dict[str, Resource | None] = {key: one for key, one in self._resources.items() if one.revision > seen}
        if not is_snapshot:
            changed |= dict.fromkeys(key for key, revision in self._deleted.items() if revision > seen)
        return Page(changed, Cursor(self._revision, self._floor), is_snapshot, more=False)

    async def close(self) -> None:
        """Does nothing."""

    def _apply(self, write: Write) -> int:
        self._revision += 1
        key = self.key(write.kind, write.name)
        if write.value is not None:
            self._deleted.pop(key, None)
            self._resources[key] = Resource(write.kind, write.name, write.value, self._revision)
            return self._revision
        self._resources.pop(key, None)
        self._deleted[key] = self._revision
        if len(self._deleted) > MAX_DELETED:
            self._floor = self._deleted.pop(next(iter(self._deleted)))
        return self._revision
