"""Divides the attention of a step into parts that run side by side: which queries read which entries of the KV cache.

A tile is a run of tokens of one batch row, few enough that their heads of one group fill the rows of a program. Each
tile reads the entries that come before its tokens in one or several runs. The part with the last run also reads the
nodes of the draft tree.

In exact mode the order of a token's sums depends on its position alone. Runs begin at multiples of `EXACT_RUN` entries,
for any batch. A node of a draft tree shares the runs that are full before its tree. The rest it reads in parts of its
own, where its ancestors are at the places that they have once they are committed. So a kernel multiplies and adds the
same numbers in the same places with and without drafts. What a token must not see has the weight 0 and changes no bit.
It is the idea of `runners.torch.exact_attention`, with paths in place of masks.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import count_chains
from draftwood_model_runner.runners.cuda.device import LEAST_RUN, WORD
from draftwood_strategies.arrays import Int32Array

EXACT_RUN = 8 * WORD
"""Entries that a part of attention reads in exact mode. Fewer would leave more sums to merge."""
LEVELS = 64
"""The most levels of a draft tree in exact mode."""


class Division(NamedTuple):
    """How to divide.

    Attributes:
        tile: tokens of a tile, at most.
        programs: parts that run side by side on the device, for each head of keys.
        least_run: entries that a part reads at least, where there are so many.
    """

    tile: int
    programs: int
    least_run: int = LEAST_RUN

    def most_parts(self, tokens: int) -> int:
        """The most parts of a step of so many tokens."""
        return tokens + self.programs


class Tiles(NamedTuple):
    """The attention of a step, divided.

    Attributes:
        parts: int32[P, 8]: for each part the first token of its tile and how many it has, where the page table of its
            row begins, the run of entries that it reads (begin, end), the nodes that it reads (as entries: begin, end),
            and what is added to the entry of a node to get the number of its token.
        token_parts: int32[T, 5]: for each token the first part of its tile, how many the tile has, and its place in it;
            then the first part of its own and how many of these it has, see `divide_exactly`.
        prefixes: int32[T]: a token sees the entries of its row before this one ...
        ancestor_bitmask: int64[T, W]: ... and the nodes of the tree whose bits are set: bit i % 64 of word i // 64 is
            node i.
        paths: int32[T, levels]: for a token with parts of its own the entries of its ancestors in the tree and of
            itself; in such a part, they follow the entry where otherwise the nodes begin. None where there are none.
    """

    parts: Int32Array
    token_parts: Int32Array
    prefixes: Int32Array
    ancestor_bitmask: npt.NDArray[np.int64]
    paths: Int32Array | None = None


NO_TILES = Tiles(
    np.zeros((0, 8), np.int32), np.zeros((0, 5), np.int32), np.zeros(0, np.int32), np.zeros((0, 1), np.int64)
)


def divide(batch: StepBatch, division: Division) -> Tiles:
    """The attention of a step in parts, at most `division.most_parts`."""
    chains, cu_seqlens = np.empty(batch.rows, np.int32), batch.cu_seqlens
    most_nodes = count_chains(batch.parents, cu_seqlens, chains)
    bitmask = np.zeros((batch.size, max(1, -(-most_nodes // WORD))), np.int64)
    prefixes = np.empty(batch.size, np.int32)
    _see(batch.parents, cu_seqlens, batch.context_lens, chains, prefixes, bitmask)
    parts = np.empty((division.most_parts(batch.size), 8), np.int32)
    token_parts = np.zeros((batch.size, 5), np.int32)
    count = _fill(cu_seqlens, batch.context_lens, batch.cu_blocks, chains, prefixes, *division, parts, token_parts)
    return Tiles(parts[:count], token_parts, prefixes, bitmask)


@numba.njit(cache=True, nogil=True)
def _see(
    parents: Int32Array,
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    chains: Int32Array,
    prefixes: Int32Array,
    bitmask: npt.NDArray[np.int64],
) -> None:
    """Sets prefixes and the ancestor bitmask."""
    for row in range(chains.shape[0]):
        begin, chain = cu_seqlens[row], chains[row]
        for i in range(cu_seqlens[row + 1] - begin):
            parent = parents[begin + i]
            if i < chain or parent < chain:
                prefixes[begin + i] = context_lens[row] + (i if i < chain else parent) + 1
            else:
                prefixes[begin + i] = prefixes[begin + parent]
                bitmask[begin + i] = bitmask[begin + parent]
            if i >= chain:
                node = i - chain
                bitmask[begin + i, node // WORD] |= np.int64(1) << np.int64(node % WORD)


@numba.njit(cache=True, nogil=True)
def _fill(
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    cu_blocks: Int32Array,
    chains: Int32Array,
    prefixes: Int32Array,
    tile: int,
    programs: int,
    least_run: int,
    parts: Int32Array,
    token_parts: Int32Array,
) -> int:
    """Sets parts and token_parts; returns the number of parts."""
    work: int = 1
    for row in range(chains.shape[0]):
        tiles = (cu_seqlens[row + 1] - cu_seqlens[row] + tile - 1) // tile
        work += tiles * (context_lens[row] + chains[row])
    part: int = 0
    for row in range(chains.shape[0]):
        first, end = cu_seqlens[row], cu_seqlens[row + 1]
        nodes_begin = context_lens[row] + chains[row]
        while first < end:
            last = min(first + tile, end) - 1
            reads = 0
            for token in range(first, last + 1):
                reads = max(reads, prefixes[token])
            runs = max(min(programs * reads // work, (reads + least_run - 1) // least_run), 1)
            length = ((reads + runs - 1) // runs + WORD - 1) // WORD * WORD
            nodes = last + 1 - cu_seqlens[row] - chains[row]
            for run in range(runs):
                at = parts[part + run]
                at[0], at[1], at[2] = first, last + 1 - first, cu_blocks[row]
                at[3], at[4] = min(run * length, reads), min((run + 1) * length, reads)
                at[5], at[6] = nodes_begin, nodes_begin
                if run == runs - 1 and nodes > 0:
                    at[6] = nodes_begin + nodes
                at[7] = cu_seqlens[row] - context_lens[row]
            for token in range(first, last + 1):
                token_parts[token, 0], token_parts[token, 1], token_parts[token, 2] = part, runs, token - first
            part += runs
            first = last + 1
    return part


def divide_exactly(batch: StepBatch, tile: int) -> Tiles:
    """The attention of a step in parts, for tiles of so many tokens at most.

    Raises:
        ValueError: a draft tree has more than `LEVELS` levels.
    """
    chains, cu_seqlens = np.empty(batch.rows, np.int32), batch.cu_seqlens
    count_chains(batch.parents, cu_seqlens, chains)
    prefixes, levels = np.empty(batch.size, np.int32), np.zeros(batch.size, np.int32)
    paths = np.zeros((batch.size, LEVELS), np.int32)
    _follow(batch.parents, cu_seqlens, batch.context_lens, chains, prefixes, levels, paths)
    run = EXACT_RUN
    tiles = -(-np.diff(cu_seqlens) // tile) * (-(-(batch.context_lens + chains) // run))
    parts = np.empty((int(tiles.sum()) + 2 * int(np.count_nonzero(levels)), 8), np.int32)
    token_parts = np.zeros((batch.size, 5), np.int32)
    count = _fill_exactly(
        cu_seqlens, batch.context_lens, batch.cu_blocks, prefixes, levels, tile, run, parts, token_parts
    )
    return Tiles(parts[:count], token_parts, prefixes, np.zeros((batch.size, 1), np.int64), paths)


@numba.njit(cache=True, nogil=True)
def _follow(
    parents: Int32Array,
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    chains: Int32Array,
    prefixes: Int32Array,
    levels: Int32Array,
    paths: Int32Array,
) -> None:
    """Sets prefixes, and for nodes behind a chain the entries of their ancestors and how many these are."""
    for row in range(chains.shape[0]):
        begin, chain = cu_seqlens[row], chains[row]
        for i in range(cu_seqlens[row + 1] - begin):
            token, parent = begin + i, parents[begin + i]
            if i < chain:
                prefixes[token] = context_lens[row] + i + 1
                continue
            if parent < chain:
                prefixes[token] = context_lens[row] + parent + 1
            else:
                prefixes[token], levels[token] = prefixes[begin + parent], levels[begin + parent]
                paths[token] = paths[begin + parent]
            if levels[token] == LEVELS:
                raise ValueError("a draft tree has more levels than exact mode has room for")
            paths[token, levels[token]] = context_lens[row] + i
            levels[token] += 1


@numba.njit(cache=True, nogil=True)
def _fill_exactly(
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    cu_blocks: Int32Array,
    prefixes: Int32Array,
    levels: Int32Array,
    tile: int,
    size: int,
    parts: Int32Array,
    token_parts: Int32Array,
) -> int:
    """Sets parts, of runs of so many entries, and token_parts, and the prefixes of nodes to the end of what they share;
    returns the number of parts."""
    part: int = 0
    for row in range(context_lens.shape[0]):
        first, end = cu_seqlens[row], cu_seqlens[row + 1]
        while first < end:
            last = min(first + tile, end)
            reads = 0
            for token in range(first, last):
                shared = prefixes[token] // size * size if levels[token] else prefixes[token]
                reads = max(reads, shared)
            runs = (reads + size - 1) // size
            for run in range(runs):
                at = parts[part + run]
                at[0], at[1], at[2] = first, last - first, cu_blocks[row]
                at[3], at[4] = run * size, min((run + 1) * size, reads)
                at[5], at[6], at[7] = reads, reads, 0
            for token in range(first, last):
                token_parts[token, 0], token_parts[token, 1], token_parts[token, 2] = part, runs, token - first
            part += runs
            first = last
        for token in range(cu_seqlens[row], end):
            if not levels[token]:
                continue
            begin, sees = prefixes[token] // size * size, prefixes[token] + levels[token]
            token_parts[token, 3] = part
            for start in range(begin, sees, size):
                at = parts[part]
                at[0], at[1], at[2] = token, 1, cu_blocks[row]
                at[3], at[4] = start, min(start + size, sees)
                at[5], at[6], at[7] = prefixes[token], prefixes[token], 0
                part += 1
            token_parts[token, 4] = part - token_parts[token, 3]
            prefixes[token] = begin
    return part
