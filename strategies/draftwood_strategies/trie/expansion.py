"""One draft of the trie strategy: retrieve candidates, let them vote (`children`), take the most probable nodes first.

At promising nodes other occurrences of the node's token join as further candidates. Knows nothing of tenants and
strategies.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Integer, Real, compiled
from draftwood_strategies.structs import copy_record
from draftwood_strategies.tree_index import offer
from draftwood_strategies.trie.arrays import (
    MOST_ROOTS,
    NODES_PER_WIDENING,
    WIDEN_BY,
    WIDEN_SCORE,
    WIDEN_TIMES,
    SequenceArrays,
    Workspace,
)
from draftwood_strategies.trie.candidates import MEMORY_SIDE, OWN_SIDE, in_memory
from draftwood_strategies.trie.children import add_children
from draftwood_strategies.trie.learned.weights import Weights, trust_of
from draftwood_strategies.trie.phrase_index import NOWHERE, ORDERS, IndexArrays
from draftwood_strategies.trie.retrieval import (
    CONTEXT,
    fetch_heads,
    fetch_occurrences,
    mark_start,
    read_context,
    resume,
    search,
)

_LEAST, _MOST_OWN, _MOST_MEMORY = 8, 64, 128
"""Candidates that each order may add to a search however many others there are, and those of a search in the own index
and in the memory. With half as many more of the latter two acceptance lengths grow by 0.2%, and a draft takes 15%
longer with a million tokens in memory; 16 in place of 8 change nothing (docs/decisions, "What the trie can do
without")."""


@compiled
def expand(
    one: SequenceArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    branch_length: int,
    novel_nodes: int,
    budget: int,
) -> int:
    """Writes a sequence's draft, and the candidates at its root; returns how many nodes it has.

    Args:
        one: the sequence, with space for `budget` nodes.
        memory: the index of its tenant.
        novel_nodes: how many novel tokens are drafted below a node at most, or the budget if that is less.
    """
    nodes, frontier, draft = workspace.nodes, workspace.frontier, one.draft
    count = _retrieve(one, memory, weights, workspace)
    for slot in range(workspace.table.shape[0]):
        workspace.table[slot] = -1
    first: Integer = 0 if count else -1
    parent = -1
    depth: Integer = 0
    score: Real = np.float32(1.0)
    widenings = min(WIDEN_TIMES, budget // NODES_PER_WIDENING)
    most_novel = min(novel_nodes, budget)
    made, end, drafted, widened = 0, 0, 0, 0
    while True:
        # Of a node that scores less than all that there is space for, no child is drafted.
        full = end == budget
        if not full or score > frontier[end - 1].score:
            if 0 < depth < branch_length and score > WIDEN_SCORE and widened < widenings:
                widened += 1
                node: Integer = parent
                for back in range(depth):
                    workspace.path[CONTEXT + depth - 1 - back] = draft.tokens[node]
                    node = draft.parents[node]
                first, count = _widen(one, memory, weights, workspace, depth, first, count)
            if (first >= 0 or depth == 0) and depth < branch_length:
                before, least = made, frontier[end - 1].score if full else np.float32(0.0)
                made = add_children(
                    one, memory, weights, workspace, first, parent, depth, score, least, most_novel, before
                )
                for new in range(before, made):
                    end = offer(frontier, drafted, end, budget - drafted, nodes[new].score, new)
        if drafted == end:
            break
        best = nodes[frontier[drafted].node]
        score = best.score
        draft.tokens[drafted] = best.token
        draft.parents[drafted] = best.parent
        draft.scores[drafted] = score
        draft.shares[drafted] = best.share
        draft.supports[drafted] = best.support
        parent, depth, first = drafted, best.depth, best.first
        drafted += 1
        if drafted == budget:
            break
    one.state[0].drafted = drafted
    return drafted


@compiled
def _retrieve(one: SequenceArrays, memory: IndexArrays, weights: Weights, workspace: Workspace) -> int:
    """Fills the workspace with the candidates at the root, chained; returns how many there are."""
    context, marked, latest = workspace.path, workspace.marked, workspace.latest
    seen, found = workspace.seen, workspace.candidates
    own, prompt, mine, n = one.own, one.state[0].prompt_end, one.memory_writer[0].owner, CONTEXT
    read_context(own, one.writer[0].at, context)
    mark_start(context, one.state[0].written, marked)
    fetch_heads(memory, marked, n)
    end = search(own, context, n, len(ORDERS), _LEAST, _MOST_OWN, NOWHERE, prompt, latest, seen, found, 0)
    fetch_occurrences(memory, marked, n, latest)
    end = search(memory, marked, n, len(ORDERS), _LEAST, _MOST_MEMORY, mine, NOWHERE, latest, seen, found, end)
    end = resume(own, context, n, one.followed[OWN_SIDE], prompt, found, end)
    end = resume(memory, marked, n, one.followed[MEMORY_SIDE], NOWHERE, found, end)
    end = min(end, MOST_ROOTS)
    for j in range(end):
        copy_record(one.roots[j], found[j])
        workspace.trust[j] = trust_of(found, j, weights.features)
        workspace.chain[j] = j + 1 if j + 1 < end else -1
    one.state[0].roots = end
    return end


@compiled
def _widen(
    one: SequenceArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    depth: Integer,
    first: Integer,
    count: int,
) -> tuple[Integer, int]:
    """Adds to a node's candidates the positions where its token, the last of the path, comes after something else.

    Returns the new first candidate and the new count of candidates.
    """
    candidates, chain, n = workspace.candidates, workspace.chain, CONTEXT + depth
    mine, prompt = one.memory_writer[0].owner, one.state[0].prompt_end
    path, latest, seen = workspace.path, workspace.latest, workspace.seen
    end = search(one.own, path, n, 1, WIDEN_BY, WIDEN_BY, NOWHERE, prompt, latest, seen, candidates, count)
    end = search(memory, path, n, 1, WIDEN_BY, WIDEN_BY, mine, NOWHERE, latest, seen, candidates, end)
    kept = count
    for found in range(count, end):
        known = False
        j = first
        while j >= 0 and not known:
            same = in_memory(candidates, j) == in_memory(candidates, found)
            known = same and candidates[j].position == candidates[found].position
            j = chain[j]
        if known:
            continue
        copy_record(candidates[kept], candidates[found])
        candidates[kept].length -= depth
        workspace.trust[kept] = trust_of(candidates, kept, weights.features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept
