"""One draft of the trie strategy: retrieve, vote, take the most probable nodes first.

Knows nothing of tenants and strategies.
"""

from __future__ import annotations

import numpy as np

from strategies.draft import Float32Array, Int32Array
from strategies.native import compiled
from strategies.phrase_index import Int64Array
from strategies.phrase_mixing import (
    DEPTH,
    FIRST,
    LONGEST_HERE,
    PARENT,
    TOKEN,
    Float32Table,
    complete_features,
    copy_candidate,
    pop,
    push,
    trust_of,
    vote,
    widen,
)
from strategies.phrase_retrieval import CONTEXT, mark_start, read_context, resume, search

_MOST_OWN, _MOST_MEMORY, _MOST_SUBSTITUTED = (32, 32, 16, 16), (64, 64, 32, 16), (0, 8, 8, 8)
_WIDEN_BY, _WIDEN_SCORE, _WIDEN_TIMES = 8, 0.01, 24


@compiled
def draft(
    own_log: Int32Array,
    own_links: Int32Array,
    own_heads: Int32Array,
    own_blocks: Int32Array,
    memory_log: Int32Array,
    memory_links: Int32Array,
    memory_heads: Int32Array,
    memory_blocks: Int32Array,
    place: Int64Array,
    followed: Int64Array,
    features: Float32Table,
    escapes: Float32Table,
    calibration: Float32Table,
    candidates: Int32Array,
    trust: Float32Array,
    chain: Int32Array,
    nodes: Int32Array,
    node_scores: Float32Table,
    heap: Int32Array,
    table: Int32Array,
    seen: Int32Array,
    path: Int32Array,
    marked: Int32Array,
    roots: Int32Array,
    branch_length: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    shares: Float32Array,
    longest: Int32Array,
) -> tuple[int, int]:
    """Drafts at most `tokens.shape[0]` nodes.

    Args:
        place: int64[4], the sequence's last position in its own index, its owner number in the memory, the own
            position where its output begins, and how many of its last tokens are what the memory learns of it.
        roots: int32[r, COLUMNS], filled with the candidates at the root, for `learn`.
        tokens, parents, scores: [budget], filled with the tree.
        shares, longest: [budget], filled with what each score was calibrated from.

    Returns:
        The number of nodes and the number of candidates at the root.
    """
    read_context(own_log, own_blocks, place[0], path)
    mark_start(path, place[3], marked)
    n = CONTEXT
    own, prompt = place[1], place[2]
    for slot in range(table.shape[0]):
        table[slot] = -1
    end = 0
    for substituted in (False, True):
        most = _MOST_SUBSTITUTED if substituted else _MOST_OWN
        end = search(own_log, own_links, own_heads, own_blocks, path, n, substituted, -1, prompt, most, seen, candidates, end)
        most = _MOST_SUBSTITUTED if substituted else _MOST_MEMORY
        end = search(
            memory_log, memory_links, memory_heads, memory_blocks, marked, n, substituted, own, -1, most,
            seen, candidates, end,
        )  # fmt: skip
    end = resume(own_log, own_blocks, path, n, followed[0], prompt, candidates, end)
    end = resume(memory_log, memory_blocks, marked, n, followed[1], -1, candidates, end)
    complete_features(candidates, end, followed)
    end = min(end, roots.shape[0])
    for j in range(end):
        copy_candidate(candidates, j, roots, j)
        trust[j] = trust_of(candidates, j, features)
        chain[j] = j + 1 if j + 1 < end else -1
    root_count = end
    first = 0 if end else -1
    budget = tokens.shape[0]
    parent, depth, score, made, waiting, drafted, widened = -1, 0, np.float32(1.0), 0, 0, 0, 0
    while True:
        if depth > 0 and score > _WIDEN_SCORE and widened < _WIDEN_TIMES and depth < branch_length:
            widened += 1
            node = parent
            for back in range(depth):
                path[n + depth - 1 - back] = tokens[node]
                node = parents[node]
            first, end = widen(
                own_log, own_links, own_heads, own_blocks, memory_log, memory_links, memory_heads, memory_blocks,
                own, prompt, followed, features, candidates, trust, chain, path, n + depth, depth, _WIDEN_BY, first, end,
            )  # fmt: skip
        if first >= 0 and depth < branch_length:
            before = made
            made = vote(
                own_log, own_blocks, memory_log, memory_blocks, features, escapes, calibration, candidates, trust,
                chain, nodes, node_scores, table, first, parent, depth, score, made,
            )  # fmt: skip
            for node in range(before, made):
                push(heap, waiting, node_scores, node)
                waiting += 1
        if waiting == 0 or drafted == budget:
            return drafted, root_count
        node = pop(heap, waiting, node_scores)
        waiting -= 1
        tokens[drafted] = nodes[node, TOKEN]
        parents[drafted] = nodes[node, PARENT]
        score = node_scores[node, 0]
        scores[drafted] = score
        shares[drafted] = node_scores[node, 1]
        longest[drafted] = nodes[node, LONGEST_HERE]
        parent, depth, first = drafted, nodes[node, DEPTH], nodes[node, FIRST]
        drafted += 1
        if drafted == budget:
            return drafted, root_count
