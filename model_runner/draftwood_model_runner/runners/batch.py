"""Builds a `StepBatch`: the chain of tokens to compute for each sequence, with its draft tree under the end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.native import compiled


class BatchRow(NamedTuple):
    """The part of one sequence in a step, before it is laid out.

    Attributes:
        block_table: int32[p], its KV pages: at least those for its context, the chain and the tree.
        context_len: how many of its tokens are committed.
        chain: int32[c], the next tokens to compute, c >= 1.
        tree: the draft under the end of the chain.
        logits_from: the tokens of the row from here on need logits; row size for none.
        prompt_len: how many tokens of the sequence are its prompt; None: its context and the chain.
    """

    block_table: Int32Array
    context_len: int
    chain: Int32Array
    tree: DraftTree
    logits_from: int
    prompt_len: int | None = None


class BatchRows(NamedTuple):
    """What the sequences of a step compute besides their drafts.

    Attributes:
        block_tables: of each sequence int32[p], its KV pages: at least those for its context, the chain and the tree.
        context_lens: int32[s], how many of its tokens are committed.
        tokens: int32[c], the next tokens of all sequences to compute, one sequence after the other, at least one each.
        cu_seqlens: int32[s + 1]; those of sequence i are `cu_seqlens[i]` to `cu_seqlens[i + 1]`.
        logits_from: int32[s], the tokens of a batch row from here on need logits; row size for none.
        prompt_lens: as `StepBatch.prompt_lens`.
    """

    block_tables: SequenceOf[Int32Array]
    context_lens: Int32Array
    tokens: Int32Array
    cu_seqlens: Int32Array
    logits_from: Int32Array
    prompt_lens: Int32Array | None = None


def lay_out(rows: SequenceOf[BatchRow], min_score: float = 0.0) -> StepBatch:
    """The flat batch of some batch rows, at least one.

    Args:
        min_score: of each tree only the nodes with at least this score; they are a tree themselves.
    """
    chains = BatchRows(
        [row.block_table for row in rows],
        np.array([row.context_len for row in rows], np.int32),
        np.concatenate([row.chain for row in rows]),
        np.cumsum([0, *(row.chain.shape[0] for row in rows)], dtype=np.int32),
        np.array([row.logits_from for row in rows], np.int32),
        np.array(
            [row.context_len + row.chain.size if row.prompt_len is None else row.prompt_len for row in rows], np.int32
        ),
    )
    max_depths = np.full(len(rows), np.iinfo(np.int32).max, np.int32)
    return lay_out_trees(chains, DraftTrees.of([row.tree for row in rows]), max_depths, min_score)


def lay_out_trees(chains: BatchRows, trees: DraftTrees, max_depths: Int32Array, min_score: float) -> StepBatch:
    """The flat batch of chains with a draft tree under the end of each.

    Args:
        max_depths: int32[s], of each tree only the nodes up to this depth.
        min_score: as in `lay_out`.
    """
    rows, capacity = chains.context_lens.shape[0], chains.tokens.shape[0] + trees.tokens.shape[0]
    tokens, positions, parents, logit_rows = np.empty((4, capacity), np.int32)
    cu_seqlens, token_of_node = np.zeros(rows + 1, np.int32), np.empty(trees.tokens.shape[0], np.int32)
    with_logits = _fill(
        chains.context_lens,
        chains.tokens,
        chains.cu_seqlens,
        chains.logits_from,
        trees.tokens,
        trees.parents,
        trees.scores,
        trees.offsets,
        max_depths,
        min_score,
        tokens,
        positions,
        parents,
        cu_seqlens,
        logit_rows,
        token_of_node,
    )
    filled, tables = int(cu_seqlens[-1]), chains.block_tables
    return StepBatch(
        tokens=tokens[:filled],
        positions=positions[:filled],
        parents=parents[:filled],
        cu_seqlens=cu_seqlens,
        context_lens=chains.context_lens,
        block_table=tables[0] if len(tables) == 1 else np.concatenate(tables),
        cu_blocks=np.cumsum([0, *map(len, tables)], dtype=np.int32),
        logit_rows=logit_rows[:with_logits],
        prompt_lens=chains.prompt_lens,
    )


@compiled
def count_chains(parents: Int32Array, cu_seqlens: Int32Array, chains: Int32Array) -> int:
    """Sets how many tokens of each batch row follow one another from its first on; returns the most nodes behind them.

    Args:
        parents, cu_seqlens: as in `StepBatch`.
        chains: int32[S], out.
    """
    most_nodes = 0
    for row in range(chains.shape[0]):
        size = cu_seqlens[row + 1] - cu_seqlens[row]
        chain = 1
        while chain < size and parents[cu_seqlens[row] + chain] == chain - 1:
            chain += 1
        chains[row] = chain
        most_nodes = max(most_nodes, size - chain)
    return most_nodes


@compiled
def _fill(
    context_lens: Int32Array,
    chains: Int32Array,
    chain_offsets: Int32Array,
    logits_from: Int32Array,
    tree_tokens: Int32Array,
    tree_parents: Int32Array,
    scores: Float32Array,
    tree_offsets: Int32Array,
    max_depths: Int32Array,
    min_score: float,
    tokens: Int32Array,
    positions: Int32Array,
    parents: Int32Array,
    cu_seqlens: Int32Array,
    logit_rows: Int32Array,
    token_of_node: Int32Array,
) -> int:
    """Fills the arrays of a batch, `tokens` to `logit_rows`; returns how many tokens need logits.

    Args:
        token_of_node: workspace: for each node of the trees its token of the batch row, or -1.
    """
    end, with_logits = 0, 0
    for s in range(context_lens.shape[0]):
        begin, c = end, chain_offsets[s + 1] - chain_offsets[s]
        for i in range(c):
            tokens[end], positions[end], parents[end] = chains[chain_offsets[s] + i], context_lens[s] + i, i - 1
            end += 1
        first, deepest = tree_offsets[s], context_lens[s] + c - 1 + max_depths[s]
        for node in range(first, tree_offsets[s + 1]):
            above = c - 1 if tree_parents[node] < 0 else token_of_node[first + tree_parents[node]]
            token_of_node[node] = -1
            if scores[node] < min_score or above < 0 or positions[begin + above] >= deepest:
                continue
            tokens[end], positions[end], parents[end] = tree_tokens[node], positions[begin + above] + 1, above
            token_of_node[node] = end - begin
            end += 1
        cu_seqlens[s + 1] = end
        for i in range(begin + logits_from[s], end):
            logit_rows[with_logits] = i
            with_logits += 1
    return with_logits
