"""Prefix cache: which pages hold the keys and values of a prefix, tenant by tenant. Holds no torch.

A block is the tokens of one full page. It is known by the block before it and its own tokens, as in vLLM's automatic
prefix caching, but by the tokens themselves in place of a hash, so that no collision can return another prefix. The
first block of a prefix follows its tenant, so that no look-up ever sees a page of another tenant.

A sequence that waits is asked about in every step. So what was found for it is kept (`KnownPrefix`), extended by what
has become known since, and cut where a page is given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from draftwood_strategies.draft import Int32Array


@dataclass(eq=False, frozen=True, slots=True)
class Block:
    """The tokens of one full page whose keys and values are known.

    Attributes:
        before: the block that it follows; for the first one of a prefix, the tenant.
        tokens: int32[page_size], as bytes.
        page: which holds it.
        tenant: whose it is.
        depth: how many blocks are before it.
    """

    before: Block | str
    tokens: bytes
    page: int
    tenant: str
    depth: int


@dataclass(eq=False, slots=True)
class KnownPrefix:
    """The blocks that the tokens of a waiting sequence begin with, as far as they were known at the last look.

    Attributes:
        retained: how many of them are in pages that no live sequence holds.
    """

    tenant: str
    blocks: list[Block] = field(default_factory=list)
    retained: int = 0

    def holds(self, block: Block) -> bool:
        return block.depth < len(self.blocks) and self.blocks[block.depth] is block


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
        self._watched: dict[str, list[KnownPrefix]] = {}

    @property
    def retained(self) -> int:
        """Pages that no live sequence holds."""
        return len(self._retained)

    def __contains__(self, page: int) -> bool:
        return page in self._of_page

    def watch(self, tenant: str) -> KnownPrefix:
        """An empty prefix, for `extend`; what it holds is kept true until `unwatch`."""
        prefix = KnownPrefix(tenant)
        self._watched.setdefault(tenant, []).append(prefix)
        return prefix

    def unwatch(self, prefix: KnownPrefix) -> None:
        """A prefix is of use no longer."""
        watched = self._watched[prefix.tenant]
        watched.remove(prefix)
        if not watched:
            del self._watched[prefix.tenant]

    def extend(self, prefix: KnownPrefix, tokens: Int32Array) -> int:
        """Adds the blocks that `tokens`, int32[n], which follow the prefix, begin with, as far as they are known.

        Returns how many those are.
        """
        before: Block | str = prefix.blocks[-1] if prefix.blocks else prefix.tenant
        known = len(prefix.blocks)
        for of_block in self._cut(tokens):
            block = self._blocks.get((before, of_block))
            if block is None:
                break
            prefix.blocks.append(block)
            prefix.retained += block.page in self._retained
            before = block
        return len(prefix.blocks) - known

    def beginning(self, prefix: KnownPrefix, blocks: int) -> KnownPrefix:
        """The first blocks of a prefix, as they are now: itself if it has no more, otherwise a copy."""
        if blocks == len(prefix.blocks):
            return prefix
        first = prefix.blocks[:blocks]
        return KnownPrefix(prefix.tenant, first, sum(block.page in self._retained for block in first))

    def add(self, before: Block | str, tokens: Int32Array, pages: Int32Array) -> Block | str:
        """Records that pages int32[p] hold the keys and values of `tokens`, int32[p * page_size], that follow `before`.

        Blocks that are known already keep their page. Returns the last block, or `before` if there is none.
        """
        for of_block, page in zip(self._cut(tokens), pages.tolist(), strict=True):
            block = self._blocks.get((before, of_block))
            if block is None:
                tenant, depth = (before, 0) if isinstance(before, str) else (before.tenant, before.depth + 1)
                block = Block(before, of_block, page, tenant, depth)
                self._blocks[before, of_block] = self._of_page[page] = block
            before = block
        return before

    def retain(self, page: int) -> None:
        """Keeps the block of a page that no live sequence holds any more, as the most recently used."""
        self._retained[page] = None
        for prefix in self._holding(self._of_page[page]):
            prefix.retained += 1

    def reuse(self, pages: Int32Array) -> None:
        """Live sequences hold these pages again."""
        for page in pages.tolist():
            if page in self._retained:
                del self._retained[page]
                for prefix in self._holding(self._of_page[page]):
                    prefix.retained -= 1

    def forget(self, page: int) -> None:
        """Drops what is known of a page; it can no longer be found."""
        block = self._of_page[page]
        for prefix in self._holding(block):
            prefix.retained -= sum(one.page in self._retained for one in prefix.blocks[block.depth :])
            del prefix.blocks[block.depth :]
        self._retained.pop(page, None)
        del self._of_page[page], self._blocks[block.before, block.tokens]

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
        for tenant, watched in self._watched.items():
            for prefix in watched:
                assert prefix.tenant == tenant
                assert prefix.retained == sum(block.page in self._retained for block in prefix.blocks)
                before: Block | str = tenant
                for depth, block in enumerate(prefix.blocks):
                    assert self._blocks[before, block.tokens] is block
                    assert block.depth == depth
                    before = block

    def _holding(self, block: Block) -> list[KnownPrefix]:
        """The prefixes that hold a block."""
        return [prefix for prefix in self._watched.get(block.tenant, ()) if prefix.holds(block)]

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
