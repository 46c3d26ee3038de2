"""A copy of all resources in this process, which follows the store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import structlog

from draftwood_memory.errors import MemoryStoreError
from draftwood_service.resources.base import Cursor, Page, Resource, ResourceStore, Write
from draftwood_service.resources.ending import end

_log = structlog.get_logger(__name__)

SECONDS = 0.3
"""Between two looks, so that every server follows a change within a second. Not tuned."""


class ResourceFollower:
    """All resources of a store, as of its latest look. While the store is away, what was known stays."""

    def __init__(self, store: ResourceStore) -> None:
        self._store = store
        self._cursor = Cursor()
        self._lock = asyncio.Lock()
        self._resources: dict[str, dict[str, Resource]] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def revision(self) -> int:
        """Of the store at the latest look."""
        return self._cursor.revision

    def of_kind(self, kind: str) -> Mapping[str, Resource]:
        """The resources of a kind by name. Not to be changed; replaced when much has changed."""
        return self._resources.get(kind, {})

    async def start(self) -> None:
        """Looks once, and from now on. A store that does not answer is no error."""
        await self._look("")
        self._task = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Ends the looks and the store's connections."""
        await end([self._task])
        await self._store.close()

    async def refresh(self) -> None:
        """Takes all changes up to now. Raises MemoryStoreError."""
        async with self._lock:
            staged: tuple[dict[str, dict[str, Resource]], dict[str, tuple[str, str]]] | None = None
            cursor = self._cursor
            while True:
                page = await self._store.changes(cursor)
                cursor = page.cursor
                if page.anew:
                    staged = ({}, {})
                _apply(page, *(staged or (self._resources, self._places)))
                if staged is None:
                    self._cursor = cursor
                if not page.more:
                    break
            if staged is not None:
                self._resources, self._places = staged
            self._cursor = cursor

    async def write(self, writes: SequenceOf[Write], since: int | None = None) -> list[int]:
        """As `ResourceStore.write`; afterwards this copy has the writes."""
        revisions = await self._store.write(writes, since)
        await self.refresh()
        return revisions

    async def _follow(self) -> None:
        problem = ""
        while True:
            await asyncio.sleep(SECONDS)
            problem = await self._look(problem)

    async def _look(self, known_problem: str) -> str:
        """What keeps it from looking; logged if it is not known yet."""
        try:
            await self.refresh()
        except MemoryStoreError as error:
            if not known_problem:
                _log.warning("the store of tenants does not answer; what is known stays in use", problem=str(error))
            return str(error)
        if known_problem:
            _log.info("the store of tenants answers again")
        return ""


def _apply(page: Page, resources: dict[str, dict[str, Resource]], places: dict[str, tuple[str, str]]) -> None:
    for key, resource in page.changes.items():
        if resource is not None:
            places[key] = resource.kind, resource.name
            resources.setdefault(resource.kind, {})[resource.name] = resource
        elif key in places:
            kind, name = places.pop(key)
            del resources[kind][name]
