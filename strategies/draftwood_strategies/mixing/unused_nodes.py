"""Nodes that the sources leave unused, filled with the model's most probable tokens in the latest step.

While a tenant's successor table is nearly empty, most contexts have no row and a draft has fewer nodes than the budget.
Text often repeats what the model held probable shortly before, so these tokens are drafted after the text, beside what
the sources have. They are the successor table's part of the draft: verified nodes get rows, accepted or not, so that
filling also makes the table grow faster, which is most of what it gains. LogitSpec and RACER draft from the last logits
in the same situation.
"""

from __future__ import annotations

from draftwood_strategies.mixing.expansion import MixedDraft
from draftwood_strategies.mixing.weights import TABLE
from draftwood_strategies.native import Int32Array, Integer, Real, compiled
from draftwood_strategies.tree_index import NO_NODE

_BEST_CHANCE = 0.07
"""The probability that the first of these tokens comes next where nothing else is known; that of the i-th is 1/i of it.
Counted on 103 steps with empty drafts: one of the first 4, 8, 16 and 63 tokens came in 15, 22, 25 and 30% of
them, these constants give 15, 19, 24 and 33% (docs/decisions, "Unused nodes")."""


@compiled
def fill(top_tokens: Int32Array, draft: MixedDraft, size: int, budget: Integer) -> int:
    """Adds nodes at the root to a draft of `size` nodes, until it has `budget`: the best token after each node of the
    latest step, then the second best after each, and so on.

    Args:
        top_tokens: int32[m, k], as in `Feedback`, of the latest step.

    Returns:
        The new size.
    """
    left: Real = 1.0
    for node in range(size):
        if draft.parents[node] == NO_NODE:
            left -= draft.scores[node]
    added = 0
    for rank in range(top_tokens.shape[1]):
        for node in range(top_tokens.shape[0]):
            token = top_tokens[node, rank]
            if _has_root(draft, size, token):
                continue
            if size == budget:
                return size
            added += 1
            draft.tokens[size] = token
            draft.parents[size] = NO_NODE
            draft.scores[size] = max(left, 0.0) * _BEST_CHANCE / added
            draft.sources[size] = TABLE
            size += 1
    return size


@compiled
def _has_root(draft: MixedDraft, size: int, token: Integer) -> bool:
    node = 0
    while node < size and (draft.parents[node] != NO_NODE or draft.tokens[node] != token):
        node += 1
    return node < size
