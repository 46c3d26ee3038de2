"""Candidates: earlier occurrences of something like the present context in a phrase index.

The token that follows there is the candidate's prediction. Its columns are the features of its vote: how many tokens
before it are the same, its source, how many of those further back agree, how many newer candidates there are, and how
far it is from the occurrence that the text has been following.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.native import Int32Array, Int64Array, Integer, compiled
from draftwood_strategies.trie.phrase_index import IndexArrays, mixed

POSITION, LENGTH, KIND, AGREEING, NEWER, NEAR, SHORTER = range(7)
"""Columns of a candidate: the position that corresponds to the last token of the context, how many tokens match there
(at most `LONGEST`), and the bins of its features."""
COLUMNS = 7

PROMPT, OUTPUT, MEMORY = range(3)
"""Sources: the sequence's own prompt and output, and the tenant's memory."""
SUBSTITUTED = 3
"""Added to the source: the context's last token differs there, those before it match."""
KINDS = 6

LONGEST = 16
"""Matches are compared up to this length."""
AGREEING_BINS, NEWER_BINS, NEAR_BINS, SHORTER_BINS, RECENT_BINS = 13, 8, 7, 2, 7
"""Bins of the columns from `AGREEING` on, and of how recently the sequence had a token. Not tuned."""


@compiled
def log2_bin(n: Integer, bins: int) -> int:
    """0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on; at most `bins` - 1."""
    b = 0
    while n > 0 and b < bins - 1:
        n >>= 1
        b += 1
    return b


@compiled
def near_bin(at: Integer, followed: Integer) -> int:
    """How close a candidate is to the position that the sequence has been following; 0 where there is none."""
    if followed < 0:
        return 0
    distance = abs(at - followed)
    if distance <= 2:
        return 1 if distance == 0 else 2
    if distance <= 8:
        return 3
    if distance <= 32:
        return 4
    return 5 if distance <= 128 else 6


@compiled
def recent_bin(index: IndexArrays, at: Integer, token: Integer) -> int:
    """How long ago the sequence that ends at `at` in this index had `token`: 0 for never, 1 for the last 4 tokens, 2
    for the last 16, and so on by fours."""
    found: Integer = index.heads[0, mixed(np.int64(0), token) & (index.heads.shape[1] - 1)]
    for _ in range(3):
        if found < 0 or index.log[found] == token:
            break
        found = index.links[found, 0]
    if found < 0 or index.log[found] != token:
        return 0
    age = at - found
    b = 1
    while age >= 4 and b < RECENT_BINS - 1:
        age >>= 2
        b += 1
    return b


@compiled
def source_of(at: Integer, prompt: Integer) -> int:
    """The source of position `at`, where the output begins at `prompt`; in the memory, where that is `NOWHERE`."""
    if prompt < 0:
        return MEMORY
    return PROMPT if at < prompt else OUTPUT


@compiled
def write(
    candidates: Int32Array, j: int, at: Integer, length: Integer, kind: int, agreeing: Integer, newer: int
) -> None:
    """Sets the columns of candidate j but for those that `complete` sets."""
    candidates[j, POSITION] = at
    candidates[j, LENGTH] = length
    candidates[j, KIND] = kind
    candidates[j, AGREEING] = agreeing
    candidates[j, NEWER] = log2_bin(newer, NEWER_BINS)


@compiled
def copy_candidate(source: Int32Array, i: int, target: Int32Array, j: int) -> None:
    """`target[j] = source[i]`, without the cost of array views."""
    for column in range(COLUMNS):
        target[j, column] = source[i, column]


@compiled
def complete(candidates: Int32Array, count: int, followed: Int64Array) -> None:
    """Sets the columns that depend on all candidates, or on the positions that the sequence follows in both indexes."""
    longest: Integer = 0
    for j in range(count):
        if candidates[j, KIND] < SUBSTITUTED:
            longest = max(longest, candidates[j, LENGTH])
    for j in range(count):
        candidates[j, NEAR] = near_bin(candidates[j, POSITION], followed[1 if in_memory(candidates, j) else 0])
        candidates[j, SHORTER] = 1 if candidates[j, LENGTH] < longest else 0


@compiled
def in_memory(candidates: Int32Array, j: Integer) -> bool:
    """Whether candidate j is a position in the memory, not in the sequence's own index."""
    return bool(candidates[j, KIND] % SUBSTITUTED == MEMORY)
