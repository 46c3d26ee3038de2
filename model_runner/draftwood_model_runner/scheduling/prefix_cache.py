"""Prefix cache: which pages hold the keys and values of a prefix, tenant by tenant. Holds no torch.

A block is the tokens of one full page. As in vLLM's automatic prefix caching it is known by a hash of its tokens and of
the block before it: SHA-256, so that no other prefix has the same. The first block of a prefix follows its tenant, so
that no look-up ever sees a page of another tenant.

A waiting sequence is looked up in every step, so what was found for it is kept (`CachedPrefix`): its blocks are hashed
once, and looked up again only after pages were forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import Int32Array


@dataclass(eq=False, slots=True)
class CachedPrefix:
    """The blocks that a sequence begins with.

    Attributes:
        hashes: of its blocks, as far as they were looked for.
        pages: int32[p], which hold the first ones of them, as far as these were known at the last look.
        forgotten: how often the cache had forgotten pages then.
    """

    tenant: str
    hashes: list[bytes] = field(default_factory=list)
    pages: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    forgotten: int = 0

    def append(self, tokens: Int32Array, page_size: int) -> None:
        """Adds the blocks of `tokens`, int32[n * page_size], which follow those that it has."""
        before = self.hashes[-1] if self.hashes else sha256(self.tenant.encode("utf-8", "surrogatepass")).digest()
        data, size = tokens.tobytes(), page_size * tokens.itemsize
        for begin in range(0, len(data), size):
            before = sha256(before + data[begin : begin + size]).digest()
            self.hashes.append(before)


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
            found = [*map(self._page_of.get, prefix.hashes[known:])]
            further = found[: found.index(None)] if None in found else found
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
        pages = np.array([self._page_of[one] for one in hashes if one in self._page_of], np.int32)
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
