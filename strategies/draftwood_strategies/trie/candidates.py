"""Candidates: earlier occurrences of something like the present context in a phrase index.

The token that follows there is the candidate's prediction.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.native import Integer, compiled
from draftwood_strategies.structs import record_dtype
from draftwood_strategies.trie.phrase_index import WAYS, IndexArrays, bucket_at, mixed

CANDIDATE = record_dtype(position=np.int32, length=np.int16, kind=np.int8, agreeing=np.int8, newer=np.int8)
"""The position that corresponds to the last token of the context, and the features of the candidate's vote: how many
tokens up to there are those of the context (at most `LONGEST`), its kind, and the bins of how many tokens further back
agree and how many newer candidates there are."""
Candidates: TypeAlias = Annotated[Any, CANDIDATE]

PROMPT, OUTPUT, MEMORY = range(3)
"""Kinds, by the source: the sequence's own prompt and output, and the tenant's memory."""
KINDS = 3

LONGEST = 16
"""Matches are compared up to this length."""
AGREEING_BINS, NEWER_BINS, RECENT_BINS = 13, 8, 7
"""Bins of the features, and of how recently the sequence had a token."""

OWN_SIDE, MEMORY_SIDE = range(2)
"""The indexes that a sequence follows a position in: its own and the memory."""


@compiled
def log2_bin(n: Integer, bins: int) -> int:
    """0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on; at most `bins` - 1."""
    b = 0
    while n > 0 and b < bins - 1:
        n >>= 1
        b += 1
    return b


@compiled
def recent_bin(index: IndexArrays, at: Integer, token: Integer) -> int:
    """How long ago the sequence that ends at `at` in this index had `token`: 0 for never, 1 for the last 4 tokens, 2
    for the last 16, and so on by fours."""
    newest = bucket_at(index, mixed(np.int64(0), token), 0)
    found: Integer = index.heads[newest]
    for way in range(newest + 1, newest + WAYS[0]):
        if found < 0 or index.log[found] == token:
            break
        found = index.heads[way]
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
    candidates: Candidates, j: int, at: Integer, length: Integer, kind: int, agreeing: Integer, newer: int
) -> None:
    """Sets the fields of candidate j."""
    candidate = candidates[j]
    candidate.position = at
    candidate.length = length
    candidate.kind = kind
    candidate.agreeing = agreeing
    candidate.newer = log2_bin(newer, NEWER_BINS)


@compiled
def in_memory(candidates: Candidates, j: Integer) -> bool:
    """Whether candidate j is a position in the memory, not in the sequence's own index."""
    return bool(candidates[j].kind == MEMORY)


@compiled
def side_of(candidates: Candidates, j: Integer) -> int:
    """The index that candidate j is a position in."""
    return MEMORY_SIDE if in_memory(candidates, j) else OWN_SIDE
