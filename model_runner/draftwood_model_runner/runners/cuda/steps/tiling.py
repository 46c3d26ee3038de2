"""Divides the attention of a step into parts that run side by side: which queries read which entries of the KV cache.

A tile is a run of tokens of one batch row, few enough that their heads of one group fill the rows of a program. Each
tile reads the entries that come before its tokens in one or several runs; the part with the last run also reads the
nodes of the draft tree.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.constants import LEAST_RUN, WORD
from draftwood_strategies.draft import Int32Array


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
            then the first part of its own and how many of these it has, see `exact_tiling`.
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
    most_nodes = set_chains(batch.parents, cu_seqlens, chains)
    bitmask = np.zeros((batch.size, max(1, -(-most_nodes // WORD))), np.int64)
    prefixes = np.empty(batch.size, np.int32)
    _see(batch.parents, cu_seqlens, batch.context_lens, chains, prefixes, bitmask)
    parts = np.empty((division.most_parts(batch.size), 8), np.int32)
    token_parts = np.zeros((batch.size, 5), np.int32)
    count = _fill(cu_seqlens, batch.context_lens, batch.cu_blocks, chains, prefixes, *division, parts, token_parts)
    return Tiles(parts[:count], token_parts, prefixes, bitmask)


@numba.njit(cache=True, nogil=True)
def set_chains(parents: Int32Array, cu_seqlens: Int32Array, chains: Int32Array) -> int:
    """Sets how many tokens of each row follow one another from its first on; returns the most nodes behind them."""
    most: int = 0
    for row in range(chains.shape[0]):
        size = cu_seqlens[row + 1] - cu_seqlens[row]
        chain = 1
        while chain < size and parents[cu_seqlens[row] + chain] == chain - 1:
            chain += 1
        chains[row] = chain
        most = max(most, size - chain)
    return most


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
