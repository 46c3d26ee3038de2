"""One draft of the trie strategy: retrieve candidates, let them vote, take the most probable nodes first.

At every node each candidate that agrees with the path so far votes for the token that follows there; other occurrences
of the node's token join as further candidates. Knows nothing of tenants and strategies.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array, Int64Array, Integer, Real, compiled
from draftwood_strategies.trie.candidates import (
    KIND,
    LENGTH,
    NEAR,
    POSITION,
    SHORTER,
    SUBSTITUTED,
    complete,
    copy_candidate,
    in_memory,
    log2_bin,
    near_bin,
    recent_bin,
)
from draftwood_strategies.trie.odds import chance, packed, rival_bin
from draftwood_strategies.trie.phrase_index import NOWHERE, IndexArrays, following
from draftwood_strategies.trie.retrieval import CONTEXT, mark_start, read_context, resume, search, search_token
from draftwood_strategies.trie.weights import COUNT_BINS, Weights, length_at, trust_of, weight_of
from draftwood_strategies.trie.workspace import (
    MOST_ROOTS,
    NODES_PER_WIDENING,
    WIDEN_BY,
    WIDEN_SCORE,
    WIDEN_TIMES,
    TrieDraft,
    Workspace,
    offer,
)

_MOST_OWN, _MOST_MEMORY, _MOST_SUBSTITUTED = 48, 96, 16
"""Candidates of a search in the own index, in the memory, and with the last token replaced. Half of them change
acceptance lengths by -0.3%, twice by +0.2% (docs/decisions, "The trie's constants are flat")."""

_MOST_GAINED = 3.0
"""A node whose share times this is too little for the draft is not looked up in the odds, which changes acceptance
lengths by less than 0.05%."""

AT_END, OWNER_NUMBER, PROMPT_END, WRITTEN = range(4)
"""The state of a sequence, int64[4]: its last position in its own index, its owner number in the memory, the position
in its own index where its output begins, and how many of its last tokens the memory learns."""

_TOKEN, _PARENT, _FIRST, _DEPTH, _RECENT, _LENGTHS = range(6)
_SUPPORT = _LENGTHS
"""Columns of a node: its token, its parent in the draft, its first candidate, its depth, the bin of how recently the
sequence had its token, and three, while votes are taken, of the longest match with it in each source; then, in the
first of these, its `odds.packed`."""


@compiled
def expand(
    own: IndexArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    state: Int64Array,
    followed: Int64Array,
    branch_length: int,
    draft: TrieDraft,
) -> tuple[int, int]:
    """Writes the nodes of a draft, as many as there is space for.

    Args:
        own, memory: the indexes of the sequence and of its tenant.
        state: int64[4], see `AT_END` and the others.
        followed: int64[4], the positions that the sequence follows, see `learning.learn`.

    Returns:
        The number of nodes and the number of candidates at the root.
    """
    nodes, node_scores, tokens = workspace.nodes, workspace.scores, draft.tokens
    root_count = _retrieve(own, memory, weights, workspace, state, followed)
    for slot in range(workspace.table.shape[0]):
        workspace.table[slot] = -1
    count = root_count
    first: Integer = 0 if count else -1
    parent = -1
    depth: Integer = 0
    score: Real = np.float32(1.0)
    frontier, budget = workspace.frontier, tokens.shape[0]
    widenings = min(WIDEN_TIMES, budget // NODES_PER_WIDENING)
    made, end, drafted, widened = 0, 0, 0, 0
    while True:
        # Of a node that scores less than all that there is space for, no child is drafted.
        if end - drafted < budget - drafted or score > node_scores[frontier[end - 1], 0]:
            if 0 < depth < branch_length and score > WIDEN_SCORE and widened < widenings:
                widened += 1
                node: Integer = parent
                for back in range(depth):
                    workspace.path[CONTEXT + depth - 1 - back] = tokens[node]
                    node = draft.parents[node]
                first, count = _widen(own, memory, weights, workspace, state, followed, depth, first, count)
            if first >= 0 and depth < branch_length:
                before = made
                made = _vote(own, memory, weights, workspace, state[AT_END], first, parent, depth, made)
                least = node_scores[frontier[end - 1], 0] if end - drafted == budget - drafted else np.float32(0.0)
                last, second = _latest_two(tokens, draft.parents, workspace.path, parent, depth)
                _score(weights.odds, nodes, node_scores, depth, last, second, score, least, before, made)
                for new in range(before, made):
                    end = offer(frontier, drafted, end, budget - drafted, node_scores, new)
        if drafted == end:
            return drafted, root_count
        node = frontier[drafted]
        score = node_scores[node, 0]
        tokens[drafted] = nodes[node, _TOKEN]
        draft.parents[drafted] = nodes[node, _PARENT]
        draft.scores[drafted] = score
        draft.shares[drafted] = node_scores[node, 1]
        draft.supports[drafted] = nodes[node, _SUPPORT]
        parent, depth, first = drafted, nodes[node, _DEPTH], nodes[node, _FIRST]
        drafted += 1
        if drafted == budget:
            return drafted, root_count


@compiled
def _latest_two(
    tokens: Int32Array, parents: Int32Array, path: Int32Array, parent: int, depth: Integer
) -> tuple[Integer, Integer]:
    """The token of a drafted node and the one before it; at depth 0, where `parent` is -1, the last two of the text."""
    if depth == 0:
        return path[CONTEXT - 1], path[CONTEXT - 2]
    grandparent: Integer = parents[parent]
    return tokens[parent], tokens[grandparent] if depth > 1 else path[CONTEXT - 1]


@compiled
def _retrieve(
    own: IndexArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    state: Int64Array,
    followed: Int64Array,
) -> int:
    """Fills the workspace with the candidates at the root, chained; returns how many there are."""
    context, marked, seen, found = workspace.path, workspace.marked, workspace.seen, workspace.candidates
    read_context(own, state[AT_END], context)
    mark_start(context, state[WRITTEN], marked)
    mine, prompt, n = state[OWNER_NUMBER], state[PROMPT_END], CONTEXT
    end = search(own, context, n, 0, NOWHERE, prompt, _MOST_OWN, seen, found, 0)
    end = search(memory, marked, n, 0, mine, NOWHERE, _MOST_MEMORY, seen, found, end)
    for replaced in range(1, 3):
        end = search(own, context, n, replaced, NOWHERE, prompt, _MOST_SUBSTITUTED, seen, found, end)
        end = search(memory, marked, n, replaced, mine, NOWHERE, _MOST_SUBSTITUTED, seen, found, end)
    end = resume(own, context, n, followed[0], prompt, found, end)
    end = resume(memory, marked, n, followed[1], NOWHERE, found, end)
    end = min(end, MOST_ROOTS)
    complete(found, end, followed)
    for j in range(end):
        copy_candidate(found, j, workspace.roots, j)
        workspace.trust[j] = trust_of(found, j, weights.features)
        workspace.chain[j] = j + 1 if j + 1 < end else -1
    return end


@compiled
def _vote(
    own: IndexArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    own_at: Integer,
    first: Integer,
    parent: int,
    depth: Integer,
    made: int,
) -> int:
    """Moves the candidates from `first` on by one token and groups them into nodes from `made` on.

    Returns how many nodes are made then; their chains are disjoint parts of the one from `first`.
    """
    candidates, nodes, scores = workspace.candidates, workspace.nodes, workspace.scores
    begin = made
    total: Real = np.float32(0.0)
    longest: Integer = 0
    votes = 0
    j: Integer = first
    while j >= 0:
        rest = workspace.chain[j]
        index = memory if in_memory(candidates, j) else own
        at = following(index, candidates[j, POSITION])
        if at >= 0 and index.log[at] >= 0:
            candidates[j, POSITION] = at
            node, made = _node_for(own, workspace, own_at, index.log[at], parent, depth, begin, made)
            if node >= 0:
                weight = weight_of(candidates, j, workspace.trust[j], depth, nodes[node, _RECENT], weights.features)
                length = length_at(candidates, j, depth)
                longest = max(longest, length)
                kind = candidates[j, KIND]
                if kind < SUBSTITUTED and nodes[node, _LENGTHS + kind] <= length:
                    nodes[node, _LENGTHS + kind] = length + 1
                votes += 1
                total += weight
                scores[node, 1] += weight
                workspace.chain[j] = nodes[node, _FIRST]
                nodes[node, _FIRST] = j
        j = rest
    total += weights.escapes[longest, log2_bin(votes, COUNT_BINS)]
    for node in range(begin, made):
        scores[node, 1] /= total
    return made


@compiled
def _score(
    odds: Float32Array,
    nodes: Int32Array,
    scores: Float32Array,
    depth: Integer,
    last: Integer,
    before: Integer,
    score: Real,
    least: Real,
    begin: int,
    end: int,
) -> None:
    """Sets the scores of the nodes from `begin` to `end` from their shares of the votes.

    Args:
        nodes, scores: see `Workspace`.
        depth, last, before, score: of their parent: its depth, its token, the one before it and its score.
        least: nodes that will hardly score above it have their share for their probability.
    """
    best, first, second = -1, np.float32(0.0), np.float32(0.0)
    for node in range(begin, end):
        share = scores[node, 1]
        if share > first:
            best, first, second = node, share, first
        elif share > second:
            second = share
    total: Real = np.float32(0.0)
    for node in range(begin, end):
        share = scores[node, 1]
        if score * share * _MOST_GAINED < least:
            scores[node, 0] = share
            total += share
            continue
        rival = rival_bin(share, second if node == best else first)
        lengths = nodes[node, _LENGTHS], nodes[node, _LENGTHS + 1], nodes[node, _LENGTHS + 2]
        support = packed(lengths[0], lengths[1], lengths[2], rival)
        nodes[node, _SUPPORT] = support
        rate = chance(odds, share, support, depth, nodes[node, _TOKEN], last, before)
        scores[node, 0] = rate
        total += rate
    factor = score / max(total, np.float32(1.0))
    for node in range(begin, end):
        scores[node, 0] *= factor


@compiled
def _node_for(
    own: IndexArrays,
    workspace: Workspace,
    own_at: Integer,
    token: Integer,
    parent: int,
    depth: Integer,
    begin: int,
    made: int,
) -> tuple[Integer, int]:
    """The node of `token` among those from `begin` on, made where there is none; -1 where the workspace is full.

    The hash table has nodes of other parents as well: they are below `begin`.
    """
    nodes, table = workspace.nodes, workspace.table
    slot = (np.int64(token) * 0x9E3779B1 >> 8) & (table.shape[0] - 1)
    while table[slot] >= begin and nodes[table[slot], _TOKEN] != token:
        slot = (slot + 1) & (table.shape[0] - 1)
    if table[slot] >= begin:
        return table[slot], made
    if made == nodes.shape[0]:
        return -1, made
    table[slot] = made
    nodes[made, _TOKEN] = token
    nodes[made, _PARENT] = parent
    nodes[made, _FIRST] = -1
    nodes[made, _DEPTH] = depth + 1
    nodes[made, _RECENT] = recent_bin(own, own_at, token)
    for source in range(SUBSTITUTED):
        nodes[made, _LENGTHS + source] = 0
    workspace.scores[made, 1] = 0.0
    return made, made + 1


@compiled
def _widen(
    own: IndexArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    state: Int64Array,
    followed: Int64Array,
    depth: Integer,
    first: Integer,
    count: int,
) -> tuple[Integer, int]:
    """Adds to a node's candidates the positions where its token, the last of the path, comes after something else.

    Returns the new first candidate and the new count of candidates.
    """
    candidates, chain, n = workspace.candidates, workspace.chain, CONTEXT + depth
    end = search_token(own, workspace.path, n, NOWHERE, state[PROMPT_END], WIDEN_BY, candidates, count)
    end = search_token(memory, workspace.path, n, state[OWNER_NUMBER], NOWHERE, WIDEN_BY, candidates, end)
    kept = count
    for found in range(count, end):
        remembered = in_memory(candidates, found)
        known = False
        j = first
        while j >= 0 and not known:
            known = candidates[j, POSITION] == candidates[found, POSITION] and in_memory(candidates, j) == remembered
            j = chain[j]
        if known:
            continue
        copy_candidate(candidates, found, candidates, kept)
        candidates[kept, LENGTH] -= depth
        candidates[kept, NEAR] = near_bin(candidates[kept, POSITION] - depth, followed[1 if remembered else 0])
        candidates[kept, SHORTER] = 1
        workspace.trust[kept] = trust_of(candidates, kept, weights.features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept
