"""Divides the attention of a step so that the order of a token's sums depends on its position alone.

Runs begin at multiples of `EXACT_RUN` entries, for any batch. A node of a draft tree shares the runs that are full
before its tree; the rest it reads in parts of its own, where its ancestors are at the places that they have once they
are committed. A kernel then multiplies and adds the same numbers in the same places with and without drafts; what a
token must not see has the weight 0 and changes no bit. It is the idea of `runners.torch.exact_attention`, in paths for
masks.
"""

from __future__ import annotations

import numba
import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda import constants
from draftwood_model_runner.runners.cuda.steps.tiling import Tiles, set_chains
from draftwood_strategies.draft import Int32Array

LEVELS = 64
"""Of a draft tree, at most."""


def divide_exactly(batch: StepBatch, tile: int) -> Tiles:
    """The attention of a step in parts, for tiles of so many tokens at most.

    Raises:
        ValueError: a draft tree has more than `LEVELS` levels.
    """
    chains, cu_seqlens = np.empty(batch.rows, np.int32), batch.cu_seqlens
    set_chains(batch.parents, cu_seqlens, chains)
    prefixes, levels = np.empty(batch.size, np.int32), np.zeros(batch.size, np.int32)
    paths = np.zeros((batch.size, LEVELS), np.int32)
    _follow(batch.parents, cu_seqlens, batch.context_lens, chains, prefixes, levels, paths)
    run = constants.EXACT_RUN
    tiles = -(-np.diff(cu_seqlens) // tile) * (-(-(batch.context_lens + chains) // run))
    parts = np.empty((int(tiles.sum()) + 2 * int(np.count_nonzero(levels)), 8), np.int32)
    token_parts = np.zeros((batch.size, 5), np.int32)
    count = _fill(cu_seqlens, batch.context_lens, batch.cu_blocks, prefixes, levels, tile, run, parts, token_parts)
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
def _fill(
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
