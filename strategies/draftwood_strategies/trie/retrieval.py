"""Retrieval of candidates: earlier occurrences of something like the present context in a phrase index.

The token that follows there is the candidate's prediction. The longest matches come first, and of these the newest.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import numpy as np

from draftwood_strategies.arrays import Int32Array, Integer
from draftwood_strategies.native import compiled, prefetch, record_dtype
from draftwood_strategies.trie.phrase_index import (
    NOWHERE,
    ORDERS,
    START,
    TOKENS_PER_BLOCK,
    WAYS,
    WAYS_BEFORE,
    IndexArrays,
    bucket_at,
    mixed,
    phrase_hash,
    preceding,
)

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
    latest: Integer = index.heads[newest]
    for way in range(newest + 1, newest + WAYS[0]):
        if latest < 0 or index.log[latest] == token:
            break
        latest = index.heads[way]
    if latest < 0 or index.log[latest] != token:
        return 0
    age = at - latest
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


_MISSES = 8
"""Occurrences with other tokens (hash collisions) after which a search stops."""
SEEN = 512
"""Slots of the hash set of positions seen in one search; at least twice as many as a search finds."""
_FETCHED = 8
"""Occurrences in each way of a phrase's bucket that are loaded ahead."""
_BEHIND = 16
"""Tokens behind the match that are compared, with gaps allowed. 8 changes acceptance lengths by less than 0.1%."""
CONTEXT = LONGEST + 1 + _BEHIND
"""Tokens at the end of the sequence that are compared: those of a match, the break and those behind it."""
UNKNOWN = -2
"""Fills a context where there is no token; equals none."""


@compiled
def compare(index: IndexArrays, at: Integer, context: Int32Array, n: Integer) -> tuple[int, int]:
    """Compares the tokens up to `at` with the end of `context[:n]`.

    Returns how many are equal without a break, at most `LONGEST`, and the bin of how many of the `_BEHIND` tokens
    behind the break agree.
    """
    log, blocks = index.log, index.blocks
    length, agreeing = 0, 0
    block = at // TOKENS_PER_BLOCK
    if block >= 2 and blocks[block].previous == block - 1 and blocks[block - 1].previous == block - 2:
        # The usual case: all of it lies in one piece. Unsigned indices need no check for negative ones.
        here, there, unit = np.uint64(at), np.uint64(n - 1), np.uint64(1)
        while length < LONGEST and log[here] == context[there]:
            length += 1
            here -= unit
            there -= unit
        if length < LONGEST:
            here -= np.uint64(_BEHIND)
            there -= np.uint64(_BEHIND)
            for i in range(_BEHIND):
                agreeing += 1 if log[here + np.uint64(i)] == context[there + np.uint64(i)] else 0
        return length, min(agreeing, AGREEING_BINS - 1)
    while length < LONGEST and at >= 0 and log[at] == context[n - 1 - length]:
        length += 1
        at = preceding(index, at)
    if length < LONGEST:
        for back in range(n - 2 - length, n - 2 - length - _BEHIND, -1):
            at = preceding(index, at) if at >= 0 else at
            if at < 0:
                break
            agreeing += 1 if log[at] == context[back] else 0
    return length, min(agreeing, AGREEING_BINS - 1)


@compiled
def fetch(index: IndexArrays, at: Integer) -> None:
    """Begins to load what is read of the position next in a search: half of a draft's time was spent waiting for it."""
    prefetch(index.links, at * len(ORDERS))
    prefetch(index.log, at)
    prefetch(index.log, at - _BEHIND)
    prefetch(index.blocks, at // TOKENS_PER_BLOCK)


@compiled
def fetch_heads(index: IndexArrays, context: Int32Array, n: Integer) -> None:
    """Begins to load where a search for the end of `context[:n]` begins, for the phrases of each order."""
    for order in range(len(ORDERS)):
        prefetch(index.heads, bucket_at(index, phrase_hash(context, n, ORDERS[order]), order))


@compiled
def fetch_occurrences(index: IndexArrays, context: Int32Array, n: Integer, latest: Int32Array) -> None:
    """Begins to load the newest occurrences of the end of `context[:n]`: those of all phrases side by side, as each one
    says where the next one is. The heads are loaded.

    Args:
        latest: int32[WAYS_BEFORE[-1]], workspace.
    """
    for order in range(len(ORDERS)):
        newest = bucket_at(index, phrase_hash(context, n, ORDERS[order]), order)
        for way in range(WAYS[order]):
            slot = WAYS_BEFORE[order] + way
            latest[slot] = index.heads[newest + way]
            if latest[slot] >= 0:
                fetch(index, latest[slot])
    for _ in range(_FETCHED):
        for order in range(len(ORDERS)):
            for way in range(WAYS_BEFORE[order], WAYS_BEFORE[order + 1]):
                at = latest[way]
                if at >= 0:
                    at = index.links[at, order]
                    latest[way] = at
                    if at >= 0:
                        fetch(index, at)


@compiled
def free_slot(seen: Int32Array, at: Integer) -> Integer:
    """Where `at` is to be put into the hash set `seen`; -1 if it is there, or if the set is full."""
    slot: Integer = (at * 0x9E3779B1 >> 12) & (SEEN - 1)
    for _ in range(SEEN // 2):
        if seen[slot] == NOWHERE:
            return slot
        if seen[slot] == at:
            return -1
        slot = (slot + 1) & (SEEN - 1)
    return -1


@compiled
def search(
    index: IndexArrays,
    context: Int32Array,
    n: Integer,
    orders: int,
    floor: int,
    limit: int,
    owner: Integer,
    prompt: Integer,
    latest: Int32Array,
    seen: Int32Array,
    candidates: Candidates,
    count: int,
) -> int:
    """Looks up the last tokens of `context[:n]`, and adds each earlier occurrence as a candidate.

    The longest phrase is looked up first, then the shorter ones. The occurrences of a phrase come newest first. A
    position is added once, by the longest phrase that finds it. What the hash table returns is compared with the
    context, and left out if its tokens are other ones.

    An order adds no more than longer phrases have left of `limit`, and no more than its share: a half for one or two
    tokens, a quarter for four, an eighth for eight. But each order may always add `floor`.

    Args:
        context: int32[CONTEXT or more]; the phrases end with its token n - 1.
        orders: how many of `ORDERS` are looked up, the shortest ones.
        floor: candidates that each order may add in any case.
        limit: candidates of all orders together, but for those.
        owner: the number of the sequence that is drafted for. Its blocks are left out, since it is in the memory too;
            `NOWHERE` in the sequence's own index, where all blocks are its own.
        prompt: in the sequence's own index, the position where its output begins; `NOWHERE` in the memory.
        latest: int32[max(WAYS)], workspace: the next occurrence in each way of a bucket.
        seen: int32[SEEN], workspace: the positions that were added.
        candidates: CANDIDATE[m]. The first `count` are taken.

    Returns:
        How many candidates are taken now.
    """
    for slot in range(SEEN):
        seen[slot] = NOWHERE
    before = count
    for order in range(orders - 1, -1, -1):
        if context[n - ORDERS[order]] == UNKNOWN:
            continue
        newest = bucket_at(index, phrase_hash(context, n, ORDERS[order]), order)
        for way in range(WAYS[order]):
            latest[way] = index.heads[newest + way]
            fetch(index, latest[way])
        misses = 0
        added = 0
        enough = max(floor, min(limit - (count - before), limit >> max(order, 1)))
        for step in range(2 * enough):
            way = step & (WAYS[order] - 1)
            position: Integer = latest[way]
            if position < 0 or added == enough or misses > _MISSES or count == candidates.shape[0]:
                break
            latest[way] = index.links[position, order]
            fetch(index, latest[way])
            if index.blocks[position // TOKENS_PER_BLOCK].owner == owner:
                continue
            empty = free_slot(seen, position)
            if empty < 0:
                continue
            length, agreeing = compare(index, position, context, n)
            if length < ORDERS[order]:
                misses += 1
                continue
            seen[empty] = position
            write(candidates, count, position, length, source_of(position, prompt), agreeing, added)
            count += 1
            added += 1
    return count


@compiled
def resume(
    index: IndexArrays,
    context: Int32Array,
    n: Integer,
    followed: Integer,
    prompt: Integer,
    candidates: Candidates,
    count: int,
) -> int:
    """Adds the position that the sequence was following, if its last token is another one there: the text may have
    replaced one word and go on as before (the recovery of match models in lossless compressors)."""
    if followed < 0 or count == candidates.shape[0]:
        return count
    if index.log[followed] < 0 or index.log[followed] == context[n - 1]:
        return count
    _, agreeing = compare(index, followed, context, n)
    write(candidates, count, followed, 0, source_of(followed, prompt), agreeing, 0)
    return count + 1


@compiled
def read_context(index: IndexArrays, at: Integer, context: Int32Array) -> None:
    """Copies the tokens up to `at` into `context[:CONTEXT]`, at its end; the rest is `UNKNOWN`."""
    for i in range(CONTEXT - 1, -1, -1):
        context[i] = index.log[at] if at >= 0 else UNKNOWN
        if at >= 0:
            at = preceding(index, at)


@compiled
def mark_start(context: Int32Array, written: Integer, marked: Int32Array) -> None:
    """Copies `context[:CONTEXT]` into `marked` as it is in the memory: a start mark before the last `written` tokens,
    the only ones of the sequence that the memory learns, and `UNKNOWN` before that."""
    for i in range(CONTEXT):
        back = CONTEXT - 1 - i
        marked[i] = context[i] if back < written else (START if back == written else UNKNOWN)
