"""Prefix cache: which pages hold the keys and values of a prefix, tenant by tenant. Holds no torch.

A block is the tokens of one full page. It is known by the block before it and its own tokens, as in vLLM's automatic
prefix caching, but by the tokens themselves in place of a hash, so that no collision can return another prefix. The
first block of a prefix follows its tenant, so that no look-up ever sees a page of another tenant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftwood_strategies.draft import Int32Array


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


class PrefixCache:
    """Finds the pages of prefixes, those of live sequences and those retained after their sequence ended.

    Args:
        page_size: tokens of a block.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._blocks: dict[tuple[Block | str, bytes], Block] = {}
        self._of_page: dict[int, Block] = {}
        self._retained: dict[int, None] = {}

    @property
    def retained(self) -> int:
        """Pages that no live sequence holds."""
        return len(self._retained)

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def find(self, tenant: str, tokens: Int32Array) -> list[Block]:
        """The blocks that `tokens`, int32[n], begin with, as far as they are known."""
        found: list[Block] = []
        before: Block | str = tenant
        for of_block in self._cut(tokens):
            block = self._blocks.get((before, of_block))
            if block is None:
                break
            found.append(block)
            before = block
        return found

    def add(self, before: Block | str, tokens: Int32Array, pages: Int32Array) -> Block | str:
        """Records that pages int32[p] hold the keys and values of `tokens`, int32[p * page_size], that follow `before`.

        Blocks that are known already keep their page. Returns the last block, or `before` if there is none.
        """
        for of_block, page in zip(self._cut(tokens), pages.tolist(), strict=True):
            block = self._blocks.get((before, of_block))
            if block is None:
                block = Block(before, of_block, page)
                self._blocks[before, of_block] = self._of_page[page] = block
            before = block
        return before

    def retain(self, page: int) -> None:
        """Keeps the block of a page that no live sequence holds any more, as the most recently used."""
        self._retained[page] = None

    def reuse(self, pages: Int32Array) -> None:
        """Live sequences hold these pages again."""
        for page in pages.tolist():
            self._retained.pop(page, None)

    def is_retained(self, page: int) -> bool:
        return page in self._retained

    def forget(self, page: int) -> None:
        """Drops what is known of a page; it can no longer be found."""
        self._retained.pop(page, None)
        block = self._of_page.pop(page)
        del self._blocks[block.before, block.tokens]

    def forget_oldest(self) -> int:
        """Forgets the least recently used of the retained pages, of which there must be one; returns it."""
        page = next(iter(self._retained))
        self.forget(page)
        return page

    def check(self) -> None:
        """Asserts that each block has a page of its own."""
        assert self._retained.keys() <= self._of_page.keys()
        assert len(self._blocks) == len(self._of_page)
        for key, block in self._blocks.items():
            assert key == (block.before, block.tokens)
            assert self._of_page[block.page] is block

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
