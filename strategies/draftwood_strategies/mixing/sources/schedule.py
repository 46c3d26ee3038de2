"""Which sources of a hybrid are asked for a draft: those that are not suspended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

_SUSPENDED, _LONGEST_SUSPENDED = 512, 1 << 16
"""For how many drafts a part is suspended at first, and at most: twice as many each time that it soon is again."""
_SMOOTHING = 1 / 8
"""Weight of the latest call in the mean time of a part."""


class SourceSchedule:
    """The sources of one tenant's hybrid.

    Attributes:
        suspensions: how often each was suspended.
    """

    def __init__(self) -> None:
        self.suspensions: Counter[str] = Counter()
        self._suspended: dict[str, range] = {}
        self._seconds = defaultdict[str, float](float)
        self._drafts = 0

    def next(self, names: Iterable[str], drafts: int) -> list[str]:
        """Those of the sources that are asked for the next drafts, one for each sequence of a step. The others go on
        learning."""
        self._drafts += drafts
        return self._active(names)

    def charge(self, name: str, seconds: float) -> None:
        """A call of a source took so long for each sequence."""
        self._seconds[name] += _SMOOTHING * (seconds - self._seconds[name])

    def suspend_slowest(self, names: SequenceOf[str], has_table: bool) -> bool:
        """Suspends the source that takes longest, for the drafts of all sequences; false if it is the last one."""
        active = self._active(names)
        if not active or len(active) + has_table < 2:
            return False
        name, drafts = self.slowest_of(active), _SUSPENDED
        before = self._suspended.get(name)
        if before is not None and self._drafts - before.stop < len(before):
            drafts = min(2 * len(before), _LONGEST_SUSPENDED)
        self._suspended[name] = range(self._drafts, self._drafts + drafts)
        self.suspensions[name] += 1
        return True

    def slowest_of(self, names: Iterable[str]) -> str:
        """The one of these sources whose latest calls took longest."""
        return max(names, key=self._seconds.__getitem__)

    def _active(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._drafts not in self._suspended.get(name, ())]
