"""Learning from the accepted tokens of a step, as `trie.learning` does on the host.

Every row's steps are taken from the weights before the step: `learn`, a program a row, adds them up as whole numbers,
and `update_weights` adds the sums to the weights. So the result does not depend on the order of rows.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import (
    AGREEING_AT,
    BLOCK,
    COLUMNS,
    ESCAPES_AT,
    LENGTHS,
    LENGTHS_AT,
    LONGEST,
    NEWER_AT,
    NOWHERE,
    ODDS_AT,
    RECENT_AT,
    UNIT,
    UNKNOWN,
    as_bits,
    as_float,
    chance,
    following,
    next_at,
    recent_bin,
    stretched,
    weight_of,
)
from draftwood_strategies.trie import learning, retrieval
from draftwood_strategies.trie import weights as host

MEMORY: tl.constexpr = tl.constexpr(retrieval.MEMORY)
LANES: tl.constexpr = tl.constexpr(numbers.CANDIDATES)
NODES: tl.constexpr = tl.constexpr(numbers.MOST_NODES)
STATE: tl.constexpr = tl.constexpr(numbers.STATE)
REGION: tl.constexpr = tl.constexpr(numbers.REGION)
LEARNS: tl.constexpr = tl.constexpr(numbers.LEARNS)
TEXT_AT: tl.constexpr = tl.constexpr(numbers.TEXT_AT)
FOLLOWED_TEXT: tl.constexpr = tl.constexpr(numbers.FOLLOWED_TEXT)
DRAFTED: tl.constexpr = tl.constexpr(numbers.DRAFTED)
ADDED: tl.constexpr = tl.constexpr(numbers.ADDED)
NOVEL_AT: tl.constexpr = tl.constexpr(numbers.NOVEL_AT)
COUNTED: tl.constexpr = tl.constexpr(host.COUNTED)
RATE: tl.constexpr = tl.constexpr(learning._RATE)
BIAS_RATE: tl.constexpr = tl.constexpr(host._RATE)
SCALE_RATE: tl.constexpr = tl.constexpr(host._SCALE_RATE)
TOKEN_RATE: tl.constexpr = tl.constexpr(host._TOKEN_RATE)
LOG_DECAY: tl.constexpr = tl.constexpr(math.log(host._DECAY))
LEAST_LOG: tl.constexpr = tl.constexpr(numbers.whole_log(learning._LEAST))
GREATEST_LOG: tl.constexpr = tl.constexpr(numbers.whole_log(learning._GREATEST))
GREATEST_ODDS: tl.constexpr = tl.constexpr(int(host._GREATEST) << numbers.UNIT_BITS)
PIECE: tl.constexpr = tl.constexpr(numbers.WEIGHTS_AT_ONCE)
PIECES: tl.constexpr = tl.constexpr(-(-numbers.ADDED // numbers.WEIGHTS_AT_ONCE))
ROWS_IN_FULL: tl.constexpr = tl.constexpr(16)
"""The steps of more rows of a tenant count as those of so many: rows that all correct the same error would correct it
once each, where the host's rows see what those before them corrected."""
NEW: tl.constexpr = tl.constexpr(8)
"""Tokens that were not counted before are counted in one step, at most."""


@triton.jit
def whole(number):
    """A real number in the units of the weights, rounded."""
    return tl.cast(tl.floor(number * UNIT + 0.5), tl.int32)


@triton.jit
def add_by_column(arena, added, column, amount, COLUMNS_: tl.constexpr):
    """Adds each lane's amount to its column, of `COLUMNS_` from `added` on; lanes with column -1 to none."""
    columns = tl.arange(0, COLUMNS_)
    total = tl.sum(tl.where(column[:, None] == columns[None, :], amount[:, None], 0), axis=0)
    tl.atomic_add(arena + added + columns, total, mask=total != 0)


@triton.jit
def learn_votes(
    arena,
    text,
    memory,
    weights,
    state,
    roots,
    miss,
    tokens,
    count,
    learns,
    branch_length,
    TEXT_BLOCKS: tl.constexpr,
    TEXT_BUCKETS: tl.constexpr,
    MEMORY_BLOCKS: tl.constexpr,
):
    """A step of the votes' factors and escapes for each accepted token that candidates voted on; see
    `trie.learning._learn_votes`.

    Args:
        miss: where the token that the votes missed goes.
        tokens: where the accepted ones are.
    """
    lane = tl.arange(0, LANES)
    at = tl.load(arena + roots + lane)
    made = tl.load(arena + roots + LANES + lane)
    kind = made & 3
    newer = (made >> 2) & 7
    agreeing = (made >> 5) & 15
    in_memory = kind == MEMORY
    base = tl.where(in_memory, memory, text)
    blocks = tl.where(in_memory, MEMORY_BLOCKS, TEXT_BLOCKS)
    side = tl.arange(0, 2)
    side_base = tl.where(side == 1, memory, text)
    side_blocks = tl.where(side == 1, MEMORY_BLOCKS, TEXT_BLOCKS)
    followed = tl.load(arena + state + FOLLOWED_TEXT + side)
    end = tl.load(arena + state + TEXT_AT)
    alive = at >= 0
    missed = end * 0 - 1
    deepest = end * 0 + branch_length
    for depth in range(0, count):
        followed = following(arena, side_base, followed, followed >= 0, side_blocks)
        token = tl.load(tokens + depth)
        alive &= lane * 0 + depth < deepest
        at = following(arena, base, at, alive, blocks)
        found = tl.load(arena + base + tl.maximum(at, 0), mask=at >= 0, other=-1)
        alive &= found >= 0
        recent = recent_bin(arena, text, end, found, alive, TEXT_BLOCKS, TEXT_BUCKETS)
        length = tl.minimum((made >> 9) + depth, LONGEST)
        weight = weight_of(arena + weights, kind, length, agreeing, newer, recent, alive)
        voters = tl.sum(tl.cast(alive, tl.int32), axis=0)
        longest = tl.max(tl.where(alive, length, 0), axis=0)
        escape = tl.exp(tl.cast(tl.load(arena + weights + ESCAPES_AT + longest), tl.float32) / UNIT)
        total = tl.sum(weight, axis=0) + escape
        hit = alive & (found == token)
        right = tl.sum(tl.where(hit, weight, 0.0), axis=0)
        if (learns > 0) & (voters > 0):
            share = tl.where(right == 0.0, 1.0, 0.0) - escape / total
            tl.atomic_add(arena + weights + ADDED + ESCAPES_AT + longest, whole(tl.log(share * RATE + 1.0)))
            gradient = tl.where(hit, weight / tl.maximum(right, 1e-30), 0.0) - weight / total
            amount = tl.where(alive, whole(tl.log(gradient * RATE + 1.0)), 0)
            for source in tl.static_range(3):
                row = weights + ADDED + source * COLUMNS
                mine = alive & (kind == source)
                add_by_column(arena, row, tl.where(mine, length, -1), amount, 32)
                add_by_column(arena, row + AGREEING_AT, tl.where(mine, agreeing, -1), amount, 16)
                add_by_column(arena, row + NEWER_AT, tl.where(mine, newer, -1), amount, 8)
                add_by_column(arena, row + RECENT_AT, tl.where(mine, recent, -1), amount, 8)
        first = tl.min(tl.where(hit & ~in_memory, lane, LANES), axis=0)
        first_there = tl.min(tl.where(hit & in_memory, lane, LANES), axis=0)
        leading = tl.where(side == 0, first, first_there)
        position = tl.sum(tl.where(lane[None, :] == leading[:, None], at[None, :], 0), axis=1)
        followed = tl.where(leading < LANES, position, followed)
        missed = tl.where((depth < deepest) & (right == 0.0), token, missed)
        deepest = tl.where(right > 0.0, deepest, 0)
        alive = hit
    tl.store(arena + state + FOLLOWED_TEXT + side, followed)
    tl.store(arena + miss, tl.where(learns > 0, missed, -1))
    tl.store(arena + roots + lane, lane * 0 + NOWHERE)


@triton.jit
def learn_odds(arena, text, weights, state, draft, tokens, count, TEXT_BLOCKS, MOST: tl.constexpr):
    """A step of the odds for the drafted nodes on the accepted path and for their siblings; see
    `trie.learning._learn_odds`."""
    lane = tl.arange(0, NODES)
    inside = lane < tl.load(arena + state + DRAFTED)
    token = tl.load(arena + draft + lane, mask=inside, other=-1)
    parent = tl.load(arena + draft + MOST + lane, mask=inside, other=-2)
    support = tl.load(arena + draft + 2 * MOST + lane, mask=inside, other=-1)
    share = as_float(tl.load(arena + draft + 3 * MOST + lane, mask=inside, other=0))
    at = tl.load(arena + state + TEXT_AT)
    last = tl.load(arena + text + tl.maximum(at, 0), mask=at >= 0, other=UNKNOWN)
    block = tl.maximum(at, 0) // BLOCK
    crosses = (at >= 0) & (at % BLOCK == 0)
    previous = tl.load(arena + next_at(text, block, TEXT_BLOCKS) + TEXT_BLOCKS, mask=crosses, other=-1)
    ahead = tl.where(crosses, tl.where(previous >= 0, previous * BLOCK + BLOCK - 1, -1), at - 1)
    before = tl.load(arena + text + tl.maximum(ahead, 0), mask=(at >= 0) & (ahead >= 0), other=UNKNOWN)
    odds = weights + ODDS_AT
    added = weights + ADDED + ODDS_AT
    node = at * 0 - 1
    for depth in range(0, count):
        accepted = tl.load(tokens + depth)
        sibling = inside & (parent == node)
        hit = sibling & (token == accepted)
        mask = sibling & (support >= 0)
        probability, slot_1, slot_2, slot_3 = chance(arena + odds, share, support, token, last, before, mask)
        error = tl.where(mask, tl.where(hit, 1.0, 0.0) - probability, 0.0)
        tl.atomic_add(arena + added, tl.sum(whole(error * stretched(share) * SCALE_RATE), axis=0))
        by = whole(error * BIAS_RATE)
        tl.atomic_add(arena + added + 1, tl.sum(by, axis=0))
        known = tl.where(mask, support, 0)
        lengths = added + LENGTHS_AT
        add_by_column(arena, lengths, tl.where(mask, known & 31, -1), by, 32)
        add_by_column(arena, lengths + LENGTHS, tl.where(mask, (known >> 5) & 31, -1), by, 32)
        add_by_column(arena, lengths + 2 * LENGTHS, tl.where(mask, known >> 10, -1), by, 32)
        by = whole(error * TOKEN_RATE)
        tl.atomic_add(arena + added + slot_1, by, mask=mask)
        tl.atomic_add(arena + added + slot_2, by, mask=mask)
        tl.atomic_add(arena + added + slot_3, by, mask=mask)
        taken = tl.max(tl.where(hit, lane, -1), axis=0)
        # Behind a token that was not drafted no node is a sibling.
        node = tl.where(taken >= 0, taken, -3)
        before = last
        last = accepted


@triton.jit(do_not_specialize=["stride", "branch_length"])
def learn(
    arena,
    rows,
    tokens,
    counts,
    stride,
    branch_length,
    MEMORIES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    ROOTS: tl.constexpr,
    DRAFTS: tl.constexpr,
    MISSED: tl.constexpr,
    TEXT_BLOCKS: tl.constexpr,
    TEXT_BUCKETS: tl.constexpr,
    TEXT_SIZE: tl.constexpr,
    MEMORY_BLOCKS: tl.constexpr,
    MEMORY_BUCKETS: tl.constexpr,
    MEMORY_SIZE: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    TENANTS: tl.constexpr,
):
    """Adds up the steps of the weights from the latest draft of each row, whose text does not have the accepted tokens
    yet, and moves on the positions that it follows.

    Args:
        arena: int32, see `arena.Layout`, of which `MEMORIES` to `MISSED` are offsets.
        rows, counts: int32[b], the row of each program, negative for none, and how many tokens it accepted.
        tokens: int32[b, stride].
        branch_length: the deepest node.
    """
    program = tl.program_id(0)
    row = tl.load(rows + program)
    count = tl.load(counts + program)
    if (row < 0) | (count < 1):
        return
    state = STATES + tl.cast(row, tl.int64) * STATE
    region = tl.load(arena + state + REGION)
    learns = tl.where(region >= 0, tl.load(arena + state + LEARNS), 0)
    text = tl.cast(row, tl.int64) * TEXT_SIZE
    memory = MEMORIES + tl.cast(tl.maximum(region, 0), tl.int64) * MEMORY_SIZE
    weights = WEIGHTS + tl.cast(tl.where(region >= 0, region, TENANTS), tl.int64) * WEIGHTS_SIZE
    accepted = tokens + program * stride
    roots = ROOTS + tl.cast(row, tl.int64) * (2 * LANES)
    draft = DRAFTS + tl.cast(row, tl.int64) * (5 * MOST)
    learn_votes(
        arena,
        text,
        memory,
        weights,
        state,
        roots,
        MISSED + tl.cast(row, tl.int64),
        accepted,
        count,
        learns,
        branch_length,
        TEXT_BLOCKS,
        TEXT_BUCKETS,
        MEMORY_BLOCKS,
    )
    if learns > 0:
        learn_odds(arena, text, weights, state, draft, accepted, count, TEXT_BLOCKS, MOST)
    tl.store(arena + state + DRAFTED, 0)


@triton.jit
def rows_of_tenant(arena, rows, n, program, region, STATES: tl.constexpr, RUNS: tl.constexpr):
    """How many rows of a step are of the tenant with this region, and how many of these come before a program's own."""
    earlier = program * 0
    same = program * 0
    for first in range(0, n, RUNS):
        lanes = first + tl.arange(0, RUNS)
        others = tl.load(rows + lanes, mask=lanes < n, other=-1)
        theirs = tl.load(
            arena + STATES + tl.cast(tl.maximum(others, 0), tl.int64) * STATE + REGION, mask=others >= 0, other=-1
        )
        same += tl.sum(tl.cast(theirs == region, tl.int32), axis=0)
        earlier += tl.sum(tl.cast((theirs == region) & (lanes < program), tl.int32), axis=0)
    return same, earlier


@triton.jit(do_not_specialize=["n"])
def update_weights(
    arena,
    rows,
    n,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    MISSED: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Adds to the weights of each tenant what its rows of a step added up, and counts the tokens that their votes
    missed. The programs of a tenant's first row do it, `PIECES` for the weights and one for the tokens.

    Args:
        arena: int32, see `arena.Layout`, of which `WEIGHTS` to `MISSED` are offsets.
        rows: int32[n].
        RUNS: so many rows are looked at at a time, a power of two.
    """
    program = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + program)
    if row < 0:
        return
    region = tl.load(arena + STATES + tl.cast(row, tl.int64) * STATE + REGION)
    if region < 0:
        return
    same, earlier = rows_of_tenant(arena, rows, n, program, region, STATES, RUNS)
    if earlier > 0:
        return
    weights = WEIGHTS + tl.cast(region, tl.int64) * WEIGHTS_SIZE
    if piece < PIECES:
        number = piece * PIECE + tl.arange(0, PIECE)
        inside = number < ADDED
        added = tl.load(arena + weights + ADDED + number, mask=inside, other=0)
        share = tl.cast(added, tl.float32) * (tl.cast(tl.minimum(same, ROWS_IN_FULL), tl.float32) / same)
        value = tl.load(arena + weights + number, mask=inside, other=0) + tl.cast(tl.floor(share + 0.5), tl.int32)
        low = tl.where(number < ODDS_AT, LEAST_LOG, -GREATEST_ODDS)
        high = tl.where(number < ODDS_AT, GREATEST_LOG, GREATEST_ODDS)
        tl.store(arena + weights + number, tl.minimum(tl.maximum(value, low), high), mask=inside & (added != 0))
        tl.store(arena + weights + ADDED + number, added * 0, mask=inside & (added != 0))
    else:
        count_misses(arena, rows, n, weights, region, STATES, MISSED, RUNS)


@triton.jit
def count_misses(arena, rows, n, weights, region, STATES: tl.constexpr, MISSED: tl.constexpr, RUNS: tl.constexpr):
    """Counts the tokens that the votes of a tenant's rows missed, see `trie.weights.count_miss`: all of a step at once.
    Of those that were not counted before, the first `NEW` take the places of the least frequent ones."""
    lane = tl.arange(0, COUNTED)
    novel = weights + NOVEL_AT
    token = tl.load(arena + novel + lane)
    count = as_float(tl.load(arena + novel + COUNTED + lane))
    times = lane * 0
    misses = n * 0
    for first in range(0, n, RUNS):
        lanes = first + tl.arange(0, RUNS)
        row = tl.load(rows + lanes, mask=lanes < n, other=-1)
        theirs = tl.load(
            arena + STATES + tl.cast(tl.maximum(row, 0), tl.int64) * STATE + REGION, mask=row >= 0, other=-1
        )
        missed = tl.load(arena + MISSED + tl.cast(tl.maximum(row, 0), tl.int64), mask=theirs == region, other=-1)
        tl.store(arena + MISSED + tl.cast(tl.maximum(row, 0), tl.int64), lanes * 0 - 1, mask=theirs == region)
        misses += tl.sum(tl.cast(missed >= 0, tl.int32), axis=0)
        matches = (missed[None, :] == token[:, None]) & (missed >= 0)[None, :]
        times += tl.sum(tl.cast(matches, tl.int32), axis=1)
        new = (missed >= 0) & (tl.sum(tl.cast(matches, tl.int32), axis=0) == 0)
        replaced = n * 0
        pending = tl.max(tl.cast(new, tl.int32), axis=0)
        while (pending > 0) & (replaced < NEW):
            next = tl.min(tl.where(new, lanes, 1 << 30), axis=0)
            value = tl.sum(tl.where(lanes == next, missed, 0), axis=0)
            same = new & (missed == value)
            slot = COUNTED - 1 - replaced
            token = tl.where(lane == slot, value, token)
            count = tl.where(lane == slot, 0.0, count)
            times = tl.where(lane == slot, tl.sum(tl.cast(same, tl.int32), axis=0), times)
            new = new & ~same
            pending = tl.max(tl.cast(new, tl.int32), axis=0)
            replaced += 1
    if misses > 0:
        decay = tl.exp(tl.cast(misses, tl.float32) * LOG_DECAY)
        count = count * decay + tl.cast(times, tl.float32)
        tl.store(arena + novel + lane, token)
        tl.store(arena + novel + COUNTED + lane, as_bits(count))
        tl.store(arena + novel + 2 * COUNTED, as_bits(tl.sum(count, axis=0)))
        tl.debug_barrier()
        rank = lane * 0
        for first in range(0, COUNTED, 32):
            other = first + tl.arange(0, 32)
            of_count = as_float(tl.load(arena + novel + COUNTED + other))[None, :]
            ahead = (of_count > count[:, None]) | ((of_count == count[:, None]) & (other[None, :] < lane[:, None]))
            rank += tl.sum(tl.cast(ahead, tl.int32), axis=1)
        tl.debug_barrier()
        tl.store(arena + novel + rank, token)
        tl.store(arena + novel + COUNTED + rank, as_bits(count))
