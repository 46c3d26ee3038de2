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
