"""Which sources of a hybrid are asked for a draft: those with a gain, all in a probe, none that is suspended."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from draftwood_strategies.mixing.weights import TABLE

_LEAST_GAIN = 0.005
"""The probability that a source must add to the token that is written. jacobi, which gains 0.005 a node, costs 100 us
(docs/decisions)."""
_PROBE_EVERY, _PROBE_FOR = 256, 8
"""All sources take part in 8 of 256 drafts, the probe."""

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

    def next(self, names: SequenceOf[str], gains: SequenceOf[float], has_table: bool, drafts: int = 1) -> list[bool]:
        """Whether each source takes part in the next drafts, and last whether the table does. Called once for them all.

        A source takes part if its gain is worth its time. How many nodes are drafted, and in which steps, is the
        engine's decision. The source with the highest gain always takes part: of two that predict the same, neither
        gains anything over the other.

        Args:
            names: of the tree-shaped sources, in the order of their numbers.
            gains: of each source, the table's at `TABLE`, see `source_gain`.
            has_table: there is a table.
        """
        self._drafts += drafts
        # The same share of the drafts where more than `_PROBE_FOR` are asked for at once.
        probe = max(drafts, _PROBE_FOR)
        if self._drafts % (probe * (_PROBE_EVERY // _PROBE_FOR)) < probe:
            asked = [*[True] * len(names), has_table]
        else:
            known = [*gains[: len(names)], *([gains[TABLE]] if has_table else [])]
            least = min(_LEAST_GAIN, max(known, default=0.0))
            asked = [*(gain >= least for gain in gains[: len(names)]), has_table and gains[TABLE] >= least]
        for number, name in enumerate(names) if self._suspended else ():
            asked[number] = asked[number] and not self.is_suspended(name)
        return asked

    def charge(self, name: str, seconds: float) -> None:
        """A call of a source took so long for each sequence."""
        self._seconds[name] += _SMOOTHING * (seconds - self._seconds[name])

    def is_suspended(self, name: str) -> bool:
        """Whether a source is not asked at present; it goes on learning."""
        return name in self._suspended and self._drafts in self._suspended[name]

    def suspend_slowest(self, names: SequenceOf[str], has_table: bool) -> bool:
        """Suspends the source that takes longest, for the drafts of all sequences; false if it is the last one."""
        active = [name for name in names if not self.is_suspended(name)]
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
