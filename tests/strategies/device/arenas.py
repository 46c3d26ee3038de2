"""Arenas of a few rows and tenants on the CPU, and what their regions hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.device.arena import (
    LEARNS,
    LINKED,
    MEMORY,
    MEMORY_AT,
    OWNER,
    RECORDED,
    REGION,
    RING,
    STATE,
    TEXT,
    TEXT_AT,
    TOKENS,
    DeviceSizes,
    Layout,
    Region,
)
from draftwood_strategies.device.calls import append
from draftwood_strategies.trie.phrase_index import (
    NOWHERE,
    ORDERS,
    START,
    TOKENS_PER_BLOCK,
    WAYS,
    WAYS_BEFORE,
    IndexArrays,
)


class PlainArena:
    """An arena whose rows learn: row r is number r + 1 in the memory of tenant `regions[r]`."""

    def __init__(self, sizes: DeviceSizes, regions: Sequence[int]) -> None:
        self.layout = Layout(sizes)
        self.numbers = torch.zeros(self.layout.size, dtype=torch.int32)
        self.numbers[: self.layout.weights] = NOWHERE
        texts = [RegionView(self.numbers, r * self.layout.text.size, self.layout.text) for r in range(sizes.rows)]
        memories = [
            RegionView(self.numbers, self.layout.memories + t * self.layout.memory.size, self.layout.memory)
            for t in range(sizes.tenants)
        ]
        self.texts, self.memories = texts, memories
        for view in (*texts, *memories):
            view.ring[:] = 0
        begin = self.layout.states
        self.states = self.numbers[begin : begin + sizes.rows * STATE].view(sizes.rows, STATE)
        for row, region in enumerate(regions):
            self.states[row, [REGION, LEARNS, OWNER]] = torch.tensor([region, 1, row + 1], dtype=torch.int32)
        self.states[:, [TEXT_AT, MEMORY_AT]] = NOWHERE

    def append(self, kind: int, rows: Sequence[int], runs: Sequence[Sequence[int]], **options: int) -> None:
        counts = np.array([len(run) for run in runs], np.int32)
        append(
            self.numbers,
            self.layout,
            kind,
            _tensor(rows),
            _tensor([token for run in runs for token in run] or [0]),
            _tensor(np.cumsum(counts) - counts),
            _tensor(counts),
            **options,  # type: ignore[arg-type]
        )

    def write(self, rows: Sequence[int], runs: Sequence[Sequence[int]]) -> None:
        """As a step does."""
        self.append(TEXT, rows, runs)
        self.append(MEMORY, rows, runs)

    def record(self, region: int, numbers: Sequence[int], runs: Sequence[Sequence[int]]) -> None:
        self.append(RECORDED, numbers, runs, region=region)


class RegionView:
    """The parts of a region, see `arena.Region`."""

    def __init__(self, arena: torch.Tensor, begin: int, region: Region) -> None:
        numbers = arena.numpy()[begin : begin + region.size]
        self.all = numbers
        self.log = numbers[: region.slots]
        self.links = numbers[region.links : region.next].reshape(region.slots, len(ORDERS), LINKED)
        self.heads = numbers[region.heads : region.heads + len(ORDERS) * region.buckets].reshape(
            len(ORDERS), region.buckets
        )
        self.blocks = numbers[region.next : region.ring].reshape(3, region.blocks)
        self.ring = numbers[region.ring : region.ring + RING]

    @property
    def tokens(self) -> int:
        return int(self.ring[TOKENS])

    def sequences(self) -> list[list[int]]:
        """The stored sequences, in any order, without start marks."""
        following, previous, owners = self.blocks
        found = []
        for block in np.flatnonzero((owners >= 0) & (previous < 0)).tolist():
            tokens: list[int] = []
            while block >= 0:
                tokens += self.log[block * TOKENS_PER_BLOCK : (block + 1) * TOKENS_PER_BLOCK].tolist()
                block = int(following[block])
            found.append([token for token in tokens if token not in (NOWHERE, START)])
        return [tokens for tokens in found if tokens]

    def chain(self, order: int, bucket: int) -> list[int]:
        """The occurrences of the phrases with one hash, the newest first."""
        found, at = [], int(self.heads[order, bucket])
        while at >= 0 and at not in found:
            found.append(at)
            at = int(self.links[at, order, 0])
        return found


def host_chain(index: IndexArrays, order: int, bucket: int) -> list[int]:
    """As `RegionView.chain`, of an index of the host: its ways side by side."""
    ways = WAYS[order]
    newest = WAYS_BEFORE[order] * buckets_of(index) + bucket * ways
    latest = index.heads[newest : newest + ways].tolist()
    found: list[int] = []
    step = 0
    while (at := latest[step % ways]) >= 0 and at not in found:
        found.append(at)
        latest[step % ways] = int(index.links[at, order])
        step += 1
    return found


def buckets_of(index: IndexArrays) -> int:
    """Of each order's hash table."""
    return len(index.heads) // WAYS_BEFORE[-1]


def _tensor(numbers: Sequence[int] | Int32Array) -> torch.Tensor:
    return torch.tensor(np.asarray(numbers, np.int32))
