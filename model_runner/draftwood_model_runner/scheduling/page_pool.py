"""The pages of KV memory: which are free, and in how many page tables each other one is. Holds no keys and values.

Free pages are kept as runs of neighbours, so that finding some takes no look at all pages.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from draftwood_model_runner.sequence import CachedPrefix
from draftwood_strategies.arrays import Int32Array

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

    def _middle_of_longest(self, wanted: int) -> Int32Array:
        """int32[n]: `wanted` pages from the middle of the longest run, so that page tables on both sides of them can
        grow in place, or all of it if it has fewer. There must be a run."""
        while self._length_at.get(self._longest[0][1]) != -self._longest[0][0]:
            heappop(self._longest)
        length, begin = -self._longest[0][0], self._longest[0][1]
        count = min(wanted, length)
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


class PrefixCache:
    """Finds the pages of prefixes, those of live sequences and those retained after their sequence ended.

    Args:
        pages: how many there are.
    """

    def __init__(self, pages: int) -> None:
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._retained: dict[int, None] = {}
        self._is_retained = np.zeros(pages, np.bool_)
        self._forgotten = 0

    @property
    def retained(self) -> int:
        """Pages that no live sequence holds."""
        return len(self._retained)

    def known(self, pages: Int32Array) -> npt.NDArray[np.bool_]:
        """bool[p], which of these pages, int32[p], hold a block."""
        return np.fromiter(map(self._hash_of.__contains__, pages.tolist()), np.bool_, pages.size)

    def look_up(self, prefix: CachedPrefix) -> None:
        """Sets the pages of a prefix to those of its first blocks, as far as they are known."""
        if prefix.forgotten != self._forgotten:
            prefix.pages, prefix.forgotten = prefix.pages[:0], self._forgotten
        if (known := prefix.pages.size) < len(prefix.hashes):
            pages = [*map(self._page_of.get, prefix.hashes[known:])]
            further = pages[: pages.index(None)] if None in pages else pages
            prefix.pages = np.concatenate([prefix.pages, np.array(further, np.int32)])

    def add(self, hashes: list[bytes], pages: Int32Array) -> None:
        """Records that pages, int32[p], hold the keys and values of as many blocks. Those that are known already keep
        their page."""
        for of_block, page in zip(hashes, pages.tolist(), strict=True):
            if of_block not in self._page_of:
                self._page_of[of_block], self._hash_of[page] = page, of_block

    def count_retained(self, pages: Int32Array) -> int:
        """How many of these pages, int32[p], no live sequence holds."""
        return int(np.count_nonzero(self._is_retained[pages]))

    def retained_pages(self, hashes: list[bytes]) -> Int32Array:
        """int32[p], the pages of these blocks that no live sequence holds."""
        pages = np.array([self._page_of[block] for block in hashes if block in self._page_of], np.int32)
        return pages[self._is_retained[pages]]

    def retain(self, pages: Int32Array) -> None:
        """Keeps the blocks of pages, int32[p], that no live sequence holds any more; the last is the latest used."""
        self._retained.update(dict.fromkeys(pages.tolist()))
        self._is_retained[pages] = True

    def reuse(self, pages: Int32Array) -> None:
        """Live sequences hold these pages, int32[p], again."""
        for page in pages[self._is_retained[pages]].tolist():
            del self._retained[page]
        self._is_retained[pages] = False

    def forget(self, pages: Int32Array) -> None:
        """Drops what is known of pages, int32[p]; they can no longer be found."""
        for page in pages.tolist():
            del self._page_of[self._hash_of.pop(page)]
            self._retained.pop(page, None)
        self._is_retained[pages] = False
        self._forgotten += 1

    def forget_oldest(self, count: int) -> Int32Array:
        """Forgets the `count` least recently used retained pages, and returns them. There must be so many."""
        pages = np.fromiter(islice(self._retained, count), np.int32, count)
        self.forget(pages)
        return pages

    def check(self) -> None:
        """Asserts that each block has a page of its own."""
        assert self._retained.keys() <= self._hash_of.keys()
        assert {of_block: page for page, of_block in self._hash_of.items()} == self._page_of
        assert {*np.flatnonzero(self._is_retained).tolist()} == self._retained.keys()


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """How many tokens the beginnings of `a` and `b` have in common."""
    size = min(a.size, b.size)
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
