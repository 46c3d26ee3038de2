"""Drafts for all rows of a step: one program a row.

It retrieves the candidates that `trie.retrieval` finds, and expands the tree level by level where the host takes the
most probable node first. As a score depends on the path alone, the `n` best nodes are the same. What a lane writes for
others goes through the row's scratch space.
"""

from __future__ import annotations

from itertools import accumulate

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import (
    BLOCK,
    ESCAPES_AT,
    LINKED,
    LONGEST,
    NOWHERE,
    ODDS_AT,
    ORDERS,
    START,
    UNIT,
    UNKNOWN,
    as_bits,
    as_float,
    chance,
    following,
    head_at,
    links_at,
    log2_bin,
    mixed,
    next_at,
    ones,
    recent_bin,
    weight_of,
)
from draftwood_strategies.trie import arrays, expansion, phrase_index, retrieval
from draftwood_strategies.trie import weights as host

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
MOST_GAINED: tl.constexpr = tl.constexpr(float(expansion._MOST_GAINED))
LEAST_SCORE: tl.constexpr = tl.constexpr(arrays.LEAST_SCORE)
WIDEN_BY: tl.constexpr = tl.constexpr(arrays.WIDEN_BY)
WIDEN_SCORE: tl.constexpr = tl.constexpr(arrays.WIDEN_SCORE)
NODES_PER_WIDENING: tl.constexpr = tl.constexpr(arrays.NODES_PER_WIDENING)
NOVEL: tl.constexpr = tl.constexpr(arrays.NOVEL_NODES)
UNSEEN: tl.constexpr = tl.constexpr(host._UNSEEN)
COUNTED: tl.constexpr = tl.constexpr(host.COUNTED)
NOVEL_AT: tl.constexpr = tl.constexpr(numbers.NOVEL_AT)
WIDENED: tl.constexpr = tl.constexpr(sum(nodes << (3 * depth) for depth, nodes in enumerate(arrays.WIDENED)))
"""Three bits for each depth."""
WIDENED_DEPTHS: tl.constexpr = tl.constexpr(len(arrays.WIDENED))

STATE: tl.constexpr = tl.constexpr(numbers.STATE)
REGION: tl.constexpr = tl.constexpr(numbers.REGION)
PROMPT_END: tl.constexpr = tl.constexpr(numbers.PROMPT_END)
WRITTEN: tl.constexpr = tl.constexpr(numbers.WRITTEN)
TEXT_AT: tl.constexpr = tl.constexpr(numbers.TEXT_AT)
OWNER: tl.constexpr = tl.constexpr(numbers.OWNER)
FOLLOWED_TEXT: tl.constexpr = tl.constexpr(numbers.FOLLOWED_TEXT)
DRAFTED: tl.constexpr = tl.constexpr(numbers.DRAFTED)
BACKS_OFF: tl.constexpr = tl.constexpr(numbers.BACKS_OFF)
LANES: tl.constexpr = tl.constexpr(numbers.CANDIDATES)
LEVELS_LOG2: tl.constexpr = tl.constexpr((numbers.DEEPEST - 1).bit_length())
NODES: tl.constexpr = tl.constexpr(numbers.MOST_NODES)
DEEPEST: tl.constexpr = tl.constexpr(numbers.DEEPEST)
CONTEXT: tl.constexpr = tl.constexpr(numbers.CONTEXT)
_POOL, _STEPS, _GROUPS = 512, 128, 8
POOL: tl.constexpr = tl.constexpr(_POOL)
"""Children of a level among which the best are chosen, at most."""
STEPS: tl.constexpr = tl.constexpr(_STEPS)
"""Occurrences of a phrase that a search looks at, at most."""
CHAIN: tl.constexpr = tl.constexpr(1 + _STEPS)
GROUPS: tl.constexpr = tl.constexpr(_GROUPS)
"""Searches side by side: those of both indexes for each of `GROUPS / 2` nodes of a level, or of both for each order."""
CHUNK: tl.constexpr = tl.constexpr(16)
"""Lanes that all lanes are compared with at a time."""
RESUMED_LANE: tl.constexpr = tl.constexpr(arrays.MOST_OWN + arrays.MOST_MEMORY)
WIDENED_LANE: tl.constexpr = tl.constexpr(arrays.MOST_ROOTS)

# Parts of the row's scratch space, and where they begin.
_SIZES = (
    2 * numbers.CONTEXT,
    4 * numbers.CONTEXT,
    _GROUPS * (1 + _STEPS),
    *9 * (numbers.CANDIDATES,),
    *6 * (numbers.MOST_NODES,),
    numbers.MOST_NODES * arrays.NOVEL_NODES,
    *6 * (_POOL,),
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
def compare(arena, base, at, mask, context, BLOCKS, BUCKETS):
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
            previous = next_at(base, tl.maximum(block, 0), BLOCKS, BUCKETS) + BLOCKS
            block = tl.load(arena + previous, mask=block >= 0, other=-1)
    missing = tl.cast((bits & 0xFFFF) ^ 0xFFFF, tl.int32) | 0x10000
    length = ones((missing & -missing) - 1)
    behind = tl.cast((bits >> tl.cast(length + 1, tl.int64)) & 0xFFFF, tl.int32)
    agreeing = tl.where(length < LONGEST, tl.minimum(ones(behind), AGREEING), 0)
    return tl.where(mask, length, 0), agreeing


@triton.jit
def read_contexts(arena, scratch, base, at, written, BLOCKS, BUCKETS):
    """Writes the last tokens of the text into `CONTEXTS`, the newest first, and then as the memory has them, see
    `retrieval.mark_start`."""
    back = tl.arange(0, CONTEXT)
    newest = at % BLOCK
    first = tl.where(at >= 0, at // BLOCK, -1)
    second = tl.load(arena + next_at(base, tl.maximum(first, 0), BLOCKS, BUCKETS) + BLOCKS, mask=first >= 0, other=-1)
    third = tl.load(arena + next_at(base, tl.maximum(second, 0), BLOCKS, BUCKETS) + BLOCKS, mask=second >= 0, other=-1)
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
def walk(arena, scratch, base, head, order, steps, BLOCKS, BUCKETS):
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
    TEXT_BUCKETS,
    MEMORY_BLOCKS,
    MEMORY_BUCKETS,
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
    buckets = tl.where(side == 0, TEXT_BUCKETS, MEMORY_BUCKETS)
    at = tl.load(arena + scratch + CHAINS + (side * ORDERS + order) * CHAIN + step)
    ended = tl.cumsum(tl.reshape(tl.cast(at < 0, tl.int32), (2, STEPS)), axis=1)
    reached = (tl.reshape(ended, (2 * STEPS,)) == 0) & (step < 2 * enough)
    writer = tl.load(
        arena + next_at(base, tl.where(reached, at // BLOCK, 0), blocks, buckets) + 2 * blocks, mask=reached, other=-1
    )
    reached &= (side == 0) | (writer != owner)
    candidate = scratch + POSITIONS + side * MOST_OWN
    known = at < NOWHERE
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, MOST_MEMORY, CHUNK):
        earlier = tl.load(
            arena + (candidate + begin)[:, None] + chunk, mask=begin + chunk < count[:, None], other=NOWHERE
        )
        known |= tl.max(tl.cast(earlier == at[:, None], tl.int32), axis=1) > 0
    reached &= ~known
    length, agreeing = compare(
        arena, base, tl.maximum(at, 0), reached, scratch + CONTEXTS + side * CONTEXT, blocks, buckets
    )
    phrase = tl.cast(1, tl.int32) << order
    hit = tl.cast(reached & (length >= phrase), tl.int32)
    miss = tl.cast(reached & (length < phrase), tl.int32)
    hits = tl.reshape(tl.cumsum(tl.reshape(hit, (2, STEPS)), axis=1), (2 * STEPS,)) - hit
    misses = tl.reshape(tl.cumsum(tl.reshape(miss, (2, STEPS)), axis=1), (2 * STEPS,)) - miss
    taken = (hit > 0) & (hits < enough) & (misses <= MISSES)
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
    TEXT_BUCKETS,
    MEMORY_BLOCKS,
    MEMORY_BUCKETS,
):
    """Adds the positions that the row follows in both indexes, if its last token is another one there; see
    `retrieval.resume`.

    Args:
        followed: int32[2].
    """
    side = tl.arange(0, 2)
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    buckets = tl.where(side == 0, TEXT_BUCKETS, MEMORY_BUCKETS)
    open = (followed >= 0) & (side <= has_memory)
    token = tl.load(arena + base + tl.maximum(followed, 0), mask=open, other=-1)
    context = scratch + CONTEXTS + side * CONTEXT
    open &= (token >= 0) & (token != tl.load(arena + context))
    _, agreeing = compare(arena, base, tl.maximum(followed, 0), open, context, blocks, buckets)
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
    read_contexts(arena, scratch, text, at, written, TEXT_BLOCKS, TEXT_BUCKETS)
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
    walk(arena, scratch, base, head, order, steps, blocks, buckets)
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
            TEXT_BUCKETS,
            MEMORY_BLOCKS,
            MEMORY_BUCKETS,
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
        TEXT_BUCKETS,
        MEMORY_BLOCKS,
        MEMORY_BUCKETS,
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
    walk(arena, scratch, base, head, group * 0, group * 0 + 2 * WIDEN_BY, blocks, buckets)
    lane = tl.arange(0, GROUPS * BLOCK)
    group = lane // BLOCK
    side = group % 2
    base = tl.where(side == 0, text, memory)
    blocks = tl.where(side == 0, TEXT_BLOCKS, MEMORY_BLOCKS)
    buckets = tl.where(side == 0, TEXT_BUCKETS, MEMORY_BUCKETS)
    at = tl.load(arena + scratch + CHAINS + group * CHAIN + lane % BLOCK)
    ended = tl.cumsum(tl.reshape(tl.cast(at < 0, tl.int32), (GROUPS, BLOCK)), axis=1)
    reached = (tl.reshape(ended, (GROUPS * BLOCK,)) == 0) & (lane % BLOCK < 2 * WIDEN_BY)
    writer = tl.load(
        arena + next_at(base, tl.where(reached, at // BLOCK, 0), blocks, buckets) + 2 * blocks, mask=reached, other=-1
    )
    reached &= (side == 0) | (writer != owner)
    of_node = scratch + NODE_CONTEXTS + (group // 2) * CONTEXT
    length, agreeing = compare(arena, base, tl.maximum(at, 0), reached, of_node, blocks, buckets)
    hit = tl.cast(reached & (length >= 1), tl.int32)
    miss = tl.cast(reached & (length < 1), tl.int32)
    hits = tl.reshape(tl.cumsum(tl.reshape(hit, (GROUPS, BLOCK)), axis=1), (GROUPS * BLOCK,)) - hit
    misses = tl.reshape(tl.cumsum(tl.reshape(miss, (GROUPS, BLOCK)), axis=1), (GROUPS * BLOCK,)) - miss
    taken = (hit > 0) & (hits < WIDEN_BY) & (misses <= MISSES)
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


@triton.jit
def vote(arena, scratch, text, memory, end, weights, depth, TEXT_BLOCKS, TEXT_BUCKETS, MEMORY_BLOCKS, MEMORY_BUCKETS):
    """Moves all candidates on by one token, and groups those of a node that predict the same one.

    Sets `HAS_VOTES` of nodes to whether they had candidates, `TOTALS` to the sums of their votes, and the keys to the
    votes, close together.

    Returns:
        For each lane whether it votes, its place among the votes, its node and token, the place of the first of its
        group, the group's share and what supports it; and for each node what it leaves for novel tokens.
    """
    lane = tl.arange(0, LANES)
    beam = tl.arange(0, NODES)
    node = tl.load(arena + scratch + OF_NODES + lane)
    at = tl.load(arena + scratch + POSITIONS + lane)
    made = tl.load(arena + scratch + FEATURES + lane)
    kind = made & 3
    base = tl.where(kind == MEMORY, memory, text)
    blocks = tl.where(kind == MEMORY, MEMORY_BLOCKS, TEXT_BLOCKS)
    buckets = tl.where(kind == MEMORY, MEMORY_BUCKETS, TEXT_BUCKETS)
    tl.store(arena + scratch + HAS_VOTES + beam, beam * 0)
    tl.debug_barrier()
    tl.store(arena + scratch + HAS_VOTES + node, node * 0 + 1, mask=node >= 0)
    after = following(arena, base, at, node >= 0, blocks, buckets)
    token = tl.load(arena + base + tl.maximum(after, 0), mask=after >= 0, other=-1)
    votes = token >= 0
    tl.store(arena + scratch + POSITIONS + lane, after, mask=votes)
    recent = recent_bin(arena, text, end, token, votes, TEXT_BLOCKS, TEXT_BUCKETS)
    length = tl.minimum((made >> 9) + depth, LONGEST)
    weight = weight_of(arena + weights, kind, length, (made >> 5) & 15, (made >> 2) & 7, recent, votes)
    place = tl.cumsum(tl.cast(votes, tl.int32), axis=0) - 1
    count = tl.sum(tl.cast(votes, tl.int32), axis=0)
    key = scratch + place
    tl.store(arena + key + KEY_NODES, node, mask=votes)
    tl.store(arena + key + KEY_TOKENS, token, mask=votes)
    tl.store(arena + key + KEY_WEIGHTS, as_bits(weight), mask=votes)
    tl.store(arena + key + KEY_LENGTHS, kind | (length << 2), mask=votes)
    tl.debug_barrier()
    first = lane * 0 + LANES
    share = weight * 0.0
    in_prompt, in_output, in_memory = lane * 0, lane * 0, lane * 0
    total = tl.cast(beam, tl.float32) * 0.0
    longest = beam * 0
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, count, CHUNK):
        others = scratch + begin + chunk
        open = begin + chunk < count
        of_node = tl.load(arena + others + KEY_NODES, mask=open, other=-2)
        of_token = tl.load(arena + others + KEY_TOKENS, mask=open, other=-2)
        of_weight = as_float(tl.load(arena + others + KEY_WEIGHTS, mask=open, other=0))
        of_length = tl.load(arena + others + KEY_LENGTHS, mask=open, other=0)
        equal = (of_node == node[:, None]) & (of_token == token[:, None])
        share += tl.sum(tl.where(equal, of_weight, 0.0), axis=1)
        first = tl.minimum(first, tl.min(tl.where(equal, begin + chunk, LANES), axis=1))
        found = tl.where(equal, (of_length >> 2) + 1, 0)
        source = of_length & 3
        in_prompt = tl.maximum(in_prompt, tl.max(tl.where(source == 0, found, 0), axis=1))
        in_output = tl.maximum(in_output, tl.max(tl.where(source == OUTPUT, found, 0), axis=1))
        in_memory = tl.maximum(in_memory, tl.max(tl.where(source == MEMORY, found, 0), axis=1))
        there = of_node == beam[:, None]
        total += tl.sum(tl.where(there, of_weight, 0.0), axis=1)
        longest = tl.maximum(longest, tl.max(tl.where(there, of_length >> 2, 0), axis=1))
    escape = tl.exp(tl.cast(tl.load(arena + weights + ESCAPES_AT + longest), tl.float32) / UNIT)
    total += escape
    tl.store(arena + scratch + TOTALS + beam, as_bits(total))
    tl.debug_barrier()
    share = share / as_float(tl.load(arena + scratch + TOTALS + node, mask=votes, other=as_bits(1.0)))
    support = in_prompt | (in_output << 5) | (in_memory << 10)
    return votes, place, node, token, first, share, support, count, escape / total


@triton.jit
def expand(
    arena,
    scratch,
    weights,
    depth,
    beam_size,
    budget,
    most_novel,
    best_size,
    votes,
    place,
    node,
    token,
    first,
    share,
    support,
    count,
    escape,
):
    """Scores the children of a level's nodes, and writes those that may be drafted into the pool; returns how many."""
    beam = tl.arange(0, NODES)
    rank = tl.arange(0, NOVEL)[None, :]
    leads = votes & (first == place)
    above = scratch + tl.where(leads, node, 0)
    parent_score = as_float(tl.load(arena + above + BEAM_SCORES))
    last = tl.load(arena + above + BEAM_TOKENS)
    before = tl.load(arena + above + BEAM_LAST)
    least = tl.cast(LEAST_SCORE, tl.float32) / tl.cast(budget, tl.float32)
    looked_up = leads & (parent_score * share * MOST_GAINED >= least)
    probability, _, _, _ = chance(arena + weights + ODDS_AT, share, support, token, last, before, looked_up)
    rate = tl.where(looked_up, probability, share)

    # Novel tokens, which no vote is for.
    novel = tl.load(arena + weights + NOVEL_AT + rank)
    times = as_float(tl.load(arena + weights + NOVEL_AT + COUNTED + rank))
    all_times = as_float(tl.load(arena + weights + NOVEL_AT + 2 * COUNTED))
    score = as_float(tl.load(arena + scratch + BEAM_SCORES + beam))
    has_votes = (tl.load(arena + scratch + HAS_VOTES + beam) > 0) | (depth == 0)
    open = ((beam < beam_size) & has_votes)[:, None] & (rank < most_novel)
    novel_share = escape[:, None] * (times / (all_times + UNSEEN))
    least_share = least / (tl.maximum(score, 1e-30) * MOST_GAINED)
    open &= (novel_share > 0.0) & (novel_share >= least_share[:, None])
    known = scratch + KNOWN + beam[:, None] * NOVEL + rank
    tl.store(arena + known, open & (rank < 0))
    tl.debug_barrier()
    same = tl.max(tl.where(token[:, None] == novel, rank, -1), axis=1)
    tl.store(arena + scratch + KNOWN + node * NOVEL + same, node * 0 + 1, mask=leads & (same >= 0))
    tl.store(arena + scratch + KEY_RATES + place, as_bits(tl.where(leads, rate, 0.0)), mask=votes)
    tl.debug_barrier()
    open &= tl.load(arena + known) == 0

    # Of the children of a node that add up to more than 1, the scores are lowered.
    total = tl.sum(tl.where(open, novel_share, 0.0), axis=1)
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, count, CHUNK):
        others = scratch + begin + chunk
        inside = begin + chunk < count
        of_node = tl.load(arena + others + KEY_NODES, mask=inside, other=-2)
        of_rate = as_float(tl.load(arena + others + KEY_RATES, mask=inside, other=0))
        total += tl.sum(tl.where(of_node == beam[:, None], of_rate, 0.0), axis=1)
    factor = score / tl.maximum(total, 1.0)
    tl.store(arena + scratch + TOTALS + beam, as_bits(factor))
    tl.debug_barrier()
    child_score = rate * as_float(tl.load(arena + scratch + TOTALS + tl.where(leads, node, 0)))
    novel_score = novel_share * factor[:, None]

    # What scores less than all that there is space for is left out.
    worst = as_float(tl.load(arena + scratch + BEST_SCORES + tl.maximum(budget - 1, 0)))
    floor = tl.where(best_size >= budget, worst, -1.0)
    leads &= child_score > floor
    open &= novel_score > floor
    taken = tl.cast(leads, tl.int32)
    at = scratch + tl.cumsum(taken, axis=0) - 1
    tl.store(arena + at + POOL_SCORES, as_bits(child_score), mask=leads)
    tl.store(arena + at + POOL_TOKENS, token, mask=leads)
    tl.store(arena + at + POOL_PARENTS, node, mask=leads)
    tl.store(arena + at + POOL_SHARES, as_bits(share), mask=leads)
    tl.store(arena + at + POOL_SUPPORTS, support, mask=leads)
    tl.store(arena + at + POOL_GROUPS, first, mask=leads)
    size = tl.sum(taken, axis=0)
    more = tl.reshape(tl.cast(open, tl.int32), (NODES * NOVEL,))
    at = tl.cumsum(more, axis=0) - 1 + size
    more = (more > 0) & (at < POOL)
    at = scratch + at
    flat = tl.arange(0, NODES * NOVEL)
    tl.store(arena + at + POOL_SCORES, as_bits(tl.reshape(novel_score, (NODES * NOVEL,))), mask=more)
    tl.store(arena + at + POOL_TOKENS, tl.load(arena + weights + NOVEL_AT + flat % NOVEL), mask=more)
    tl.store(arena + at + POOL_PARENTS, flat // NOVEL, mask=more)
    tl.store(arena + at + POOL_SHARES, as_bits(tl.reshape(novel_share, (NODES * NOVEL,))), mask=more)
    tl.store(arena + at + POOL_SUPPORTS, flat * 0 - 1, mask=more)
    tl.store(arena + at + POOL_GROUPS, flat * 0 - 1, mask=more)
    tl.debug_barrier()
    return size + tl.sum(tl.cast(more, tl.int32), axis=0)


@triton.jit
def choose(arena, scratch, pool_size, budget, best_size, made, depth, paths, new_paths):
    """Puts the best of the pool among the best nodes so far and makes them the next level, the best one first; returns
    how many they are, and how many the best are now."""
    pool = tl.arange(0, POOL)
    beam = tl.arange(0, NODES)
    inside = pool < pool_size
    score = as_float(tl.load(arena + scratch + POOL_SCORES + pool, mask=inside, other=as_bits(-1.0)))
    best = as_float(tl.load(arena + scratch + BEST_SCORES + beam))
    best_id = tl.load(arena + scratch + BEST_IDS + beam)
    before = tl.sum(tl.cast((best[None, :] >= score[:, None]) & (beam < best_size)[None, :], tl.int32), axis=1)
    place = pool * 0
    moved = beam
    chunk = tl.arange(0, CHUNK)[None, :]
    for begin in range(0, pool_size, CHUNK):
        other = begin + chunk
        of_score = as_float(tl.load(arena + scratch + POOL_SCORES + other, mask=other < pool_size, other=as_bits(-2.0)))
        wins = (of_score > score[:, None]) | ((of_score == score[:, None]) & (other < pool[:, None]))
        place += tl.sum(tl.cast(wins, tl.int32), axis=1)
        moved += tl.sum(tl.cast(of_score > best[:, None], tl.int32), axis=1)
    kept = inside & (before + place < budget)
    token = tl.load(arena + scratch + POOL_TOKENS + pool, mask=kept, other=0)
    parent = tl.load(arena + scratch + POOL_PARENTS + pool, mask=kept, other=0)
    parent_id = tl.load(arena + scratch + BEAM_IDS + parent)
    last = tl.load(arena + scratch + BEAM_TOKENS + parent)
    group = tl.load(arena + scratch + POOL_GROUPS + pool, mask=kept, other=-1)
    lane = tl.arange(0, LANES)
    tl.store(arena + scratch + CHILDREN + lane, lane * 0 - 1)
    tl.debug_barrier()
    node = scratch + made + place
    tl.store(arena + node + MADE_TOKENS, token, mask=kept)
    tl.store(arena + node + MADE_PARENTS, parent_id, mask=kept)
    tl.store(arena + node + MADE_SHARES, tl.load(arena + scratch + POOL_SHARES + pool), mask=kept)
    tl.store(arena + node + MADE_SUPPORTS, tl.load(arena + scratch + POOL_SUPPORTS + pool), mask=kept)
    tl.store(arena + scratch + BEST_SCORES + before + place, as_bits(score), mask=kept)
    tl.store(arena + scratch + BEST_IDS + before + place, made + place, mask=kept)
    stays = (beam < best_size) & (moved < budget)
    tl.store(arena + scratch + BEST_SCORES + moved, as_bits(best), mask=stays)
    tl.store(arena + scratch + BEST_IDS + moved, best_id, mask=stays)
    at = scratch + place
    tl.store(arena + at + BEAM_IDS, made + place, mask=kept)
    tl.store(arena + at + BEAM_TOKENS, token, mask=kept)
    tl.store(arena + at + BEAM_LAST, last, mask=kept)
    tl.store(arena + at + BEAM_SCORES, as_bits(score), mask=kept)
    tl.store(arena + scratch + TOTALS + place, parent, mask=kept)
    tl.store(arena + scratch + CHILDREN + group, place, mask=kept & (group >= 0))
    tl.debug_barrier()
    size = tl.sum(tl.cast(kept, tl.int32), axis=0)
    level = tl.arange(0, DEEPEST)[None, :]
    inside_beam = (beam < size)[:, None]
    above = tl.load(arena + scratch + TOTALS + beam, mask=beam < size, other=0)
    path = tl.load(arena + paths + above[:, None] * DEEPEST + level, mask=inside_beam & (level < depth), other=0)
    own = tl.load(arena + scratch + BEAM_TOKENS + beam, mask=beam < size, other=0)
    path = tl.where(level == depth, own[:, None], path)
    tl.store(arena + new_paths + beam[:, None] * DEEPEST + level, path, mask=inside_beam)
    tl.debug_barrier()
    return size, tl.minimum(budget, best_size + pool_size)


@triton.jit
def quota_of(depth, budget):
    """How many nodes of a level are widened, and how many of all levels above."""
    left = budget // NODES_PER_WIDENING
    quota = depth * 0
    above = depth * 0
    for level in tl.static_range(WIDENED_DEPTHS):
        here = tl.minimum((WIDENED >> (3 * level)) & 7, left)
        quota = tl.where(depth == level + 1, here, quota)
        above += tl.where(depth > level + 1, here, 0)
        left -= here
    return quota, above


@triton.jit
def best_path(arena, scratch, parent, score, size):
    """Of the best nodes, parents first, the one whose path has the largest sum of scores, -1 for none, and for each
    node how deep it lies."""
    best = tl.arange(0, NODES)
    inside = best < size
    sums = tl.where(inside, score, -1.0)
    depth = tl.where(inside, 1, 0)
    above = parent
    for _ in tl.static_range(LEVELS_LOG2):
        tl.store(arena + scratch + POOL_SCORES + best, as_bits(sums))
        tl.store(arena + scratch + POOL_PARENTS + best, above)
        tl.store(arena + scratch + POOL_GROUPS + best, depth)
        tl.debug_barrier()
        there = scratch + tl.maximum(above, 0)
        sums += as_float(tl.load(arena + there + POOL_SCORES, mask=above >= 0, other=0))
        depth += tl.load(arena + there + POOL_GROUPS, mask=above >= 0, other=0)
        above = tl.load(arena + there + POOL_PARENTS, mask=above >= 0, other=-1)
        tl.debug_barrier()
    largest = tl.max(sums, axis=0)
    return tl.max(tl.where(inside & (sums == largest), best, -1), axis=0), depth


@triton.jit(do_not_specialize=["stride", "branch_length"])
def draft(
    arena,
    rows,
    budgets,
    tokens,
    parents,
    scores,
    sizes,
    stride,
    branch_length,
    MEMORIES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    ROOTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    SCRATCH: tl.constexpr,
    TEXT_BLOCKS: tl.constexpr,
    TEXT_BUCKETS: tl.constexpr,
    TEXT_SIZE: tl.constexpr,
    MEMORY_BLOCKS: tl.constexpr,
    MEMORY_BUCKETS: tl.constexpr,
    MEMORY_SIZE: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    SCRATCH_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    TENANTS: tl.constexpr,
    CHAINS_ONLY: tl.constexpr,
):
    """Writes the drafts of the rows of a step.

    Args:
        arena: int32, see `arena.Layout`, of which `MEMORIES` to `SCRATCH` are offsets.
        rows, budgets: int32[b], the row of each program, negative for none, and the most nodes of its draft.
        tokens, parents: int32[b, stride], out.
        scores: float32[b, stride], out.
        sizes: int32[b], out: how many nodes each draft has.
        branch_length: the deepest node.
        MOST: nodes of a draft that the arena has space for.
        CHAINS_ONLY: 1 to write of each draft the path with the largest sum of scores, and no parents. The budget is the
            length of the path then, and the draft has as many nodes as there is space for.
    """
    program = tl.program_id(0)
    row = tl.load(rows + program)
    budget = tl.minimum(tl.load(budgets + program), MOST)
    if (row < 0) | (budget < 1):
        tl.store(sizes + program, 0)
        return
    if CHAINS_ONLY:
        branch_length = tl.minimum(branch_length, budget)
        budget = budget * 0 + MOST
    state = STATES + tl.cast(row, tl.int64) * STATE
    region = tl.load(arena + state + REGION)
    has_memory = tl.where(region >= 0, 1, 0)
    text = tl.cast(row, tl.int64) * TEXT_SIZE
    memory = MEMORIES + tl.cast(tl.maximum(region, 0), tl.int64) * MEMORY_SIZE
    weights = WEIGHTS + tl.cast(tl.where(region >= 0, region, TENANTS), tl.int64) * WEIGHTS_SIZE
    scratch = SCRATCH + tl.cast(row, tl.int64) * SCRATCH_SIZE
    prompt_end = tl.load(arena + state + PROMPT_END)
    written = tl.load(arena + state + WRITTEN)
    end = tl.load(arena + state + TEXT_AT)
    owner = tl.load(arena + state + OWNER)
    followed = tl.load(arena + state + FOLLOWED_TEXT + tl.arange(0, 2))
    most_novel = tl.where(tl.load(arena + state + BACKS_OFF) > 0, tl.minimum(NOVEL, budget), 0)
    retrieve(
        arena,
        scratch,
        text,
        memory,
        end,
        prompt_end,
        written,
        owner,
        followed,
        has_memory,
        TEXT_BLOCKS,
        TEXT_BUCKETS,
        MEMORY_BLOCKS,
        MEMORY_BUCKETS,
    )
    lane = tl.arange(0, LANES)
    at = tl.load(arena + scratch + POSITIONS + lane)
    kept = ROOTS + tl.cast(row, tl.int64) * (2 * LANES) + lane
    tl.store(arena + kept, at)
    tl.store(arena + kept + LANES, tl.load(arena + scratch + FEATURES + lane))
    tl.store(arena + scratch + OF_NODES + lane, tl.where(at >= 0, 0, -1))
    tl.store(arena + scratch + BEAM_IDS, -1)
    tl.store(arena + scratch + BEAM_TOKENS, tl.load(arena + scratch + CONTEXTS))
    tl.store(arena + scratch + BEAM_LAST, tl.load(arena + scratch + CONTEXTS + 1))
    tl.store(arena + scratch + BEAM_SCORES, as_bits(1.0))
    tl.debug_barrier()
    depth, made, beam_size, best_size = 0, 0, 1, 0
    going = True
    while going:
        votes, place, node, token, first, share, support, count, escape = vote(
            arena, scratch, text, memory, end, weights, depth, TEXT_BLOCKS, TEXT_BUCKETS, MEMORY_BLOCKS, MEMORY_BUCKETS
        )
        pool_size = expand(
            arena,
            scratch,
            weights,
            depth,
            beam_size,
            budget,
            most_novel,
            best_size,
            votes,
            place,
            node,
            token,
            first,
            share,
            support,
            count,
            escape,
        )
        paths = scratch + PATHS + (depth % 2) * (NODES * DEEPEST)
        new_paths = scratch + PATHS + (1 - depth % 2) * (NODES * DEEPEST)
        beam_size, best_size = choose(arena, scratch, pool_size, budget, best_size, made, depth, paths, new_paths)
        child = tl.load(arena + scratch + CHILDREN + first, mask=votes, other=-1)
        tl.store(arena + scratch + OF_NODES + lane, child)
        tl.debug_barrier()
        made += beam_size
        depth += 1
        going = (beam_size > 0) & (depth < branch_length)
        if going:
            quota, above = quota_of(depth, budget)
            if quota > 0:
                widen(
                    arena,
                    scratch,
                    text,
                    memory,
                    prompt_end,
                    owner,
                    has_memory,
                    new_paths,
                    depth,
                    quota,
                    WIDENED_LANE + 2 * WIDEN_BY * above,
                    beam_size,
                    TEXT_BLOCKS,
                    TEXT_BUCKETS,
                    MEMORY_BLOCKS,
                    MEMORY_BUCKETS,
                )
            going = tl.max(tl.load(arena + scratch + OF_NODES + lane), axis=0) >= 0

    best = tl.arange(0, NODES)
    inside = best < best_size
    identity = tl.load(arena + scratch + BEST_IDS + best, mask=inside, other=0)
    tl.store(arena + scratch + RANKS + identity, best, mask=inside)
    tl.debug_barrier()
    parent = tl.load(arena + scratch + MADE_PARENTS + identity, mask=inside, other=-1)
    parent = tl.load(arena + scratch + RANKS + tl.maximum(parent, 0), mask=parent >= 0, other=-1)
    found = tl.load(arena + scratch + MADE_TOKENS + identity, mask=inside, other=-1)
    score = tl.load(arena + scratch + BEST_SCORES + best, mask=inside, other=0)
    if CHAINS_ONLY:
        last, deep = best_path(arena, scratch, parent, as_float(score), best_size)
        tl.store(arena + scratch + RANKS + best, parent)
        tl.debug_barrier()
        on_path = best < 0
        node = last
        while node >= 0:
            on_path = on_path | (best == node)
            node = tl.load(arena + scratch + RANKS + node)
        tl.store(tokens + (program * stride + deep - 1), found, mask=on_path)
        tl.store(scores + (program * stride + deep - 1), as_float(score), mask=on_path)
        tl.store(sizes + program, tl.sum(tl.cast(on_path, tl.int32), axis=0))
    else:
        tl.store(tokens + program * stride + best, found, mask=inside)
        tl.store(parents + program * stride + best, parent, mask=inside)
        tl.store(scores + program * stride + best, as_float(score), mask=inside)
        tl.store(sizes + program, best_size)
    kept = DRAFTS + tl.cast(row, tl.int64) * (5 * MOST) + best
    tl.store(arena + kept, found, mask=inside)
    tl.store(arena + kept + MOST, parent, mask=inside)
    tl.store(
        arena + kept + 2 * MOST, tl.load(arena + scratch + MADE_SUPPORTS + identity, mask=inside, other=0), mask=inside
    )
    tl.store(
        arena + kept + 3 * MOST, tl.load(arena + scratch + MADE_SHARES + identity, mask=inside, other=0), mask=inside
    )
    tl.store(arena + kept + 4 * MOST, score, mask=inside)
    tl.store(arena + state + DRAFTED, best_size)
