"""Free pages as runs of neighbours, so that finding some takes no look at all pages."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from draftwood_strategies.draft import Int32Array

_SPARE_ENTRIES = 64
"""The heap is rebuilt once it has this many outdated entries more than there are runs."""


class FreeRuns:
    """Runs of free pages, none next to another.

    Args:
        pages: how many there are, all free at first; they are known by their number.
    """

    def __init__(self, pages: int) -> None:
        self._length_at: dict[int, int] = {}
        self._begin_before: dict[int, int] = {}
        self._longest: list[tuple[int, int]] = []  # a heap of (-length, begin), some out of date
        self._add(0, pages)

    def take_at(self, begin: int, count: int) -> Int32Array | None:
        """int32[count]: the pages from `begin` on, if a run of as many begins there."""
        length = self._length_at.get(begin, 0)
        if length < count:
            return None
        self._remove(begin)
        self._add(begin + count, length - count)
        return np.arange(begin, begin + count, dtype=np.int32)

    def take_longest(self, most: int) -> Int32Array:
        """int32[n]: `most` pages from the middle of the longest run, so that page tables on both sides of them can grow
        in place, or all of it if it has fewer. There must be a run."""
        while self._length_at.get(self._longest[0][1]) != -self._longest[0][0]:
            heappop(self._longest)
        length, begin = -self._longest[0][0], self._longest[0][1]
        count = min(most, length)
        start = begin + (length - count) // 2
        self._remove(begin)
        self._add(begin, start - begin)
        self._add(start + count, begin + length - start - count)
        return np.arange(start, start + count, dtype=np.int32)

    def put_back(self, pages: Int32Array) -> None:
        """Adds pages, int32[n], none of them free."""
        ordered = np.sort(pages)
        breaks = np.flatnonzero(ordered[1:] - ordered[:-1] != 1) + 1
        edges = [0, *breaks.tolist(), ordered.size]
        for first, end in pairwise(edges):
            if end > first:
                self._merge(int(ordered[first]), end - first)

    def check(self) -> Int32Array:
        """Asserts that the runs are apart, and known from both ends; returns int32[n], their pages."""
        runs = sorted(self._length_at.items())
        assert all(begin + length < behind for (begin, length), (behind, _) in pairwise(runs))
        assert self._begin_before == {begin + length: begin for begin, length in runs}
        assert {(-length, begin) for begin, length in runs} <= {*self._longest}
        return np.array([page for begin, length in runs for page in range(begin, begin + length)], np.int32)

    def _merge(self, begin: int, length: int) -> None:
        """Adds a run to what is free on both sides of it."""
        before = self._begin_before.get(begin)
        if begin + length in self._length_at:
            length += self._remove(begin + length)
        if before is not None:
            length += self._remove(before)
            begin = before
        self._add(begin, length)

    def _add(self, begin: int, length: int) -> None:
        if length == 0:
            return
        self._length_at[begin], self._begin_before[begin + length] = length, begin
        heappush(self._longest, (-length, begin))
        if len(self._longest) > 2 * len(self._length_at) + _SPARE_ENTRIES:
            self._longest = [(-size, at) for at, size in self._length_at.items()]
            heapify(self._longest)

    def _remove(self, begin: int) -> int:
        """Returns its length."""
        length = self._length_at.pop(begin)
        del self._begin_before[begin + length]
        return length
