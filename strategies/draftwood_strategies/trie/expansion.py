"""The drafts of the trie strategy: candidates are retrieved and vote, and the most probable nodes are taken first.

A node's score depends on its path alone, not on the order in which nodes are taken. So a draft is the nodes that score
most, and one that is made level by level is the same.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.native import arrays_at, compiled, copy_record
from draftwood_strategies.tree_index import offer
from draftwood_strategies.trie.arrays import (
    LEAST_SCORE,
    MOST_MEMORY,
    MOST_OWN,
    MOST_ROOTS,
    NODES_PER_WIDENING,
    WIDEN_BY,
    WIDEN_SCORE,
    WIDENED,
    Drafting,
    Nodes,
    SequenceArrays,
    TrieWorkspace,
)
from draftwood_strategies.trie.phrase_index import NOWHERE, ORDERS, IndexArrays, following
from draftwood_strategies.trie.retrieval import (
    CONTEXT,
    MEMORY_SIDE,
    OWN_SIDE,
    fetch_heads,
    fetch_occurrences,
    in_memory,
    mark_start,
    read_context,
    recent_bin,
    resume,
    search,
)
from draftwood_strategies.trie.weights import (
    NO_VOTES,
    Weights,
    chance,
    length_at,
    novel_chance,
    trust_of,
    weight_of,
    with_match,
)

_LEAST = 8
"""Candidates that each order may add to a search however many others there are. 16 change nothing
(docs/decisions/trie-scores.md)."""
_MOST_GAINED = np.float32(3.0)
"""How many times its share a node's probability is at most taken to be: a node that would score less than the draft's
least score even so is not looked up in the odds, and not drafted if it is a novel token."""


@compiled
def draft_all(
    sequences: Int64Array,
    budgets: Int32Array,
    memory_address: Integer,
    workspace_address: Integer,
    branch_length: int,
    novel_nodes: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    offsets: Int32Array,
) -> None:
    """Writes a draft for each sequence.

    Args:
        sequences: int64[s], the addresses of their `SequenceArrays`, which have space for their budgets.
        budgets: int32[s], the most nodes of each draft.
        memory_address, workspace_address: of `IndexArrays` and `TrieWorkspace`.
        branch_length, novel_nodes: as in `expand`.
        tokens, parents, scores, offsets: as in `DraftTrees`, with space for all budgets.
    """
    memory, workspace = arrays_at(IndexArrays, memory_address), arrays_at(TrieWorkspace, workspace_address)
    end = 0
    for s in range(sequences.shape[0]):
        sequence = arrays_at(SequenceArrays, sequences[s])
        weights, draft = arrays_at(Weights, sequence.state[0].weights), sequence.draft
        drafting = Drafting(sequence, memory, weights, workspace)
        n = expand(drafting, branch_length, novel_nodes, budgets[s])
        for node in range(n):
            tokens[end + node], parents[end + node] = draft.tokens[node], draft.parents[node]
            scores[end + node] = draft.scores[node]
        end += n
        offsets[s + 1] = end


@compiled
def expand(drafting: Drafting, branch_length: int, novel_nodes: int, budget: int) -> int:
    """Writes a sequence's draft, which has space for `budget` nodes, and the candidates at its root; returns how many
    nodes it has. The most probable nodes come first; at the most probable ones of each depth other occurrences of the
    node's token join as further candidates.

    Args:
        novel_nodes: how many novel tokens are drafted below a node at most, or the budget if that is less.
    """
    workspace, state = drafting.workspace, drafting.sequence.state[0]
    nodes, frontier, draft = workspace.nodes, workspace.frontier, drafting.sequence.draft
    count = _retrieve(drafting)
    for slot in range(workspace.table.shape[0]):
        workspace.table[slot] = -1
    first: Integer = 0 if count else -1
    parent = -1
    depth: Integer = 0
    score: Real = np.float32(1.0)
    least = np.float32(LEAST_SCORE) / np.float32(budget)
    most_novel = min(novel_nodes, budget)
    made, end, drafted = 0, 0, 0
    allow_widenings(workspace.widenings, budget)
    while True:
        # Of a node that scores less than all that there is space for, no child is drafted.
        full = end == budget
        if not full or score > frontier[end - 1].score:
            if 0 < depth < branch_length and score > WIDEN_SCORE and _takes_widening(workspace.widenings, depth):
                node: Integer = parent
                for back in range(depth):
                    workspace.path[CONTEXT + depth - 1 - back] = draft.tokens[node]
                    node = draft.parents[node]
                first, count = _widen(drafting, depth, first, count)
            if (first >= 0 or depth == 0) and depth < branch_length:
                before = made
                made = _add_children(drafting, first, parent, depth, score, least, most_novel, before)
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
    state.drafted = drafted
    return drafted


@compiled
def _retrieve(drafting: Drafting) -> int:
    """Fills the workspace with the candidates at the root, chained; returns how many there are."""
    sequence, memory, workspace = drafting.sequence, drafting.memory, drafting.workspace
    context, marked, latest = workspace.path, workspace.marked, workspace.latest
    seen, candidates = workspace.seen, workspace.candidates
    index, prompt, mine, n = sequence.text, sequence.state[0].prompt_end, sequence.memory_writer[0].owner, CONTEXT
    read_context(index, sequence.writer[0].at, context)
    mark_start(context, sequence.state[0].written, marked)
    fetch_heads(memory, marked, n)
    end = search(index, context, n, len(ORDERS), _LEAST, MOST_OWN, NOWHERE, prompt, latest, seen, candidates, 0)
    fetch_occurrences(memory, marked, n, latest)
    end = search(memory, marked, n, len(ORDERS), _LEAST, MOST_MEMORY, mine, NOWHERE, latest, seen, candidates, end)
    end = resume(index, context, n, sequence.followed[OWN_SIDE], prompt, candidates, end)
    end = resume(memory, marked, n, sequence.followed[MEMORY_SIDE], NOWHERE, candidates, end)
    end = min(end, MOST_ROOTS)
    for j in range(end):
        copy_record(sequence.roots[j], candidates[j])
        workspace.trust[j] = trust_of(candidates, j, drafting.weights.features)
        workspace.chain[j] = j + 1 if j + 1 < end else -1
    sequence.state[0].roots = end
    return end


@compiled
def allow_widenings(widenings: Int32Array, budget: int) -> None:
    """Sets how many nodes of each depth a draft of this size widens."""
    left = budget // NODES_PER_WIDENING
    for i in range(len(WIDENED)):
        widenings[i] = min(WIDENED[i], left)
        left -= widenings[i]


@compiled
def _takes_widening(widenings: Int32Array, depth: Integer) -> bool:
    """Whether one more node of this depth is widened, which counts it."""
    if depth > len(WIDENED) or widenings[depth - 1] == 0:
        return False
    widenings[depth - 1] -= 1
    return True


@compiled
def _widen(drafting: Drafting, depth: Integer, first: Integer, count: int) -> tuple[Integer, int]:
    """Adds to a node's candidates the positions where its token, the last of the path, comes after something else.

    Returns the new first candidate and the new count of candidates.
    """
    sequence, memory, workspace = drafting.sequence, drafting.memory, drafting.workspace
    candidates, chain, n = workspace.candidates, workspace.chain, CONTEXT + depth
    mine, prompt = sequence.memory_writer[0].owner, sequence.state[0].prompt_end
    path, latest, seen = workspace.path, workspace.latest, workspace.seen
    end = search(sequence.text, path, n, 1, WIDEN_BY, WIDEN_BY, NOWHERE, prompt, latest, seen, candidates, count)
    end = search(memory, path, n, 1, WIDEN_BY, WIDEN_BY, mine, NOWHERE, latest, seen, candidates, end)
    kept = count
    for new in range(count, end):
        known = False
        j = first
        while j >= 0 and not known:
            same = in_memory(candidates, j) == in_memory(candidates, new)
            known = same and candidates[j].position == candidates[new].position
            j = chain[j]
        if known:
            continue
        copy_record(candidates[kept], candidates[new])
        candidates[kept].length -= depth
        workspace.trust[kept] = trust_of(candidates, kept, drafting.weights.features)
        chain[kept] = first
        first = kept
        kept += 1
    return first, kept


@compiled
def _add_children(
    drafting: Drafting,
    first: Integer,
    parent: int,
    depth: Integer,
    score: Real,
    least: Real,
    most_novel: int,
    made: int,
) -> int:
    """Writes the nodes below a drafted node, or at the root, from number `made` on; returns how many are made then.

    The candidates that agree with the path to it vote for the token that follows, novel tokens get what the votes
    leave, and the odds make scores of the shares.

    Args:
        first: the first of its candidates, chained; -1 for none.
        parent, depth, score: its number in the draft, -1 for the root; how deep it lies, and its score.
        least: the least score that is worth a look into the odds, or a novel token.
        most_novel: novel tokens, at most.
    """
    begin, draft, weights, workspace = made, drafting.sequence.draft, drafting.weights, drafting.workspace
    made, escape = _vote(drafting, first, parent, depth, made)
    share = least / (max(score, np.float32(1e-30)) * _MOST_GAINED)
    made = _add_novel(drafting, parent, depth, begin, made, escape, share, most_novel)
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
def _vote(drafting: Drafting, first: Integer, parent: int, depth: Integer, made: int) -> tuple[int, Real]:
    """Moves the candidates from `first` on by one token and groups them into nodes from `made` on.

    Returns how many nodes are made then, and the share of the votes for "something else". The nodes' chains are
    disjoint parts of the one from `first`.
    """
    weights, workspace = drafting.weights, drafting.workspace
    candidates, nodes = workspace.candidates, workspace.nodes
    begin = made
    total: Real = np.float32(0.0)
    longest: Integer = 0
    j: Integer = first
    while j >= 0:
        rest = workspace.chain[j]
        index = drafting.memory if in_memory(candidates, j) else drafting.sequence.text
        at = following(index, candidates[j].position)
        if at >= 0 and index.log[at] >= 0:
            candidates[j].position = at
            number, made = _node_for(drafting, index.log[at], parent, depth, begin, made)
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
    drafting: Drafting, parent: int, depth: Integer, begin: int, made: int, escape: Real, floor: Real, limit: int
) -> int:
    """Divides the share `escape` of the votes among the novel tokens that are not among the nodes from `begin` on, at
    most `limit`, as long as they get `floor`; returns how many nodes are made then."""
    novel, nodes = drafting.weights.novel, drafting.workspace.nodes
    for rank in range(limit):
        share = escape * novel_chance(novel, rank)
        if share <= 0.0 or share < floor:
            break
        number, end = _node_for(drafting, novel[rank].token, parent, depth, begin, made)
        if end > made:
            nodes[number].share = share
            nodes[number].support = NO_VOTES
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
        least: nodes that will hardly score as much have their share for their probability.
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
    drafting: Drafting, token: Integer, parent: int, depth: Integer, begin: int, made: int
) -> tuple[Integer, int]:
    """The node of `token` among those from `begin` on, made where there is none; -1 where the workspace is full.

    The hash table has nodes of other parents as well: they are below `begin`.
    """
    sequence, nodes, table = drafting.sequence, drafting.workspace.nodes, drafting.workspace.table
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
    node.recent = recent_bin(sequence.text, sequence.writer[0].at, token)
    node.support = 0
    node.share = 0.0
    return made, made + 1
