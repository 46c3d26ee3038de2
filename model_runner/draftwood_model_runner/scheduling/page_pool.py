"""The pages of KV memory: which are free, and in how many page tables each other one is. Holds no keys and values.

Free pages are kept as runs of neighbours, so that finding some takes no look at all pages.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from draftwood_strategies.draft import Int32Array

_SPARE_ENTRIES = 64
"""The heap of runs is rebuilt once it has this many outdated entries more than there are runs."""


class PagePool:
    """Counts references to pages.

    Pages that are taken together are neighbours if there is room: a runner without a kernel for page tables reads a
    run of neighbours in place, and has to gather others.

    Args:
        pages: how many there are; they are known by their number.

    Attributes:
        references: int32[pages], how many page tables each page is in.
        num_free: how many can be allocated.
    """

    def __init__(self, pages: int) -> None:
        self.references = np.zeros(pages, np.int32)
        self.num_free = pages
        self._length_at: dict[int, int] = {}  # of each run of free pages, none of them next to another
        self._begin_before: dict[int, int] = {}
        self._longest: list[tuple[int, int]] = []  # a heap of (-length, begin), some out of date
        self._add_run(0, pages)

    def allocate(self, count: int, after: int = -1) -> Int32Array:
        """int32[count], free pages, now with one reference; `count` must not exceed `num_free`.

        Args:
            after: take the pages that follow this one if they are free, for a page table that ends with it.
        """
        assert count <= self.num_free
        if after >= 0 and 0 < count <= self._length_at.get(after + 1, 0):
            pages: Int32Array = self._cut(after + 1, 0, count)
        else:
            pieces, missing = [np.empty(0, np.int32)], count
            while missing:
                pieces.append(self._middle_of_longest(missing))
                missing -= pieces[-1].size
            pages = np.sort(np.concatenate(pieces))
        self.references[pages] = 1
        self.num_free -= count
        return pages

    def share(self, pages: Int32Array) -> None:
        """One more reference to each; none may be free."""
        self.references[pages] += 1

    def release(self, pages: Int32Array) -> Int32Array:
        """One reference less to each. Returns those that have none any more, in their order; they are not free yet."""
        assert (self.references[pages] > 0).all()
        self.references[pages] -= 1
        unused: Int32Array = pages[self.references[pages] == 0]
        return unused

    def free(self, pages: Int32Array) -> None:
        """Makes pages without references free."""
        assert not self.references[pages].any()
        ordered = np.sort(pages)
        breaks = np.flatnonzero(ordered[1:] - ordered[:-1] != 1) + 1
        for first, end in pairwise([0, *breaks.tolist(), ordered.size]):
            if end > first:
                self._merge(int(ordered[first]), end - first)
        self.num_free += pages.size

    def check(self) -> None:
        """Asserts that no free page has references, and that the runs are apart and known from both ends."""
        runs = sorted(self._length_at.items())
        assert all(begin + length < behind for (begin, length), (behind, _) in pairwise(runs))
        assert self._begin_before == {begin + length: begin for begin, length in runs}
        assert {(-length, begin) for begin, length in runs} <= {*self._longest}
        free = np.array([page for begin, length in runs for page in range(begin, begin + length)], np.int32)
        assert self.num_free == free.size
        assert not self.references[free].any()

    def _middle_of_longest(self, most: int) -> Int32Array:
        """int32[n]: `most` pages from the middle of the longest run, so that page tables on both sides of them can grow
        in place, or all of it if it has fewer. There must be a run."""
        while self._length_at.get(self._longest[0][1]) != -self._longest[0][0]:
            heappop(self._longest)
        length, begin = -self._longest[0][0], self._longest[0][1]
        count = min(most, length)
        return self._cut(begin, (length - count) // 2, count)

    def _cut(self, begin: int, skipped: int, count: int) -> Int32Array:
        """Takes so many pages out of the run at `begin`, behind the skipped ones."""
        length, start = self._remove_run(begin), begin + skipped
        self._add_run(begin, skipped)
        self._add_run(start + count, length - skipped - count)
        return np.arange(start, start + count, dtype=np.int32)

    def _merge(self, begin: int, length: int) -> None:
        """Adds a run to what is free on both sides of it."""
        before = self._begin_before.get(begin)
        if begin + length in self._length_at:
            length += self._remove_run(begin + length)
        if before is not None:
            length += self._remove_run(before)
            begin = before
        self._add_run(begin, length)

    def _add_run(self, begin: int, length: int) -> None:
        if length == 0:
            return
        self._length_at[begin], self._begin_before[begin + length] = length, begin
        heappush(self._longest, (-length, begin))
        if len(self._longest) > 2 * len(self._length_at) + _SPARE_ENTRIES:
            self._longest = [(-size, at) for at, size in self._length_at.items()]
            heapify(self._longest)

    def _remove_run(self, begin: int) -> int:
        """Returns its length."""
        length = self._length_at.pop(begin)
        del self._begin_before[begin + length]
        return length
