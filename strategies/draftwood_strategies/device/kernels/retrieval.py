"""Retrieval of candidates, as `trie.retrieval` does on the host, and the scratch space of a row's draft.

All chains of occurrences are walked side by side, and all occurrences of a phrase are compared side by side.
"""

from __future__ import annotations

from itertools import accumulate

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import (
    BLOCK,
    LINKED,
    LONGEST,
    NOWHERE,
    ORDERS,
    START,
    UNKNOWN,
    as_float,
    head_at,
    links_at,
    log2_bin,
    mixed,
    next_at,
    ones,
)
from draftwood_strategies.trie import arrays, expansion, phrase_index, retrieval

LONGEST_PHRASE: tl.constexpr = tl.constexpr(phrase_index.ORDERS[-1])
OUTPUT: tl.constexpr = tl.constexpr(retrieval.OUTPUT)
MEMORY: tl.constexpr = tl.constexpr(retrieval.MEMORY)
COMPARED: tl.constexpr = tl.constexpr(retrieval.CONTEXT)
AGREEING: tl.constexpr = tl.constexpr(retrieval.AGREEING_BINS - 1)
NEWER_BINS: tl.constexpr = tl.constexpr(retrieval.NEWER_BINS)
MISSES: tl.constexpr = tl.constexpr(retrieval._MISSES)
FLOOR: tl.constexpr = tl.constexpr(expansion._LEAST)
MOST_OWN: tl.constexpr = tl.constexpr(arrays.MOST_OWN)
MOST_MEMORY: tl.constexpr = tl.constexpr(arrays.MOST_MEMORY)
WIDEN_BY: tl.constexpr = tl.constexpr(arrays.WIDEN_BY)
WIDEN_SCORE: tl.constexpr = tl.constexpr(arrays.WIDEN_SCORE)
LANES: tl.constexpr = tl.constexpr(numbers.CANDIDATES)
NODES: tl.constexpr = tl.constexpr(numbers.MOST_NODES)
DEEPEST: tl.constexpr = tl.constexpr(numbers.DEEPEST)
CONTEXT: tl.constexpr = tl.constexpr(numbers.CONTEXT)
_STEPS, _GROUPS = 128, 8
STEPS: tl.constexpr = tl.constexpr(_STEPS)
"""Occurrences of a phrase that a search looks at, at most."""
CHAIN: tl.constexpr = tl.constexpr(1 + _STEPS)
GROUPS: tl.constexpr = tl.constexpr(_GROUPS)
"""Searches side by side: those of both indexes for each of `GROUPS / 2` nodes of a level, or of both for each order."""
CHUNK: tl.constexpr = tl.constexpr(16)
"""Lanes that all lanes are compared with at a time."""
RESUMED_LANE: tl.constexpr = tl.constexpr(arrays.MOST_OWN + arrays.MOST_MEMORY)

# Parts of the row's scratch space, and where they begin.
_SIZES = (
    2 * numbers.CONTEXT,
    4 * numbers.CONTEXT,
    _GROUPS * (1 + _STEPS),
    *9 * (numbers.CANDIDATES,),
    *6 * (numbers.MOST_NODES,),
    numbers.MOST_NODES * arrays.NOVEL_NODES,
    *6 * (numbers.POOL,),
    *2 * (numbers.MOST_NODES,),
    2 * numbers.MOST_NODES * numbers.DEEPEST,
    *5 * (numbers.MOST_NODES * numbers.DEEPEST,),
)
(
    CONTEXTS,
    NODE_CONTEXTS,
    CHAINS,
    POSITIONS,
    FEATURES,
    OF_NODES,
    KEY_NODES,
    KEY_TOKENS,
    KEY_WEIGHTS,
    KEY_LENGTHS,
    KEY_RATES,
    CHILDREN,
    BEAM_IDS,
    BEAM_TOKENS,
    BEAM_LAST,
    BEAM_SCORES,
    HAS_VOTES,
    TOTALS,
    KNOWN,
    POOL_SCORES,
    POOL_TOKENS,
    POOL_PARENTS,
    POOL_SHARES,
    POOL_SUPPORTS,
    POOL_GROUPS,
    BEST_SCORES,
    BEST_IDS,
    PATHS,
    MADE_TOKENS,
    MADE_PARENTS,
    MADE_SHARES,
    MADE_SUPPORTS,
    RANKS,
    _END,
) = (tl.constexpr(begin) for begin in accumulate(_SIZES, initial=0))
assert sum(_SIZES) <= numbers.SCRATCH


@triton.jit
def compare(arena, base, at, mask, context, BLOCKS):
    """As `retrieval.compare`, for lanes: how many tokens up to `at` are those of a context, and the bin of how many
    behind the break agree.

    Args:
        context: for each lane where its context begins in the arena, the newest token first.
    """
    within = tl.arange(0, BLOCK)[None, :]
    bits = tl.cast(at * 0, tl.int64)
    block = tl.where(mask, at // BLOCK, -1)
    newest = (at % BLOCK)[:, None]
    for piece in tl.static_range(3):
        back = newest + piece * BLOCK - within
        open = (block >= 0)[:, None] & (back >= 0) & (back < COMPARED)
        token = tl.load(arena + (base + tl.maximum(block, 0) * BLOCK)[:, None] + within, mask=open, other=NOWHERE)
        wanted = tl.load(arena + context[:, None] + tl.where(open, back, 0), mask=open, other=UNKNOWN)
        equal = tl.where(
            open & (token == wanted), tl.cast(1, tl.int64) << tl.cast(tl.where(open, back, 0), tl.int64), 0
        )
        bits += tl.sum(equal, axis=1)
        if piece < 2:
            previous = next_at(base, tl.maximum(block, 0), BLOCKS) + BLOCKS
            block = tl.load(arena + previous, mask=block >= 0, other=-1)
    missing = tl.cast((bits & 0xFFFF) ^ 0xFFFF, tl.int32) | 0x10000
    length = ones((missing & -missing) - 1)
    behind = tl.cast((bits >> tl.cast(length + 1, tl.int64)) & 0xFFFF, tl.int32)
    agreeing = tl.where(length < LONGEST, tl.minimum(ones(behind), AGREEING), 0)
    return tl.where(mask, length, 0), agreeing


@triton.jit
def read_contexts(arena, scratch, base, at, written, BLOCKS):
    """Writes the last tokens of the text into `CONTEXTS`, the newest first, and then as the memory has them, see
    `retrieval.mark_start`."""
    back = tl.arange(0, CONTEXT)
    newest = at % BLOCK
    first = tl.where(at >= 0, at // BLOCK, -1)
    second = tl.load(arena + next_at(base, tl.maximum(first, 0), BLOCKS) + BLOCKS, mask=first >= 0, other=-1)
    third = tl.load(arena + next_at(base, tl.maximum(second, 0), BLOCKS) + BLOCKS, mask=second >= 0, other=-1)
    piece = tl.where(back <= newest, 0, 1 + (back - newest - 1) // BLOCK)
    block = tl.where(piece == 0, first, tl.where(piece == 1, second, tl.where(piece == 2, third, -1)))
    within = tl.where(piece == 0, newest - back, BLOCK - 1 - (back - newest - 1) % BLOCK)
    open = (block >= 0) & (back < COMPARED) & (within >= 0)
    token = tl.load(arena + base + tl.maximum(block, 0) * BLOCK + tl.maximum(within, 0), mask=open, other=UNKNOWN)
    marked = tl.where(back < written, token, tl.where(back == written, START, UNKNOWN))
    tl.store(arena + scratch + CONTEXTS + back, token)
    tl.store(arena + scratch + CONTEXTS + CONTEXT + back, tl.where(back < COMPARED, marked, UNKNOWN))
    tl.debug_barrier()


@triton.jit
def walk(arena, scratch, base, head, order, steps, BLOCKS):
    """Writes the newest occurrences of a phrase for each of `GROUPS` lanes into `CHAINS`, as many as `steps` says."""
    group = tl.arange(0, GROUPS)
    chain = scratch + CHAINS + group * CHAIN
    linked = tl.arange(0, LINKED)[None, :]
    tl.store(arena + chain, head)
    at, done = head, 1
    while done < STEPS:
        open = (at >= 0) & (done < steps)
        link = links_at(base, tl.where(open, at, 0), order, BLOCKS)
        found = tl.load(arena + link[:, None] + linked, mask=open[:, None], other=-1)
        tl.store(arena + (chain + done)[:, None] + linked, found)
        at = tl.sum(tl.where(linked == LINKED - 1, found, 0), axis=1)
        done += LINKED
    tl.debug_barrier()


@triton.jit
def reached_of(arena, base, at, within, side, owner, blocks, CHAINS_: tl.constexpr, LENGTH: tl.constexpr):
    """Which occurrences of several chains a search comes to, for lanes: those `within` its steps, before the end of
    their chain, and in the memory, side 1, not the row's own.

    Args:
        at: int32[CHAINS_ * LENGTH].
    """
    ended = tl.cumsum(tl.reshape(tl.cast(at < 0, tl.int32), (CHAINS_, LENGTH)), axis=1)
    reached = within & (tl.reshape(ended, (CHAINS_ * LENGTH,)) == 0)
    fields = next_at(base, tl.where(reached, at // BLOCK, 0), blocks)
    writer = tl.load(arena + fields + 2 * blocks, mask=reached, other=-1)
    return reached & ((side == 0) | (writer != owner))


@triton.jit
def taken_of(reached, length, phrase, enough, CHAINS_: tl.constexpr, LENGTH: tl.constexpr):
    """Which of these become candidates, and how many newer ones of their chain do: the newest `enough` whose match has
    `phrase` tokens or more, until too many have other tokens."""
    hit = tl.cast(reached & (length >= phrase), tl.int32)
    miss = tl.cast(reached & (length < phrase), tl.int32)
    hits = tl.reshape(tl.cumsum(tl.reshape(hit, (CHAINS_, LENGTH)), axis=1), (CHAINS_ * LENGTH,)) - hit
    misses = tl.reshape(tl.cumsum(tl.reshape(miss, (CHAINS_, LENGTH)), axis=1), (CHAINS_ * LENGTH,)) - miss
    return (hit > 0) & (hits < enough) & (misses <= MISSES), hits


@triton.jit
def search_roots(
    arena,
    scratch,
    text,
    memory,
    prompt_end,
    owner,
    order,
    counts,
    TEXT_BLOCKS,
    MEMORY_BLOCKS,
):
    """Adds the occurrences of the phrases of one order to the candidates, see `retrieval.search`.

    Args:
        order: 3 to 0, the longest first.
        counts: int32[2], candidates of each index so far.

    Returns:
        The new counts.
    """
    lane = tl.arange(0, 2 * STEPS)
    side = lane // STEPS
    step = lane % STEPS
    both = tl.arange(0, 2)
    most = tl.where(both == 0, MOST_OWN, MOST_MEMORY)
    share = tl.maximum(FLOOR, tl.minimum(most - counts, most >> tl.maximum(order, 1)))
    enough = tl.where(side == 0, at_index(share, 0), at_index(share, 1))
    count = tl.where(side == 0, at_index(counts, 0), at_index(counts, 1))
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    at = tl.load(arena + scratch + CHAINS + (side * ORDERS + order) * CHAIN + step)
    reached = reached_of(arena, base, at, step < 2 * enough, side, owner, blocks, 2, STEPS)
    candidate = scratch + POSITIONS + side * MOST_OWN
    known = at < NOWHERE
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, MOST_MEMORY, CHUNK):
        earlier = tl.load(
            arena + (candidate + begin)[:, None] + chunk, mask=begin + chunk < count[:, None], other=NOWHERE
        )
        known |= tl.max(tl.cast(earlier == at[:, None], tl.int32), axis=1) > 0
    reached &= ~known
    context = scratch + CONTEXTS + side * CONTEXT
    length, agreeing = compare(arena, base, tl.maximum(at, 0), reached, context, blocks)
    taken, hits = taken_of(reached, length, tl.cast(1, tl.int32) << order, enough, 2, STEPS)
    kind = tl.where(side == 1, MEMORY, tl.where(at < prompt_end, 0, OUTPUT))
    slot = candidate + count + hits
    tl.store(arena + slot, at, mask=taken)
    tl.store(arena + slot + LANES, features(kind, length, agreeing, log2_bin(hits, NEWER_BINS)), mask=taken)
    tl.debug_barrier()
    return counts + tl.sum(tl.reshape(tl.cast(taken, tl.int32), (2, STEPS)), axis=1)


@triton.jit
def at_index(values, index):
    """One of a few lanes, as a number."""
    return tl.sum(tl.where(tl.arange(0, 2) == index, values, 0), axis=0)


@triton.jit
def features(kind, length, agreeing, newer):
    """The features of a candidate in one number: two bits of its kind, three of how many newer ones there are, four of
    how many tokens agree, and the length of the match, which may be negative."""
    return kind | (newer << 2) | (agreeing << 5) | (length << 9)


@triton.jit
def resume(
    arena,
    scratch,
    text,
    memory,
    followed,
    prompt_end,
    has_memory,
    TEXT_BLOCKS,
    MEMORY_BLOCKS,
):
    """Adds the positions that the row follows in both indexes, if its last token is another one there; see
    `retrieval.resume`.

    Args:
        followed: int32[2].
    """
    side = tl.arange(0, 2)
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    open = (followed >= 0) & (side <= has_memory)
    token = tl.load(arena + base + tl.maximum(followed, 0), mask=open, other=-1)
    context = scratch + CONTEXTS + side * CONTEXT
    open &= (token >= 0) & (token != tl.load(arena + context))
    _, agreeing = compare(arena, base, tl.maximum(followed, 0), open, context, blocks)
    kind = tl.where(side == 1, MEMORY, tl.where(followed < prompt_end, 0, OUTPUT))
    tl.store(arena + scratch + POSITIONS + RESUMED_LANE + side, tl.where(open, followed, NOWHERE))
    tl.store(arena + scratch + FEATURES + RESUMED_LANE + side, features(kind, side * 0, agreeing, side * 0))
    tl.debug_barrier()


@triton.jit
def retrieve(
    arena,
    scratch,
    text,
    memory,
    at,
    prompt_end,
    written,
    owner,
    followed,
    has_memory,
    TEXT_BLOCKS,
    TEXT_BUCKETS,
    MEMORY_BLOCKS,
    MEMORY_BUCKETS,
):
    """Writes the candidates at the root into `POSITIONS` and `FEATURES`: first those in the text, at most `MOST_OWN`,
    then those in the memory, at most `MOST_MEMORY`, and the resumed ones; positions are `NOWHERE` between them."""
    lane = tl.arange(0, LANES)
    tl.store(arena + scratch + POSITIONS + lane, lane * 0 - 1)
    read_contexts(arena, scratch, text, at, written, TEXT_BLOCKS)
    group = tl.arange(0, GROUPS)
    side = group // ORDERS
    order = group % ORDERS
    key = tl.cast(group * 0, tl.uint64)
    context = scratch + CONTEXTS + side * CONTEXT
    for back in tl.static_range(LONGEST_PHRASE):
        longer = mixed(key, tl.load(arena + context + back))
        key = tl.where(back < (1 << order), longer, key)
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    buckets = tl.where(side == 0, TEXT_BUCKETS, MEMORY_BUCKETS)
    known = (tl.load(arena + (context + (1 << order) - 1)) != UNKNOWN) & (side <= has_memory)
    head = tl.load(arena + head_at(base, key, order, blocks, buckets), mask=known, other=-1)
    most = tl.where(side == 0, MOST_OWN, MOST_MEMORY)
    steps = 2 * tl.maximum(FLOOR, most >> tl.maximum(order, 1))
    walk(arena, scratch, base, head, order, steps, blocks)
    counts = tl.arange(0, 2) * 0
    for shorter in range(0, ORDERS):
        counts = search_roots(
            arena,
            scratch,
            text,
            memory,
            prompt_end,
            owner,
            ORDERS - 1 - shorter,
            counts,
            TEXT_BLOCKS,
            MEMORY_BLOCKS,
        )
    resume(
        arena,
        scratch,
        text,
        memory,
        followed,
        prompt_end,
        has_memory,
        TEXT_BLOCKS,
        MEMORY_BLOCKS,
    )


@triton.jit
def widen(
    arena,
    scratch,
    text,
    memory,
    prompt_end,
    owner,
    has_memory,
    paths,
    depth,
    quota,
    first_lane,
    beam,
    TEXT_BLOCKS,
    TEXT_BUCKETS,
    MEMORY_BLOCKS,
    MEMORY_BUCKETS,
):
    """Adds to the candidates of the best nodes of a level the occurrences of their tokens after something else.

    Args:
        paths: where the tokens on the way to the nodes are, int32[NODES, DEEPEST].
        depth: of the nodes.
        quota: how many nodes, at most GROUPS / 2.
        first_lane: where their candidates go: `2 * WIDEN_BY` for each.
        beam: how many nodes the level has.
    """
    back = tl.arange(0, CONTEXT)[None, :]
    nodes = tl.arange(0, 4)[:, None]
    on_path = back < depth
    newer = tl.load(arena + paths + nodes * DEEPEST + tl.where(on_path, depth - 1 - back, 0))
    older = tl.load(arena + scratch + CONTEXTS + tl.where(on_path, 0, back - depth) + nodes * 0)
    context = tl.where(back < COMPARED, tl.where(on_path, newer, older), UNKNOWN)
    tl.store(arena + scratch + NODE_CONTEXTS + nodes * CONTEXT + back, context)
    tl.debug_barrier()
    group = tl.arange(0, GROUPS)
    score = as_float(tl.load(arena + scratch + BEAM_SCORES + group // 2))
    asked = (group // 2 < quota) & (group // 2 < beam) & (score > WIDEN_SCORE) & (group % 2 <= has_memory)
    token = tl.load(arena + scratch + NODE_CONTEXTS + (group // 2) * CONTEXT)
    base = tl.where(group % 2 == 0, text, memory)
    blocks = tl.where(group % 2 == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    buckets = tl.where(group % 2 == 0, TEXT_BUCKETS, MEMORY_BUCKETS)
    key = mixed(tl.cast(group * 0, tl.uint64), token)
    head = tl.load(arena + head_at(base, key, 0, blocks, buckets), mask=asked, other=-1)
    walk(arena, scratch, base, head, group * 0, group * 0 + 2 * WIDEN_BY, blocks)
    lane = tl.arange(0, GROUPS * BLOCK)
    group = lane // BLOCK
    side = group % 2
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    at = tl.load(arena + scratch + CHAINS + group * CHAIN + lane % BLOCK)
    reached = reached_of(arena, base, at, lane % BLOCK < 2 * WIDEN_BY, side, owner, blocks, GROUPS, BLOCK)
    of_node = scratch + NODE_CONTEXTS + (group // 2) * CONTEXT
    length, agreeing = compare(arena, base, tl.maximum(at, 0), reached, of_node, blocks)
    taken, hits = taken_of(reached, length, 1, WIDEN_BY, GROUPS, BLOCK)
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, LANES, CHUNK):
        others = scratch + begin + chunk
        same_node = tl.load(arena + others + OF_NODES) == (group // 2)[:, None]
        same_side = ((tl.load(arena + others + FEATURES) & 3) == MEMORY) == (side == 1)[:, None]
        same = same_node & same_side & (tl.load(arena + others + POSITIONS) == at[:, None])
        taken &= tl.max(tl.cast(same, tl.int32), axis=1) == 0
    tl.debug_barrier()
    kind = tl.where(side == 1, MEMORY, tl.where(at < prompt_end, 0, OUTPUT))
    slot = scratch + first_lane + group * WIDEN_BY + hits
    tl.store(arena + slot + POSITIONS, at, mask=taken)
    tl.store(arena + slot + OF_NODES, group // 2, mask=taken)
    made = features(kind, length - depth, agreeing, log2_bin(hits, NEWER_BINS))
    tl.store(arena + slot + FEATURES, made, mask=taken)
    tl.debug_barrier()
