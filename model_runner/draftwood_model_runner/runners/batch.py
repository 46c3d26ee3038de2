"""Builds a `StepBatch`: the chain of tokens to compute for each sequence, with its draft tree under the end."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numba
import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.draft import DraftTree, Float32Array, Int32Array


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
    most = sum(row.chain.shape[0] + len(row.tree) for row in rows)
    tokens, positions, parents, logit_rows = np.empty((4, most), np.int32)
    begins, page_begins, filled, logits = [0], [0], 0, 0
    for row in rows:
        tree = row.tree
        taken, with_logits = _fill(
            row.chain,
            tree.tokens,
            tree.parents,
            tree.scores,
            least_score,
            row.context,
            filled,
            row.logits_from,
            tokens[filled:],
            positions[filled:],
            parents[filled:],
            logit_rows[logits:],
        )
        filled, logits = filled + taken, logits + with_logits
        begins.append(filled)
        page_begins.append(page_begins[-1] + row.pages.shape[0])
    return StepBatch(
        tokens=tokens[:filled],
        positions=positions[:filled],
        parents=parents[:filled],
        begins=np.array(begins, np.int32),
        contexts=np.array([row.context for row in rows], np.int32),
        pages=rows[0].pages if len(rows) == 1 else np.concatenate([row.pages for row in rows]),
        page_begins=np.array(page_begins, np.int32),
        logit_rows=logit_rows[:logits],
    )


@numba.njit(cache=True, nogil=True)
def _fill(
    chain: Int32Array,
    tree_tokens: Int32Array,
    tree_parents: Int32Array,
    scores: Float32Array,
    least_score: float,
    context: int,
    begin: int,
    logits_from: int,
    tokens: Int32Array,
    positions: Int32Array,
    parents: Int32Array,
    logit_rows: Int32Array,
) -> tuple[int, int]:
    """Fills the last four with the chain and the nodes of the tree that score enough; returns how much of them.

    Args:
        begin: the tokens of the step before those of this row.
    """
    c = chain.shape[0]
    for i in range(c):
        tokens[i], positions[i], parents[i] = chain[i], context + i, i - 1
    size: int = c
    places = np.empty(scores.shape[0], np.int32)
    for node in range(scores.shape[0]):
        if scores[node] >= least_score:
            parent = c - 1 if tree_parents[node] < 0 else places[tree_parents[node]]
            tokens[size], positions[size], parents[size] = tree_tokens[node], positions[parent] + 1, parent
            places[node] = size
            size += 1
    for i in range(logits_from, size):
        logit_rows[i - logits_from] = begin + i
    return size, max(size - logits_from, 0)
