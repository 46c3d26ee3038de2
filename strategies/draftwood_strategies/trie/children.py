"""The nodes below a node of the trie's draft: the candidates that agree with the path to it vote for the token that
follows, novel tokens get what the votes leave, and the odds make scores of the shares.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.trie.arrays import Nodes, SequenceArrays, Workspace
from draftwood_strategies.trie.candidates import in_memory, recent_bin
from draftwood_strategies.trie.learned.novel import NO_VOTES, Novel, novel_chance
from draftwood_strategies.trie.learned.odds import chance, with_match
from draftwood_strategies.trie.learned.weights import Weights, length_at, weight_of
from draftwood_strategies.trie.phrase_index import IndexArrays, following
from draftwood_strategies.trie.retrieval import CONTEXT

_MOST_GAINED = 3.0
"""A node whose share times this is too little for the draft is not looked up in the odds, which changes acceptance
lengths by less than 0.05%."""


@compiled
def add_children(
    one: SequenceArrays,
    memory: IndexArrays,
    weights: Weights,
    workspace: Workspace,
    first: Integer,
    parent: int,
    depth: Integer,
    score: Real,
    least: Real,
    most_novel: int,
    made: int,
) -> int:
    """Writes the nodes below a drafted node, or at the root, from number `made` on; returns how many are made then.

    Args:
        first: the first of its candidates, chained; -1 for none.
        parent, depth, score: its number in the draft, -1 for the root; how deep it lies, and its score.
        least: what a child must score to be drafted.
        most_novel: novel tokens, at most.
    """
    begin, own_at, draft = made, one.writer[0].at, one.draft
    made, escape = _vote(one.own, memory, weights, workspace, own_at, first, parent, depth, made)
    share = least / (max(score, np.float32(1e-30)) * _MOST_GAINED)
    made = _add_novel(one.own, weights.novel, workspace, own_at, parent, depth, begin, made, escape, share, most_novel)
    last, second = _latest_two(draft.tokens, draft.parents, workspace.path, parent, depth)
    _score(weights.odds, workspace.nodes, last, second, score, least, begin, made)
    return made


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
                node.support = with_match(node.support, candidates[j].kind, length)
                total += weight
                node.share += weight
                workspace.chain[j] = node.first
                node.first = j
        j = rest
    escape: Real = weights.escapes[longest]
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
    last: Integer,
    before: Integer,
    score: Real,
    least: Real,
    begin: int,
    end: int,
) -> None:
    """Sets the scores of the nodes from `begin` to `end` from their shares of the votes.

    Args:
        last, before, score: of their parent: its token, the one before it and its score.
        least: nodes that will hardly score above it have their share for their probability.
    """
    total: Real = np.float32(0.0)
    for number in range(begin, end):
        node = nodes[number]
        rate = node.share
        if node.support != NO_VOTES and score * rate * _MOST_GAINED >= least:
            rate = chance(odds, node.share, node.support, node.token, last, before)
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
