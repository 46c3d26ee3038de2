"""Retrieval from phrase indexes: the places where something like the present context was written before.

A candidate is such a place, and the token that follows there is its prediction. Each carries what tells how far it
can be trusted: how many tokens before it are the same, in which source it stands, how much of what lies further back
agrees, how many newer ones there are, and whether the text was following that very place.

Knows nothing of weights and trees; see `phrase_draft`.
"""

from __future__ import annotations

import numpy as np

from strategies.draft import Int32Array
from strategies.native import Int64Array, Integer, compiled
from strategies.trie.phrase_index import (
    BLOCK,
    NOWHERE,
    ORDERS,
    OWNER,
    PREVIOUS,
    START,
    View,
    following,
    mixed,
    phrase_hash,
    preceding,
)

AT, LENGTH, KIND, AGREEING, NEWER, NEAR, SHORTER = range(7)
"""Columns of a candidate: the position that stands for the last token of the context, how many tokens match there
(bounded by `LONGEST`), and the bins of its features."""
COLUMNS = 7
_MISSES = 8
_LEAST = 8
SEEN = 1024
"""Slots of the hash set of places seen in one search; at least twice as many as a search finds."""

PROMPT, OUTPUT, MEMORY = range(3)
"""Sources: the sequence's own prompt and output, and the tenant's memory."""
SUBSTITUTED = 3
"""Added to the source: the context's last token differs there, those before it match."""
KINDS = 6

LONGEST, _BEHIND = 16, 16
CONTEXT = 40
"""How much of the sequence is looked at; at least both of these, the break between them and two substituted tokens."""
UNKNOWN = -2
"""Stands in a context where there is no token; equals none."""
AGREEING_BINS = 13
NEWER_BINS = 8
NEAR_BINS = 7
SHORTER_BINS = 2
RECENT_BINS = 7


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
    """How close a candidate is to the place that the sequence has been following; 0 where there is none."""
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
def recent_bin(index: View, at: Integer, token: Integer) -> int:
    """How long ago the sequence that ends at `at` in this index had `token`: 0 for never, 1 for the last 4 tokens, 2
    for the last 16, and so on by fours."""
    place: Integer = index.heads[0, mixed(np.int64(0), token) & (index.heads.shape[1] - 1)]
    for _ in range(3):
        if place < 0 or index.log[place] == token:
            break
        place = index.links[place, 0]
    if place < 0 or index.log[place] != token:
        return 0
    age = at - place
    b = 1
    while age >= 4 and b < RECENT_BINS - 1:
        age >>= 2
        b += 1
    return b


@compiled
def compare(index: View, at: Integer, context: Int32Array, n: Integer) -> tuple[int, int]:
    """How many tokens up to `at` are those at the end of `context[:n]`, without a break and at most `LONGEST`, and the
    bin of how many of the `_BEHIND` tokens behind the break agree."""
    log, blocks = index.log, index.blocks
    length, agreeing = 0, 0
    block = at // BLOCK
    if block >= 2 and blocks[block, PREVIOUS] == block - 1 and blocks[block - 1, PREVIOUS] == block - 2:
        # The usual case: all of it lies in one piece. Unsigned indices need no check for negative ones.
        here, there, one = np.uint64(at), np.uint64(n - 1), np.uint64(1)
        while length < LONGEST and log[here] == context[there]:
            length += 1
            here -= one
            there -= one
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
def first_time(seen: Int32Array, at: Integer) -> bool:
    """Whether `at` is not yet in the hash set `seen`; it is afterwards."""
    slot = (at * 0x9E3779B1 >> 12) & (SEEN - 1)
    for _ in range(SEEN // 2):
        if seen[slot] == at:
            return False
        if seen[slot] == NOWHERE:
            seen[slot] = at
            return True
        slot = (slot + 1) & (SEEN - 1)
    return False


@compiled
def search(
    index: View,
    context: Int32Array,
    n: Integer,
    substituted: int,
    own: Integer,
    prompt: Integer,
    most: int,
    seen: Int32Array,
    candidates: Int32Array,
    count: int,
) -> int:
    """Adds the newest occurrences of the end of `context[:n]`, the longest first, at most `most` of each order.

    Args:
        context: int32[CONTEXT or more].
        substituted: look for what precedes the last token, followed by another token.
        own: the owner number of the sequence itself, which is left out; `NOWHERE` in its own index.
        prompt: in the sequence's own index, the position where its output begins; `NOWHERE` in the memory.
        seen: int32[SEEN], room.
        candidates: int32[m, COLUMNS], of which `count` are taken.

    Returns:
        The new count.
    """
    phrase = n - substituted
    for slot in range(SEEN):
        seen[slot] = NOWHERE
    mask = index.heads.shape[1] - 1
    before = count
    for order in range(len(ORDERS) - 1, 0 if substituted else -1, -1):
        if context[phrase - ORDERS[order]] == UNKNOWN:
            continue
        at: Integer = index.heads[order, phrase_hash(context, phrase, ORDERS[order]) & mask]
        misses = 0
        found = 0
        enough = max(_LEAST, min(most - (count - before), most >> max(order, 1)))
        for _ in range(2 * enough):
            if at < 0 or found == enough or misses > _MISSES or count == candidates.shape[0]:
                break
            place: Integer = at
            at = index.links[place, order]
            if index.blocks[place // BLOCK, OWNER] == own:
                continue
            ends: Integer = place
            if substituted > 0:
                ends = following(index, place)
                if ends < 0 or index.log[ends] == context[phrase]:
                    continue
                if substituted == 2:
                    ends = following(index, ends)
                if ends < 0 or index.log[ends] < 0:
                    continue
            length, agreeing = compare(index, place, context, phrase)
            if length < ORDERS[order]:
                misses += 1
                continue
            if not first_time(seen, place):
                continue
            kind = source_of(ends, prompt) + (SUBSTITUTED if substituted else 0)
            write(candidates, count, ends, length, kind, agreeing, found)
            count += 1
            found += 1
    return count


@compiled
def search_token(
    index: View,
    context: Int32Array,
    n: Integer,
    own: Integer,
    prompt: Integer,
    most: int,
    candidates: Int32Array,
    count: int,
) -> int:
    """Like `search`, for the last token alone and at most `most` steps: cheap enough for every node of a draft."""
    at: Integer = index.heads[0, phrase_hash(context, n, 1) & (index.heads.shape[1] - 1)]
    found = 0
    for _ in range(2 * most):
        if at < 0 or found == most or count == candidates.shape[0]:
            break
        place: Integer = at
        at = index.links[place, 0]
        if index.blocks[place // BLOCK, OWNER] == own:
            continue
        length, agreeing = compare(index, place, context, n)
        if length == 0:
            continue
        write(candidates, count, place, length, source_of(place, prompt), agreeing, found)
        count += 1
        found += 1
    return count


@compiled
def resume(
    index: View,
    context: Int32Array,
    n: Integer,
    followed: Integer,
    prompt: Integer,
    candidates: Int32Array,
    count: int,
) -> int:
    """Adds the place that the sequence was following, if its last token is another one there: the text may have put
    in one word for another and go on as before (the recovery of match models in lossless compressors)."""
    if followed < 0 or count == candidates.shape[0]:
        return count
    if index.log[followed] < 0 or index.log[followed] == context[n - 1]:
        return count
    _, agreeing = compare(index, followed, context, n)
    write(candidates, count, followed, 0, source_of(followed, prompt), agreeing, 0)
    return count + 1


@compiled
def source_of(at: Integer, prompt: Integer) -> int:
    """The source of position `at` of an index whose output begins at `prompt`; `NOWHERE` for the memory."""
    if prompt < 0:
        return MEMORY
    return PROMPT if at < prompt else OUTPUT


@compiled
def write(
    candidates: Int32Array, j: int, at: Integer, length: Integer, kind: int, agreeing: Integer, newer: int
) -> None:
    """Sets what retrieval knows of candidate j."""
    candidates[j, AT] = at
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
    """Sets what needs all candidates, or the places that the sequence follows in its own index and the memory."""
    longest: Integer = 0
    for j in range(count):
        if candidates[j, KIND] < SUBSTITUTED:
            longest = max(longest, candidates[j, LENGTH])
    for j in range(count):
        candidates[j, NEAR] = near_bin(candidates[j, AT], followed[1 if in_memory(candidates, j) else 0])
        candidates[j, SHORTER] = 1 if candidates[j, LENGTH] < longest else 0


@compiled
def in_memory(candidates: Int32Array, j: Integer) -> bool:
    """Whether candidate j stands in the memory, not in the sequence's own index."""
    return bool(candidates[j, KIND] % SUBSTITUTED == MEMORY)


@compiled
def read_context(index: View, at: Integer, context: Int32Array) -> None:
    """Copies the tokens up to `at` into `context[:CONTEXT]`, at its end; the rest is `UNKNOWN`."""
    for i in range(CONTEXT - 1, -1, -1):
        context[i] = index.log[at] if at >= 0 else UNKNOWN
        if at >= 0:
            at = preceding(index, at)


@compiled
def mark_start(context: Int32Array, written: Integer, marked: Int32Array) -> None:
    """Copies `context[:CONTEXT]` into `marked` as the memory knows it: a start mark stands before the last `written`
    tokens, the only ones that it learns of the sequence, and nothing before that."""
    for i in range(CONTEXT):
        back = CONTEXT - 1 - i
        marked[i] = context[i] if back < written else (START if back == written else UNKNOWN)
