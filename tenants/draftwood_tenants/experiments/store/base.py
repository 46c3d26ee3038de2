"""Where servers keep the counts of experiments, so that each can read those of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote, unquote

from draftwood_tenants.experiments.counters import Origin


@dataclass(frozen=True, slots=True)
class Target:
    """The counts of an experiment.

    Attributes:
        name: of the experiment.
        definition: identifies all that is frozen while it runs, hexadecimal digits: an experiment of the same name
            that is made later, or of a file that was changed, has other counts.
    """

    name: str
    definition: str

    def field(self, origin: Origin) -> str:
        """Of the counts of a process."""
        return f"{self.definition}/{quote(origin.replica, safe='')}/{quote(origin.boot, safe='')}"


def origin_of(field: str) -> Origin:
    """The process of a `Target.field`."""
    _, replica, boot = field.split("/")
    return Origin(unquote(replica), unquote(boot))


@dataclass(frozen=True, slots=True)
class EncodedSnapshot:
    """The newest snapshot of a process, encoded."""

    origin: Origin
    sequence: int
    data: bytes


class CountStore(Protocol):
    """Counts by experiment and process, the newest of each. All methods raise `MemoryStoreError`."""

    async def write(self, target: Target, snapshot: EncodedSnapshot) -> None:
        """Keeps a snapshot. Does nothing if there is one with this sequence number or a larger one, or if the
        experiment was deleted.
        """

    async def read(self, target: Target, known: Mapping[Origin, int]) -> list[EncodedSnapshot]:
        """The snapshots that are newer than those of these sequence numbers."""

    async def write_history(self, target: Target, data: bytes) -> None:
        """Replaces the history: the interim looks at the experiment. Does nothing if it was deleted."""

    async def read_history(self, target: Target) -> bytes:
        """The history, see `write_history`; empty if there is none."""

    async def delete(self, target: Target) -> None:
        """Deletes all of an experiment's name. What a process that has not heard of it writes later is refused."""

    async def acquire_lease(self, process: str, seconds: float) -> bool:
        """Whether this process holds the lease, for so many seconds: one looks at the experiments for all."""
