"""The pages of KV memory: which are free, and in how many page tables each other one is. Holds no keys and values."""

from __future__ import annotations

import numpy as np

from draftwood_model_runner.scheduling.free_runs import FreeRuns
from draftwood_strategies.draft import Int32Array


class PagePool:
    """Counts references to pages.

    Pages that are taken together are neighbours if there is room: a runner without a kernel for page tables reads a
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
        self._runs = FreeRuns(pages)

    def take(self, count: int, after: int = -1) -> Int32Array:
        """int32[count], free pages, now with one reference; `count` must not exceed `free`.

        Args:
            after: take the pages that follow this one if they are free, for a page table that ends with it.
        """
        assert count <= self.free
        pages = self._runs.take_at(after + 1, count) if after >= 0 and count else None
        if pages is None:
            pages = self._from_the_longest_runs(count)
        self.references[pages] = 1
        self.free -= count
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

    def put_back(self, pages: Int32Array) -> None:
        """Makes pages without references free."""
        assert not self.references[pages].any()
        self._runs.put_back(pages)
        self.free += pages.size

    def check(self) -> None:
        """Asserts that no free page has references."""
        free = self._runs.check()
        assert self.free == free.size
        assert not self.references[free].any()

    def _from_the_longest_runs(self, count: int) -> Int32Array:
        pieces, missing = [np.empty(0, np.int32)], count
        while missing:
            pieces.append(self._runs.take_longest(missing))
            missing -= pieces[-1].size
        return np.sort(np.concatenate(pieces))
