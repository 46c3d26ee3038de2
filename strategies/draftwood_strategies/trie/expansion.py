"""One draft of the trie strategy: retrieve candidates, let them vote, take the most probable nodes first.

At every node each candidate that agrees with the path so far votes for the token that follows there; other occurrences
of the node's token join as further candidates. Knows nothing of tenants and strategies.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.structs import copy_record
from draftwood_strategies.tree_index import offer
from draftwood_strategies.trie.arrays import (
    MOST_ROOTS,
    NODES_PER_WIDENING,
    WIDEN_BY,
    WIDEN_SCORE,
    WIDEN_TIMES,
    Nodes,
    SequenceArrays,
    Workspace,
)
from draftwood_strategies.trie.candidates import (
    MEMORY_SIDE,
    OWN_SIDE,
    SUBSTITUTED,
    complete,
    in_memory,
    log2_bin,
    near_bin,
    recent_bin,
    side_of,
)
from draftwood_strategies.trie.novel import NO_VOTES, Novel, novel_chance
from draftwood_strategies.trie.odds import chance, rival_bin, with_match, with_rival
from draftwood_strategies.trie.phrase_index import NOWHERE, IndexArrays, following
from draftwood_strategies.trie.retrieval import (
    CONTEXT,
    fetch_heads,
    fetch_occurrences,
    mark_start,
    read_context,
    resume,
    search,
    search_token,
)
from draftwood_strategies.trie.weights import COUNT_BINS, Weights, length_at, trust_of, weight_of

_MOST_OWN, _MOST_MEMORY, _MOST_SUBSTITUTED = 48, 96, 16
"""Candidates of a search in the own index, in the memory, and with the last token replaced. Half of them change
acceptance lengths by -0.3%, twice by +0.2% (docs/decisions, "The trie's constants are flat")."""

_MOST_GAINED = 3.0
"""A node whose share times this is too little for the draft is not looked up in the odds, which changes acceptance
lengths by less than 0.05%."""


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
                before, own_at = made, one.writer[0].at
                least = frontier[end - 1].score if full else np.float32(0.0)
                made, escape = _vote(one.own, memory, weights, workspace, own_at, first, parent, depth, made)
                least_share = least / (max(score, np.float32(1e-30)) * _MOST_GAINED)
                made = _add_novel(
                    one.own,
                    weights.novel,
                    workspace,
                    own_at,
                    parent,
                    depth,
                    before,
                    made,
                    escape,
                    least_share,
                    most_novel,
                )
                last, second = _latest_two(draft.tokens, draft.parents, workspace.path, parent, depth)
                _score(weights.odds, nodes, depth, last, second, score, least, before, made)
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
def _latest_two(
    tokens: Int32Array, parents: Int32Array, path: Int32Array, parent: int, depth: Integer
) -> tuple[Integer, Integer]:
    """The token of a drafted node and the one before it; at depth 0, where `parent` is -1, the last two of the text."""
    if depth == 0:
        return path[CONTEXT - 1], path[CONTEXT - 2]
    grandparent: Integer = parents[parent]
    return tokens[parent], tokens[grandparent] if depth > 1 else path[CONTEXT - 1]


@compiled
def _retrieve(one: SequenceArrays, memory: IndexArrays, weights: Weights, workspace: Workspace) -> int:
    """Fills the workspace with the candidates at the root, chained; returns how many there are."""
    context, marked, seen, found = workspace.path, workspace.marked, workspace.seen, workspace.candidates
    own, prompt, mine, n = one.own, one.state[0].prompt_end, one.memory_writer[0].owner, CONTEXT
    read_context(own, one.writer[0].at, context)
    mark_start(context, one.state[0].written, marked)
    for replaced in range(3):
        fetch_heads(memory, marked, n - replaced)
    end = search(own, context, n, 0, NOWHERE, prompt, _MOST_OWN, seen, found, 0)
    fetch_occurrences(memory, marked, n, seen)
    end = search(memory, marked, n, 0, mine, NOWHERE, _MOST_MEMORY, seen, found, end)
    for replaced in range(1, 3):
        end = search(own, context, n, replaced, NOWHERE, prompt, _MOST_SUBSTITUTED, seen, found, end)
        end = search(memory, marked, n, replaced, mine, NOWHERE, _MOST_SUBSTITUTED, seen, found, end)
    end = resume(own, context, n, one.followed[OWN_SIDE].position, prompt, found, end)
    end = resume(memory, marked, n, one.followed[MEMORY_SIDE].position, NOWHERE, found, end)
    end = min(end, MOST_ROOTS)
    complete(found, end, one.followed)
    for j in range(end):
        copy_record(one.roots[j], found[j])
        workspace.trust[j] = trust_of(found, j, weights.features)
        workspace.chain[j] = j + 1 if j + 1 < end else -1
    one.state[0].roots = end
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
) -> tuple[int, Real]:
    """Moves the candidates from `first` on by one token and groups them into nodes from `made` on.

    Returns how many nodes are made then, and the share of the votes for "something else". The nodes' chains are
    disjoint parts of the one from `first`.
    """
    candidates, nodes = workspace.candidates, workspace.nodes
    begin = made
    total: Real = np.float32(0.0)
    longest: Integer = 0
    votes = 0
    j: Integer = first
    while j >= 0:
        rest = workspace.chain[j]
        index = memory if in_memory(candidates, j) else own
        at = following(index, candidates[j].position)
        if at >= 0 and index.log[at] >= 0:
            candidates[j].position = at
            number, made = _node_for(own, workspace, own_at, index.log[at], parent, depth, begin, made)
            if number >= 0:
                node = nodes[number]
                weight = weight_of(candidates, j, workspace.trust[j], depth, node.recent, weights.features)
                length = length_at(candidates, j, depth)
                longest = max(longest, length)
                if candidates[j].kind < SUBSTITUTED:
                    node.support = with_match(node.support, candidates[j].kind, length)
                votes += 1
                total += weight
                node.share += weight
                workspace.chain[j] = node.first
                node.first = j
        j = rest
    escape: Real = weights.escapes[longest, log2_bin(votes, COUNT_BINS)]
    total += escape
    for new in range(begin, made):
        nodes[new].share /= total
    return made, escape / total


@compiled
def _add_novel(
    own: IndexArrays,
    novel: Novel,
    workspace: Workspace,
    own_at: Integer,
    parent: int,
    depth: Integer,
    begin: int,
    made: int,
    escape: Real,
    least: Real,
    most: int,
) -> int:
    """Divides the share `escape` of the votes among the novel tokens that are not among the nodes from `begin` on, at
    most `most`, as long as they get `least`; returns how many nodes are made then."""
    for rank in range(most):
        share = escape * novel_chance(novel, rank)
        if share <= 0.0 or share < least:
            break
        number, end = _node_for(own, workspace, own_at, novel[rank].token, parent, depth, begin, made)
        if end > made:
            workspace.nodes[number].share = share
            workspace.nodes[number].support = NO_VOTES
            made = end
    return made


@compiled
def _score(
    odds: Float32Array,
    nodes: Nodes,
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
        depth, last, before, score: of their parent: its depth, its token, the one before it and its score.
        least: nodes that will hardly score above it have their share for their probability.
    """
    best, first, second = -1, np.float32(0.0), np.float32(0.0)
    for number in range(begin, end):
        share = nodes[number].share
        if share > first:
            best, first, second = number, share, first
        elif share > second:
            second = share
    total: Real = np.float32(0.0)
    for number in range(begin, end):
        node = nodes[number]
        rate = node.share
        if node.support != NO_VOTES and score * rate * _MOST_GAINED >= least:
            rival = rival_bin(node.share, second if number == best else first)
            node.support = with_rival(node.support, rival)
            rate = chance(odds, node.share, node.support, depth, node.token, last, before)
        node.score = rate
        total += rate
    factor = score / max(total, np.float32(1.0))
    for number in range(begin, end):
        nodes[number].score *= factor


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
    while table[slot] >= begin and nodes[table[slot]].token != token:
        slot = (slot + 1) & (table.shape[0] - 1)
    if table[slot] >= begin:
        return table[slot], made
    if made == nodes.shape[0]:
        return -1, made
    table[slot] = made
    node = nodes[made]
    node.token = token
    node.parent = parent
    node.first = -1
    node.depth = depth + 1
    node.recent = recent_bin(own, own_at, token)
    node.support = 0
    node.share = 0.0
    return made, made + 1


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
    end = search_token(one.own, workspace.path, n, NOWHERE, prompt, WIDEN_BY, candidates, count)
    end = search_token(memory, workspace.path, n, mine, NOWHERE, WIDEN_BY, candidates, end)
    kept = count
    for found in range(count, end):
        side = side_of(candidates, found)
        known = False
        j = first
        while j >= 0 and not known:
            known = candidates[j].position == candidates[found].position and side_of(candidates, j) == side
            j = chain[j]
        if known:
            continue
        copy_record(candidates[kept], candidates[found])
        added = candidates[kept]
        added.length -= depth
        added.near = near_bin(added.position - depth, one.followed[side].position)
        added.shorter = 1
        workspace.trust[kept] = trust_of(candidates, kept, weights.features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept
