"""Drafts for all rows of a step: one program a row.

The tree grows level by level where the host takes the most probable node first. As a score depends on the path alone,
the `n` best nodes are the same. What a lane writes for others goes through the row's scratch space.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import (
    ESCAPES_AT,
    LONGEST,
    ODDS_AT,
    UNIT,
    as_bits,
    as_float,
    chance,
    following,
    recent_bin,
    weight_of,
)
from draftwood_strategies.device.kernels.retrieval import (
    BEAM_IDS,
    BEAM_LAST,
    BEAM_SCORES,
    BEAM_TOKENS,
    BEST_IDS,
    BEST_SCORES,
    CHILDREN,
    CHUNK,
    CONTEXTS,
    DEEPEST,
    FEATURES,
    HAS_VOTES,
    KEY_LENGTHS,
    KEY_NODES,
    KEY_RATES,
    KEY_TOKENS,
    KEY_WEIGHTS,
    KNOWN,
    LANES,
    MADE_PARENTS,
    MADE_SHARES,
    MADE_SUPPORTS,
    MADE_TOKENS,
    MEMORY,
    NODES,
    OF_NODES,
    OUTPUT,
    PATHS,
    POOL_GROUPS,
    POOL_PARENTS,
    POOL_SCORES,
    POOL_SHARES,
    POOL_SUPPORTS,
    POOL_TOKENS,
    POSITIONS,
    RANKS,
    TOTALS,
    WIDEN_BY,
    retrieve,
    widen,
)
from draftwood_strategies.trie import arrays, expansion
from draftwood_strategies.trie import weights as host

MOST_GAINED: tl.constexpr = tl.constexpr(float(expansion._MOST_GAINED))
LEAST_SCORE: tl.constexpr = tl.constexpr(arrays.LEAST_SCORE)
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
LEVELS_LOG2: tl.constexpr = tl.constexpr((numbers.DEEPEST - 1).bit_length())
POOL: tl.constexpr = tl.constexpr(numbers.POOL)
"""Children of a level among which the best are chosen, at most."""
WIDENED_LANE: tl.constexpr = tl.constexpr(arrays.MOST_ROOTS)


@triton.jit
def vote(arena, scratch, text, memory, end, weights, depth, TEXT_BLOCKS, TEXT_BUCKETS, MEMORY_BLOCKS):
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
    tl.store(arena + scratch + HAS_VOTES + beam, beam * 0)
    tl.debug_barrier()
    tl.store(arena + scratch + HAS_VOTES + node, node * 0 + 1, mask=node >= 0)
    after = following(arena, base, at, node >= 0, blocks)
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
            arena, scratch, text, memory, end, weights, depth, TEXT_BLOCKS, TEXT_BUCKETS, MEMORY_BLOCKS
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
