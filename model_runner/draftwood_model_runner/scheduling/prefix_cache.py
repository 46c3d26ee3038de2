"""Prefix cache: which pages hold the keys and values of a prefix, tenant by tenant. Holds no torch.

A block is the tokens of one full page. It is known by the block before it and its own tokens, as in vLLM's automatic
prefix caching, but by the tokens themselves in place of a hash, so that no collision can return another prefix. The
first block of a prefix follows its tenant, so that no look-up ever sees a page of another tenant.

A sequence that waits is asked about in every step. So what was found for it is kept (`KnownPrefix`), extended by what
has become known since, and cut at a page that was given up when it is looked at next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import Int32Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]


@dataclass(eq=False, frozen=True, slots=True)
class Block:
    """The tokens of one full page whose keys and values are known.

    Attributes:
        before: the block that it follows; for the first one of a prefix, the tenant.
        tokens: int32[page_size], as bytes.
        page: which holds it.
    """

    before: Block | str
    tokens: bytes
    page: int


@dataclass(eq=False, slots=True)
class KnownPrefix:
    """The blocks that the tokens of a sequence begin with, as far as they were known at the last look.

    Attributes:
        pages: int32[p], those of the blocks.
        retained: how many of them no live sequence holds.
        forgotten: int32[p], how often each page was forgotten before.
        changes: of the cache, up to which all this holds.
    """

    tenant: str
    blocks: list[Block] = field(default_factory=list)
    pages: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    retained: int = 0
    forgotten: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    changes: int = -1


class PrefixCache:
    """Finds the pages of prefixes, those of live sequences and those retained after their sequence ended.

    Args:
        page_size: tokens of a block.
        pages: how many pages there are.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self._blocks: dict[tuple[Block | str, bytes], Block] = {}
        self._of_page: dict[int, Block] = {}
        self._retained: dict[int, None] = {}
        self._is_known, self._is_retained = np.zeros((2, pages), np.bool_)
        self._times_forgotten = np.zeros(pages, np.int32)
        self._changes = 0

    @property
    def retained(self) -> int:
        """Pages that no live sequence holds."""
        return len(self._retained)

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def refresh(self, prefix: KnownPrefix) -> None:
        """Makes what a prefix holds true again, after pages were retained, reused or forgotten."""
        if prefix.changes == self._changes:
            return
        same = self._times_forgotten[prefix.pages] == prefix.forgotten
        if not same.all():
            known = int(same.argmin())
            del prefix.blocks[known:]
            prefix.pages, prefix.forgotten = prefix.pages[:known], prefix.forgotten[:known]
        prefix.retained = int(np.count_nonzero(self._is_retained[prefix.pages]))
        prefix.changes = self._changes

    def extend(self, prefix: KnownPrefix, tokens: Int32Array) -> int:
        """Adds the blocks that `tokens`, int32[n], which follow the prefix, begin with, as far as they are known.

        Returns how many those are.
        """
        self.refresh(prefix)
        before: Block | str = prefix.blocks[-1] if prefix.blocks else prefix.tenant
        found = []
        for of_block in self._cut(tokens):
            block = self._blocks.get((before, of_block))
            if block is None:
                break
            found.append(block)
            before = block
        self._append(prefix, found)
        return len(found)

    def beginning(self, prefix: KnownPrefix, blocks: int) -> KnownPrefix:
        """The first `blocks` blocks of a prefix: the prefix itself if these are all, otherwise a copy."""
        if blocks == len(prefix.blocks):
            return prefix
        pages = prefix.pages[:blocks]
        retained = int(np.count_nonzero(self._is_retained[pages]))
        return KnownPrefix(
            prefix.tenant, prefix.blocks[:blocks], pages, retained, prefix.forgotten[:blocks], prefix.changes
        )

    def add(self, prefix: KnownPrefix, tokens: Int32Array, pages: Int32Array) -> None:
        """Records that pages int32[p] hold the keys and values of `tokens`, int32[p * page_size], that follow a prefix,
        and adds these blocks to it.

        Blocks that are known already keep their page.
        """
        self.refresh(prefix)
        before: Block | str = prefix.blocks[-1] if prefix.blocks else prefix.tenant
        added = []
        for of_block, page in zip(self._cut(tokens), pages.tolist(), strict=True):
            block = self._blocks.get((before, of_block))
            if block is None:
                if self._is_known[page]:  # after a block that was forgotten, so it can be found no longer
                    self.forget(np.array([page], np.int32))
                block = Block(before, of_block, page)
                self._blocks[before, of_block] = self._of_page[page] = block
                self._is_known[page] = True
            added.append(block)
            before = block
        self._append(prefix, added)

    def retained_from(self, prefix: KnownPrefix, block: int) -> int:
        """How many pages of a prefix no live sequence holds, from that of a block on."""
        self.refresh(prefix)
        return int(np.count_nonzero(self._is_retained[prefix.pages[block:]])) if block else prefix.retained

    def retained_pages(self, prefix: KnownPrefix) -> Int32Array:
        """int32[p], the pages of a prefix that no live sequence holds."""
        self.refresh(prefix)
        return prefix.pages[self._is_retained[prefix.pages]]

    def known(self, pages: Int32Array) -> BoolArray:
        """bool[p], which of these pages, int32[p], hold a block."""
        return self._is_known[pages]

    def retain(self, pages: Int32Array) -> None:
        """Keeps the blocks of pages, int32[p], that no live sequence holds any more; the last is the latest used."""
        self._retained.update(dict.fromkeys(pages.tolist()))
        self._is_retained[pages] = True
        self._changes += 1

    def reuse(self, pages: Int32Array) -> None:
        """Live sequences hold these pages, int32[p], again."""
        for page in pages[self._is_retained[pages]].tolist():
            del self._retained[page]
        self._is_retained[pages] = False
        self._changes += 1

    def forget(self, pages: Int32Array) -> None:
        """Drops what is known of pages, int32[p]; they can no longer be found."""
        for page in pages.tolist():
            block = self._of_page.pop(page)
            del self._blocks[block.before, block.tokens]
            self._retained.pop(page, None)
        self._is_known[pages] = self._is_retained[pages] = False
        self._times_forgotten[pages] += 1
        self._changes += 1

    def forget_oldest(self, count: int) -> Int32Array:
        """Forgets the `count` least recently used retained pages, and returns them. There must be so many."""
        pages = np.fromiter(islice(self._retained, count), np.int32, count)
        self.forget(pages)
        return pages

    def check(self) -> None:
        """Asserts that each block has a page of its own."""
        assert self._retained.keys() <= self._of_page.keys()
        assert len(self._blocks) == len(self._of_page)
        assert {*np.flatnonzero(self._is_known).tolist()} == self._of_page.keys()
        assert {*np.flatnonzero(self._is_retained).tolist()} == self._retained.keys()
        for key, block in self._blocks.items():
            assert key == (block.before, block.tokens)
            assert self._of_page[block.page] is block

    def check_prefix(self, prefix: KnownPrefix) -> None:
        """Asserts that what a prefix holds is known."""
        self.refresh(prefix)
        assert prefix.retained == sum(block.page in self._retained for block in prefix.blocks)
        assert prefix.pages.tolist() == [block.page for block in prefix.blocks]
        before: Block | str = prefix.tenant
        for block in prefix.blocks:
            assert self._blocks[before, block.tokens] is block
            before = block

    def _append(self, prefix: KnownPrefix, blocks: list[Block]) -> None:
        """Adds blocks that follow a refreshed prefix."""
        if not blocks:
            return
        pages = np.array([block.page for block in blocks], np.int32)
        prefix.blocks += blocks
        prefix.pages = np.concatenate([prefix.pages, pages])
        prefix.forgotten = np.concatenate([prefix.forgotten, self._times_forgotten[pages]])
        prefix.retained += int(np.count_nonzero(self._is_retained[pages]))

    def _cut(self, tokens: Int32Array) -> Iterator[bytes]:
        """The tokens of each full page."""
        data, size = tokens.tobytes(), self.page_size * tokens.itemsize
        return (data[i : i + size] for i in range(0, len(data) - size + 1, size))


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """How many tokens the beginnings of `a` and `b` have in common."""
    size = min(a.size, b.size)
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
