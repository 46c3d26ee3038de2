"""What ranks of tensor parallelism have to agree on, so that each has the same drafts without telling the others."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import distributed

ValueT = TypeVar("ValueT")


class Ranks:
    """The ranks that compute one model together.

    Args:
        group: vLLM's `GroupCoordinator`; None for a rank alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = None if group is None or group.world_size == 1 else group

    @property
    def alone(self) -> bool:
        return self._group is None

    @property
    def leads(self) -> bool:
        """This is the rank that decides."""
        return self._group is None or self._group.rank_in_group == 0

    def shared(self, value: ValueT) -> ValueT:
        """The value of the rank that leads. Waits for the other ranks' hosts, not for their devices."""
        shared: ValueT = value if self._group is None else self._group.broadcast_object(value, src=0)
        return shared

    def all(self, value: bool) -> bool:
        """Whether it is true on each rank. Waits as `shared` does."""
        if self._group is None:
            return value
        votes = [False] * self._group.world_size
        distributed.all_gather_object(votes, value, group=self._group.cpu_group)
        return all(votes)
