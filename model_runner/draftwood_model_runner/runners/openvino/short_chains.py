"""Computes the tokens of a short chain as batch rows of their own.

PagedAttention has one kernel for batch rows with one token and another for two and more, which first lays out the keys
and values of the whole context again: that takes as long as attending for several tokens. All keys and values of a step
are written before any token attends, so token i of a chain can be a row with i more committed tokens. A tree must stay
one row, since the ancestors of a node need not lie one after the other in the pages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.native import Int32Array, compiled

LONGEST = 4
"""Tokens of a chain that is split, at most. Two tokens take 0.56 to 0.94 of the time so, four 0.83 to 1.04, eight 0.95
to 1.04 and sixteen 0.99 to 1.28, with 1 to 32 sequences and contexts of 128 to 1,900 (110M, float32, AVX2)."""


def split_short_chains(batch: StepBatch) -> StepBatch:
    """The same tokens in more batch rows: one for each token of a chain of 2 to `LONGEST` tokens.

    Its rows no longer stand for sequences, so it is for attention alone.
    """
    counts = np.ones(batch.rows, np.int32)
    rows, pages = _count(batch.parents, batch.cu_seqlens, batch.cu_blocks, LONGEST, counts)
    if rows == batch.rows:
        return batch
    parents, block_table = batch.parents.copy(), np.empty(pages, np.int32)
    cu_seqlens, cu_blocks = np.zeros((2, rows + 1), np.int32)
    context_lens = np.empty(rows, np.int32)
    _split(
        counts,
        batch.cu_seqlens,
        batch.context_lens,
        batch.block_table,
        batch.cu_blocks,
        parents,
        cu_seqlens,
        context_lens,
        block_table,
        cu_blocks,
    )
    return replace(
        batch,
        parents=parents,
        cu_seqlens=cu_seqlens,
        context_lens=context_lens,
        block_table=block_table,
        cu_blocks=cu_blocks,
        prompt_lens=None,
    )


@compiled
def _count(
    parents: Int32Array, cu_seqlens: Int32Array, cu_blocks: Int32Array, longest: int, counts: Int32Array
) -> tuple[int, int]:
    """Sets how many rows become of each, int32[s]; returns how many rows and pages of rows that makes."""
    rows, pages = 0, 0
    for s in range(counts.shape[0]):
        begin, end = cu_seqlens[s], cu_seqlens[s + 1]
        chain = end - begin <= longest
        for i in range(begin, end):
            chain = chain and parents[i] == i - begin - 1
        counts[s] = end - begin if chain else 1
        rows += counts[s]
        pages += counts[s] * (cu_blocks[s + 1] - cu_blocks[s])
    return rows, pages


@compiled
def _split(
    counts: Int32Array,
    old_seqlens: Int32Array,
    old_context_lens: Int32Array,
    old_table: Int32Array,
    old_blocks: Int32Array,
    parents: Int32Array,
    cu_seqlens: Int32Array,
    context_lens: Int32Array,
    block_table: Int32Array,
    cu_blocks: Int32Array,
) -> None:
    """Fills the arrays from `parents` on."""
    row, page = 0, 0
    for s in range(counts.shape[0]):
        begin = old_seqlens[s]
        for i in range(counts[s]):
            split = counts[s] > 1
            if split:
                parents[begin + i] = -1
            context_lens[row] = old_context_lens[s] + i
            cu_seqlens[row + 1] = begin + i + 1 if split else old_seqlens[s + 1]
            for at in range(old_blocks[s], old_blocks[s + 1]):
                block_table[page] = old_table[at]
                page += 1
            cu_blocks[row + 1] = page
            row += 1
