"""What a store of resources does.

Every write gives a resource a revision, larger than all before it in the store, so that one number says what a reader
has seen, and an unchanged revision that nothing has happened in between.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from draftwood_errors import DraftwoodError

TENANTS, EXPERIMENTS, STOPS = "tenants", "experiments", "stops"
"""Kinds of resources. A stop is what a guardrail did to an experiment of the file: an `Experiment` with the digest of
its definition in place of its salt, stopped arms, and its state and end if it was stopped altogether."""
MAX_DELETED = 10_000
"""Names of deleted resources that a store keeps for readers. One that is further behind reads everything again."""


@dataclass(frozen=True, slots=True)
class Resource:
    kind: str
    name: str
    value: bytes
    revision: int


@dataclass(frozen=True, slots=True)
class Write:
    """A change of one resource.

    Attributes:
        value: None deletes it.
        expected: the revision that it must have; 0: there must be none of this name.
    """

    kind: str
    name: str
    value: bytes | None
    expected: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far a reader has read.

    Attributes:
        floor: the store's; it shows which deletions a reader has missed.
        store: random id drawn at a store's first write, so that a reader notices that the store lost its data; "" if
            nothing was ever written.
    """

    revision: int = 0
    floor: int = -1
    store: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """What has changed after a cursor.

    Attributes:
        changes: by key, in the order of their revisions; None for a resource that is deleted.
        cursor: for the next page.
        is_snapshot: it begins a full listing: what is not in this page or the following does not exist.
        more: there is another page.
        unreadable: keys of changes of which the value cannot be read here.
        foreign: those of them with names that are not written as here, so that their tenants are not known.
        time: the store's clock, in seconds since the epoch; None if it is this process's.
    """

    changes: dict[str, Resource | None]
    cursor: Cursor
    is_snapshot: bool
    more: bool
    unreadable: frozenset[str] = frozenset()
    foreign: frozenset[str] = frozenset()
    time: float | None = None


class ConflictError(DraftwoodError):
    """A resource has another revision than a write expected; nothing was written.

    Attributes:
        index: of the write; None if something else has changed since the revision that the writer had seen.
        found: the resource's revision; 0 if there is none.
    """

    def __init__(self, index: int | None, found: int = 0) -> None:
        super().__init__("the resource was changed at the same time")
        self.index = index
        self.found = found


class ResourceStore(Protocol):
    """Resources of all kinds. All methods raise `MemoryStoreError` if the store cannot be used."""

    def key(self, kind: str, name: str) -> str:
        """The resource's key in pages."""

    async def write(self, writes: SequenceOf[Write], since: int | None = None, store: str = "") -> list[int]:
        """All of the writes or none.

        Args:
            since: the store's revision must still be this one; None for any.
            store: `Cursor.store` as the writer knows it; "" if it knows none. An empty store takes it over from a
                writer with `since` 0.

        Returns:
            The new revisions.

        Raises:
            ConflictError: a revision is another one.
            StoreUnavailableError: the store has lost its data, and has not been given it again.
        """

    async def changes(self, after: Cursor) -> Page:
        """A page of what has changed after the cursor. Cheap when nothing has."""

    async def close(self) -> None:
        """Ends its connections."""


class ResourceError(DraftwoodError):
    """A resource cannot be read or changed.

    Attributes:
        name: of the resource, such as "tenants/acme".
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name[:100]}: {problem}")
        self.name = name


class ResourceExistsError(ResourceError):
    """There is a resource of this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "exists already")


class ResourceMissingError(ResourceError):
    """There is no resource of this name."""

    def __init__(self, name: str, problem: str = "does not exist") -> None:
        super().__init__(name, problem)


class EtagError(ResourceError):
    """The resource has changed since the caller read it."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "was changed by another call; read it again")


class PreconditionError(ResourceError):
    """The state of the resource, or of another, does not allow this.

    Attributes:
        kind: of the obstacle, for programs: "FILE", "STATE" or "TENANTS".
    """

    def __init__(self, name: str, kind: str, problem: str) -> None:
        super().__init__(name, problem)
        self.kind = kind


class DefinedInFileError(PreconditionError):
    """The servers' file defines the resource."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "FILE", "is defined in the servers' tenants file, and can only be changed there")


class ConfigurationUnknownError(ResourceError):
    """A tenant's configuration could not be read yet: what it allows is not known."""

    def __init__(self, tenant: str) -> None:
        super().__init__(f"tenants/{tenant}", "its configuration could not be read from the store yet; try again later")


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
            revision = present.revision if present else 0
            if revision != write.expected:
                raise ConflictError(index, revision)
        return [self._apply(write) for write in writes]

    async def changes(self, after: Cursor) -> Page:
        """Everything in one page."""
        is_snapshot = after.floor != self._floor and after.revision < max(self._floor, 1)
        seen = 0 if is_snapshot else after.revision
        changed: dict[str, Resource | None] = {
            key: resource for key, resource in self._resources.items() if resource.revision > seen
        }
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
