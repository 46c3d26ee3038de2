"""Nodes that the sources leave unused, filled with the model's most probable tokens in the latest step.

While a tenant's successor table is nearly empty, most contexts have no row and a draft has fewer nodes than the budget.
Text often repeats what the model held probable shortly before, so these tokens are drafted below every node with
unknown children. They are the successor table's part of the draft: verified nodes get rows, accepted or not, so
that filling also makes the table grow faster. LogitSpec and RACER draft from the last logits in the same situation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.mixing.weights import TABLE
from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.tree_index import NO_NODE

_MOST_TOKENS = 64
"""How many different tokens of the latest step are ranked; those after the first 16 add 0.05 to the
probability that one of them is accepted."""

_BEST_CHANCE = 0.07
"""The probability that the best ranked token comes next where nothing else is known; that of rank i is 1/(i + 1) of it.
Counted on 103 steps with empty drafts: one of the first 4, 8, 16 and 63 tokens came in 15, 22, 25 and 30% of
them, these constants give 15, 19, 24 and 33% (docs/decisions, "Unused nodes")."""


class FillWorkspace(NamedTuple):
    """Scratch arrays of `fill` for drafts of up to b nodes.

    Attributes:
        tokens, votes: int32[t] and float32[t], the tokens of the latest step, the best first.
        left: float32[b + 1], for the root and each node, the probability that it is accepted and none of its children.
        ranks: int32[b + 1], for the root and each node, the rank of the token that is drafted next below it.
    """

    tokens: Int32Array
    votes: Float32Array
    left: Float32Array
    ranks: Int32Array


def fill_workspace_for(budget: int) -> FillWorkspace:
    """A workspace for drafts of at most `budget` nodes."""
    return FillWorkspace(
        tokens=np.empty(_MOST_TOKENS, np.int32),
        votes=np.empty(_MOST_TOKENS, np.float32),
        left=np.empty(budget + 1, np.float32),
        ranks=np.empty(budget + 1, np.int32),
    )


@compiled
def fill(top_tokens: Int32Array, draft: MixedDraft, size: int, budget: Integer, workspace: FillWorkspace) -> int:
    """Adds nodes to a draft of `size` nodes, the most probable first, until it has `budget`.

    Args:
        top_tokens: int32[m, k], as in `Feedback`, of the latest step.

    Returns:
        The new size.
    """
    left, ranks = workspace.left, workspace.ranks
    known = _rank_tokens(top_tokens, workspace.tokens, workspace.votes)
    _set_left(draft, size, left)
    for node in range(size + 1):
        ranks[node] = 0
    while size < budget:
        parent, score = _best_parent(left, ranks, size, known)
        if score <= 0.0:
            return size
        token = workspace.tokens[ranks[parent + 1]]
        ranks[parent + 1] += 1
        if _has_child(draft, size, parent, token):
            continue
        draft.tokens[size] = token
        draft.parents[size] = parent
        draft.scores[size] = score
        draft.sources[size] = TABLE
        size += 1
        left[size] = score
        ranks[size] = 0
    return size


@compiled
def _rank_tokens(top_tokens: Int32Array, tokens: Int32Array, votes: Float32Array) -> int:
    """Sets `tokens` to those of the latest step by their votes, 1/(rank + 1) at each node; returns how many."""
    known = 0
    for rank in range(top_tokens.shape[1]):
        for node in range(top_tokens.shape[0]):
            token = top_tokens[node, rank]
            at = 0
            while at < known and tokens[at] != token:
                at += 1
            if at == known:
                if known == tokens.shape[0]:
                    continue
                votes[at] = 0.0
                known += 1
            vote = votes[at] + np.float32(1.0 / (rank + 1.0))
            while at > 0 and votes[at - 1] < vote:
                tokens[at], votes[at] = tokens[at - 1], votes[at - 1]
                at -= 1
            tokens[at], votes[at] = token, vote
    return known


@compiled
def _set_left(draft: MixedDraft, size: int, left: Float32Array) -> None:
    """Sets what the scores of each node's children leave of its own."""
    left[0] = 1.0
    for node in range(size):
        left[node + 1] = draft.scores[node]
        left[draft.parents[node] + 1] -= draft.scores[node]


@compiled
def _best_parent(left: Float32Array, ranks: Int32Array, size: int, known: int) -> tuple[int, Real]:
    """The node below which the next token is most probable, and the score there; 0 where no tokens remain."""
    best = NO_NODE
    most: Real = 0.0
    for node in range(size + 1):
        if ranks[node] < known:
            score = left[node] * _BEST_CHANCE / (ranks[node] + 1.0)
            if score > most:
                best = node - 1
                most = score
    return best, most


@compiled
def _has_child(draft: MixedDraft, size: int, parent: int, token: Integer) -> bool:
    node = parent + 1
    while node < size and (draft.parents[node] != parent or draft.tokens[node] != token):
        node += 1
    return node < size
