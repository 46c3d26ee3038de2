"""The pages of KV memory: which are free, and in how many page tables each other one is. Holds no keys and values."""

from __future__ import annotations

import numpy as np

from draftwood_strategies.draft import Int32Array


class PagePool:
    """Counts references to pages.

    Pages that are taken together are neighbours where there is room: a runner without a kernel for page tables reads a
    run of neighbours in place, and has to gather others.

    Args:
        pages: how many there are; they are known by their number.

    Attributes:
        references: int32[pages], how many page tables each page is in.
        free: how many can be taken.
    """

    def __init__(self, pages: int) -> None:
        self.references = np.zeros(pages, np.int32)
        self.free = pages
        self._is_free = np.ones(pages, np.bool_)

    def take(self, count: int, after: int = -1) -> Int32Array:
        """int32[count], free pages, now with one reference; `count` must not exceed `free`.

        Args:
            after: take the pages that follow this one if they are free, for a page table that ends with it.
        """
        assert count <= self.free
        if after >= 0 and self._is_free[after + 1 : after + 1 + count].sum() == count:
            pages = np.arange(after + 1, after + 1 + count, dtype=np.int32)
        else:
            pages = self._from_the_largest_gap(count)
        self._is_free[pages] = False
        self.references[pages] = 1
        self.free -= count
        return pages

    def share(self, pages: Int32Array) -> None:
        """One more reference to each; none may be free."""
        assert not self._is_free[pages].any()
        self.references[pages] += 1

    def release(self, pages: Int32Array) -> Int32Array:
        """One reference less to each. Returns those that have none any more, in their order; they are not free yet."""
        assert (self.references[pages] > 0).all()
        self.references[pages] -= 1
        unused: Int32Array = pages[self.references[pages] == 0]
        return unused

    def put_back(self, pages: Int32Array) -> None:
        """Makes pages without references free."""
        assert not self.references[pages].any()
        assert not self._is_free[pages].any()
        self._is_free[pages] = True
        self.free += pages.size

    def check(self) -> None:
        """Asserts that no free page has references."""
        assert self.free == self._is_free.sum()
        assert not self.references[self._is_free].any()

    def _from_the_largest_gap(self, count: int) -> Int32Array:
        """From the middle of the longest run of free pages, so that tables on both sides of it can grow in place."""
        free = np.flatnonzero(self._is_free).astype(np.int32)
        ends = np.flatnonzero(np.diff(free, append=np.int32(-1)) != 1)
        lengths = np.diff(ends, prepend=-1)
        longest = int(lengths.argmax())
        spare = max(int(lengths[longest]) - count, 0)
        start = int(ends[longest] + 1 - lengths[longest]) + spare // 2
        return np.sort(np.roll(free, -start)[:count])
