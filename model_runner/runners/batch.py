"""Builds a `StepBatch`: the chain of tokens to compute for each sequence, with its draft tree under the end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numba
import numpy as np

from model_runner.runners.base import StepBatch
from strategies.draft import DraftTree, Float32Array, Int32Array


class BatchRow(NamedTuple):
    """The part of one sequence in a step, before it is laid out.

    Attributes:
        pages: int32[p], its KV pages: at least those for its context, the chain and the tree.
        context: how many of its tokens are committed.
        chain: int32[c], the next tokens to compute, c >= 1.
        tree: the draft under the end of the chain.
        logits_from: the tokens of the row from here on need logits; row size for none.
    """

    pages: Int32Array
    context: int
    chain: Int32Array
    tree: DraftTree
    logits_from: int


def lay_out(rows: SequenceOf[BatchRow], least_score: float = 0.0) -> StepBatch:
    """The flat batch of some batch rows, at least one.

    Args:
        least_score: of each tree only the nodes with at least this score; they are a tree themselves.
    """
    laid_out = [chain_with_tree(row.chain, row.tree, least_score) for row in rows]
    sizes = [tokens.shape[0] for tokens, _, _ in laid_out]
    begins, page_begins = np.zeros((2, len(rows) + 1), np.int32)
    np.cumsum(sizes, out=begins[1:])
    np.cumsum([row.pages.shape[0] for row in rows], out=page_begins[1:])
    return StepBatch(
        tokens=_joined([tokens for tokens, _, _ in laid_out]),
        positions=_joined([depths + row.context for row, (_, _, depths) in zip(rows, laid_out, strict=True)]),
        parents=_joined([parents for _, parents, _ in laid_out]),
        begins=begins,
        contexts=np.array([row.context for row in rows], np.int32),
        pages=_joined([row.pages for row in rows]),
        page_begins=page_begins,
        logit_rows=_joined(
            [
                np.arange(begin + row.logits_from, begin + size, dtype=np.int32)
                for row, begin, size in zip(rows, begins.tolist()[:-1], sizes, strict=True)
            ]
        ),
    )


def chain_with_tree(
    chain: Int32Array, tree: DraftTree, least_score: float = 0.0
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Tokens, parents and depths, each int32[c + n], of a chain int32[c] with the n best nodes of a tree under its end.

    Args:
        least_score: nodes with a lower score are left out.
    """
    tokens, parents, depths = np.empty((3, chain.shape[0] + len(tree)), np.int32)
    size = int(_fill(chain, tree.tokens, tree.parents, tree.scores, least_score, tokens, parents, depths))
    return tokens[:size], parents[:size], depths[:size]


def _joined(parts: list[Int32Array]) -> Int32Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


@numba.njit(cache=True, nogil=True)
def _fill(
    chain: Int32Array,
    tree_tokens: Int32Array,
    tree_parents: Int32Array,
    scores: Float32Array,
    least_score: float,
    tokens: Int32Array,
    parents: Int32Array,
    depths: Int32Array,
) -> int:
    """Fills the last three; returns how much of them."""
    c = chain.shape[0]
    for i in range(c):
        tokens[i], parents[i], depths[i] = chain[i], i - 1, i
    size: int = c
    places = np.empty(scores.shape[0], np.int32)
    for node in range(scores.shape[0]):
        if scores[node] >= least_score:
            parent = c - 1 if tree_parents[node] < 0 else places[tree_parents[node]]
            tokens[size], parents[size], depths[size] = tree_tokens[node], parent, depths[parent] + 1
            places[node] = size
            size += 1
    return size
