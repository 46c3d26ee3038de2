"""Retrieval from phrase indexes: the places where something like the present context was written before.

A candidate is such a place, and the token that follows there is its prediction. Each carries what tells how far it
can be trusted: how many tokens before it are the same, in which source it stands, how much of what lies further back
agrees, how many newer ones there are, and whether the text was following that very place.

Knows nothing of weights and trees; see `phrase_mixing`.
"""

from __future__ import annotations

import numpy as np

from strategies.draft import Int32Array
from strategies.native import compiled
from strategies.phrase_index import BLOCK, NOWHERE, ORDERS, OWNER, PREVIOUS, START, following, mixed, preceding

AT, LENGTH, KIND, AGREEING, NEWER, NEAR, SHORTER = range(7)
"""Columns of a candidate: the position that stands for the last token of the context, how many tokens match there
(bounded by `LONGEST`), and the bins of its features."""
COLUMNS = 7
SEEN = 1024
"""Slots of the hash set of places seen in one search; at least twice as many as a search finds."""

PROMPT, OUTPUT, MEMORY = range(3)
"""Sources: the sequence's own prompt and output, and the tenant's memory."""
SUBSTITUTED = 3
"""Added to the source: the context's last token differs there, those before it match."""
KINDS = 6

LONGEST = 16
_WINDOW = 32
CONTEXT = 40
"""How much of the sequence is looked at; at least the window and a substituted token."""
UNKNOWN = -2
"""Stands in a context where there is no token; equals none."""
AGREEING_BINS = 13
NEWER_BINS = 8
NEAR_BINS = 7
SHORTER_BINS = 2

_MISSES = 16


@compiled
def log2_bin(n: int, bins: int) -> int:
    """0 for 0, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on; at most `bins` - 1."""
    b = 0
    while n > 0 and b < bins - 1:
        n >>= 1
        b += 1
    return b


@compiled
def near_bin(at: int, followed: int) -> int:
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
def equal_bits(log: Int32Array, blocks: Int32Array, at: int, context: Int32Array, n: int) -> int:
    """Bit i tells whether the token i before `at` is the one i before the last of `context[:n]`, for i below 32."""
    block = at // BLOCK
    bits = np.uint64(0)
    if block >= 2 and blocks[block, PREVIOUS] == block - 1 and blocks[block - 1, PREVIOUS] == block - 2:
        first, begin = np.uint64(at - _WINDOW + 1), np.uint64(n - _WINDOW)
        for i in range(_WINDOW):
            if log[first + np.uint64(i)] == context[begin + np.uint64(i)]:
                bits |= np.uint64(1 << (_WINDOW - 1 - i))
        return bits
    for i in range(_WINDOW):
        if log[at] == context[n - 1 - i]:
            bits |= np.uint64(1 << i)
        at = preceding(blocks, at)
        if at < 0:
            break
    return bits


@compiled
def measure(bits: int) -> tuple[int, int]:
    """How many tokens match without a break, at most `LONGEST`, and the bin of how many agree behind the break."""
    length = 0
    while length < LONGEST and bits & np.uint64(1):
        bits >>= np.uint64(1)
        length += 1
    if length == LONGEST:
        return length, 0
    return length, min(_ones(bits >> np.uint64(1) & np.uint64(0xFFFF)), AGREEING_BINS - 1)


@compiled
def _ones(bits: int) -> int:
    """How many of 16 bits are set."""
    bits -= bits >> np.uint64(1) & np.uint64(0x5555)
    bits = (bits & np.uint64(0x3333)) + (bits >> np.uint64(2) & np.uint64(0x3333))
    bits = (bits + (bits >> np.uint64(4))) & np.uint64(0x0F0F)
    return np.int64((bits + (bits >> np.uint64(8))) & np.uint64(0x1F))


@compiled
def first_time(seen: Int32Array, at: int) -> bool:
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
    log: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    blocks: Int32Array,
    context: Int32Array,
    n: int,
    substituted: bool,
    own: int,
    prompt: int,
    most: tuple[int, int, int, int],
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
    phrase = n - 1 if substituted else n
    for slot in range(SEEN):
        seen[slot] = NOWHERE
    mask = heads.shape[1] - 1
    for order in range(len(ORDERS) - 1, 0 if substituted else -1, -1):
        key = np.int64(0)
        for back in range(ORDERS[order]):
            key = mixed(key, context[phrase - 1 - back])
        if context[phrase - ORDERS[order]] == UNKNOWN:
            continue
        at = heads[order, key & mask]
        misses = 0
        found = 0
        for _ in range(2 * most[order]):
            if at < 0 or found == most[order] or misses > _MISSES or count == candidates.shape[0]:
                break
            place = at
            at = links[place, order]
            if blocks[place // BLOCK, OWNER] == own:
                continue
            ends = place
            if substituted:
                ends = following(blocks, place)
                if ends < 0 or log[ends] < 0 or log[ends] == context[n - 1]:
                    continue
            length, agreeing = measure(equal_bits(log, blocks, place, context, phrase))
            if length < ORDERS[order]:
                misses += 1
                continue
            if not first_time(seen, place):
                continue
            source = MEMORY if prompt < 0 else (PROMPT if ends < prompt else OUTPUT)
            candidates[count, AT] = ends
            candidates[count, LENGTH] = length
            candidates[count, KIND] = source + (SUBSTITUTED if substituted else 0)
            candidates[count, AGREEING] = agreeing
            candidates[count, NEWER] = log2_bin(found, NEWER_BINS)
            count += 1
            found += 1
    return count


@compiled
def search_token(
    log: Int32Array,
    links: Int32Array,
    heads: Int32Array,
    blocks: Int32Array,
    context: Int32Array,
    n: int,
    own: int,
    prompt: int,
    most: int,
    candidates: Int32Array,
    count: int,
) -> int:
    """Like `search`, for the last token alone and at most `most` steps: cheap enough for every node of a draft."""
    at = heads[0, mixed(np.int64(0), context[n - 1]) & (heads.shape[1] - 1)]
    found = 0
    for _ in range(2 * most):
        if at < 0 or found == most or count == candidates.shape[0]:
            break
        place = at
        at = links[place, 0]
        if blocks[place // BLOCK, OWNER] == own:
            continue
        length, agreeing = measure(equal_bits(log, blocks, place, context, n))
        if length == 0:
            continue
        candidates[count, AT] = place
        candidates[count, LENGTH] = length
        candidates[count, KIND] = MEMORY if prompt < 0 else (PROMPT if place < prompt else OUTPUT)
        candidates[count, AGREEING] = agreeing
        candidates[count, NEWER] = log2_bin(found, NEWER_BINS)
        count += 1
        found += 1
    return count


@compiled
def resume(
    log: Int32Array,
    blocks: Int32Array,
    context: Int32Array,
    n: int,
    followed: int,
    prompt: int,
    candidates: Int32Array,
    count: int,
) -> int:
    """Adds the place that the sequence was following, if its last token is another one there: the text may have put
    in one word for another and go on as before (the recovery of match models in lossless compressors)."""
    if followed < 0 or count == candidates.shape[0] or log[followed] < 0 or log[followed] == context[n - 1]:
        return count
    _, agreeing = measure(equal_bits(log, blocks, followed, context, n))
    candidates[count, AT] = followed
    candidates[count, LENGTH] = 0
    candidates[count, KIND] = MEMORY if prompt < 0 else (PROMPT if followed < prompt else OUTPUT)
    candidates[count, AGREEING] = agreeing
    candidates[count, NEWER] = 0
    return count + 1


@compiled
def read_context(log: Int32Array, blocks: Int32Array, at: int, context: Int32Array) -> None:
    """Copies the tokens up to `at` into `context[:CONTEXT]`, at its end; the rest is `UNKNOWN`."""
    for i in range(CONTEXT - 1, -1, -1):
        context[i] = log[at] if at >= 0 else UNKNOWN
        if at >= 0:
            at = preceding(blocks, at)


@compiled
def mark_start(context: Int32Array, written: int, marked: Int32Array) -> None:
    """Copies `context[:CONTEXT]` into `marked` as the memory knows it: a start mark stands before the last `written`
    tokens, the only ones that it learns of the sequence, and nothing before that."""
    for i in range(CONTEXT):
        back = CONTEXT - 1 - i
        marked[i] = context[i] if back < written else (START if back == written else UNKNOWN)
