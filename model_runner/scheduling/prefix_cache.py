"""Prefix cache: which KV regions hold the keys and values of a prefix, tenant by tenant. Holds no torch.

A block of `PREFIX_BLOCK` tokens is identified by a hash of all tokens up to its end, as in vLLM's automatic prefix
caching, so that one look-up a block finds the longest cached prefix. Regions stay contiguous: shared rows are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from strategies.draft import Int32Array

PREFIX_BLOCK = 16
"""Tokens of a block, vLLM's default; a shorter common prefix is not found. Not tuned: copying few rows gains little."""


@dataclass(eq=False, slots=True)
class CachedRegion:
    """A KV region, and which tokens are known to be in it.

    Attributes:
        tenant: owner of the tokens.
        number: of the region in the `KVStore`.
        capacity: tokens that it can hold.
        tokens: int32[n]; the first n rows hold their keys and values.
        hashes: one for each whole block of `tokens`.
    """

    tenant: str
    number: int
    capacity: int
    tokens: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    hashes: list[int] = field(default_factory=list)


class PrefixCache:
    """Finds prefixes in the regions of live sequences, and in those retained after their sequence ended.

    Each tenant has its own table, so no look-up ever sees a region of another tenant. Hashes only select candidates;
    the shared length is found by comparing tokens.
    """

    def __init__(self) -> None:
        self._tables: dict[str, dict[int, dict[CachedRegion, None]]] = {}
        self._retained: dict[CachedRegion, None] = {}

    @property
    def retained(self) -> list[CachedRegion]:
        """Regions that no live sequence holds, the least recently used first."""
        return list(self._retained)

    def is_retained(self, region: CachedRegion) -> bool:
        return region in self._retained

    def oldest(self) -> CachedRegion:
        """The least recently used of the retained regions, of which there must be one."""
        return next(iter(self._retained))

    def find(self, tenant: str, tokens: Int32Array) -> tuple[CachedRegion | None, int]:
        """The region that holds most of the beginning of `tokens`, int32[n], and how many tokens of it."""
        table = self._tables.get(tenant, {})
        holders: dict[CachedRegion, None] = {}
        for value in block_hashes(tokens):
            if value not in table:
                break
            holders = table[value]
        if not holders:
            return None, 0
        region = next(reversed(holders))
        shared = common_prefix(region.tokens, tokens)
        return (region, shared) if shared else (None, 0)

    def touch(self, region: CachedRegion) -> None:
        """Makes a retained region the most recently used."""
        if region in self._retained:
            self._retained[region] = self._retained.pop(region)

    def record(self, region: CachedRegion, tokens: Int32Array) -> list[CachedRegion]:
        """Records that the region now holds `tokens`, which begin with what it held before.

        Returns:
            Retained regions that became redundant: this one has all their blocks.
        """
        region.tokens = tokens
        table = self._tables.setdefault(region.tenant, {})
        redundant = []
        for value in block_hashes(tokens, region.hashes):
            region.hashes.append(value)
            holders = table.setdefault(value, {})
            redundant += [other for other in holders if other in self._retained and other.hashes[-1] == value]
            holders[region] = None
        return redundant

    def worth_retaining(self, region: CachedRegion) -> bool:
        """Whether the region has a block that no other region has."""
        return bool(region.hashes) and len(self._tables[region.tenant][region.hashes[-1]]) == 1

    def retain(self, region: CachedRegion) -> None:
        """Keeps the region of a sequence that ended findable, until `forget`."""
        self._retained[region] = None

    def forget(self, region: CachedRegion) -> None:
        """Drops what is known of the region; it can no longer be found."""
        self._retained.pop(region, None)
        table = self._tables.get(region.tenant, {})
        for value in region.hashes:
            del table[value][region]
            if not table[value]:
                del table[value]
        if not table:
            self._tables.pop(region.tenant, None)
        region.tokens, region.hashes = region.tokens[:0], []

    def check(self, live: list[CachedRegion]) -> None:
        """Asserts that the tables hold the blocks of live and retained regions, and nothing else."""
        expected: dict[str, dict[int, set[CachedRegion]]] = {}
        for region in [*live, *self._retained]:
            assert region.hashes == list(block_hashes(region.tokens))
            assert region.tokens.size <= region.capacity
            for value in region.hashes:
                expected.setdefault(region.tenant, {}).setdefault(value, set()).add(region)
        tables = {tenant: table for tenant, table in self._tables.items() if table}
        assert {t: {v: set(holders) for v, holders in table.items()} for t, table in tables.items()} == expected
        assert not self._retained.keys() & set(live)


def block_hashes(tokens: Int32Array, known: list[int] | None = None) -> Iterator[int]:
    """A hash for each whole block of `tokens`, int32[n], over all tokens up to the block's end.

    Args:
        known: those of the first blocks, which are left out.
    """
    previous, start = (known[-1], len(known)) if known else (0, 0)
    data, size = tokens.tobytes(), PREFIX_BLOCK * tokens.itemsize
    for block in range(start, len(tokens) // PREFIX_BLOCK):
        previous = hash((previous, data[block * size : (block + 1) * size]))
        yield previous


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """How many tokens the beginnings of `a` and `b` have in common."""
    size = min(a.size, b.size)
    different = a[:size] != b[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size
