"""How many sequences run at once: fewer after a step that ran out of memory, more again later. No torch."""

from __future__ import annotations

_FIRST_PATIENCE, _MOST_PATIENCE = 256, 65_536
"""The number of slots grows after so many steps with all slots in use: some seconds at first, some ten minutes at most.
Each failure doubles it, so a load that never fits fails seldom. After the most steps without a failure it is the first
again."""
_GROWTH = 4
"""Slots grow by a quarter: from one half to all in three or four steps."""


class SlotLimit:
    """The slots, at most as many as configured.

    A step that runs out of memory halves them; one that does so after they grew takes back that growth alone. They grow
    after many steps in which all were in use and more were wanted, since no others show that more would do.

    Args:
        most: as configured.

    Attributes:
        slots: how many there are now.
    """

    def __init__(self, most: int) -> None:
        self.slots = most
        self._most = most
        self._good: int | None = None
        """What they were before they grew the last time, if no step has failed since."""
        self._full_steps = 0
        self._patience = _FIRST_PATIENCE

    def out_of_memory(self, running: int) -> bool:
        """A step of so many sequences did not fit; returns whether fewer can run."""
        if running < 2:
            return False
        before, self._good = self._good, None
        self.slots = before if before is not None and before < running else running // 2
        self._full_steps = 0
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True

    def passed(self, running: int, waiting: int) -> bool:
        """A step of so many sequences begins, and all before it fitted; returns whether there are more slots now."""
        if running < self.slots or not waiting:
            return False
        self._full_steps += 1
        if self.slots == self._most:
            if self._full_steps == _MOST_PATIENCE:
                self._good, self._patience = None, _FIRST_PATIENCE
            return False
        if self._full_steps < self._patience:
            return False
        self._full_steps = 0
        self._good = self.slots
        self.slots = min(self._most, self.slots + max(1, self.slots // _GROWTH))
        return True
