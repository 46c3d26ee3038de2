"""Writes runs of tokens into phrase indexes, as `trie.phrase_index.append` does one token after the other.

One program writes into a region, a tile of tokens at a time. Lanes that would change the same number are told apart by
comparing them, so every GPU that is given the same tokens ends with the same arena, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import (
    BLOCK,
    LINKED,
    NOWHERE,
    ORDERS,
    START,
    head_at,
    links_at,
    mixed,
    next_at,
    ones,
    ring_at,
)

STATE: tl.constexpr = tl.constexpr(numbers.STATE)
REGION: tl.constexpr = tl.constexpr(numbers.REGION)
LEARNS: tl.constexpr = tl.constexpr(numbers.LEARNS)
PROMPT_END: tl.constexpr = tl.constexpr(numbers.PROMPT_END)
WRITTEN: tl.constexpr = tl.constexpr(numbers.WRITTEN)
TEXT_AT: tl.constexpr = tl.constexpr(numbers.TEXT_AT)
MEMORY_AT: tl.constexpr = tl.constexpr(numbers.MEMORY_AT)
OWNER: tl.constexpr = tl.constexpr(numbers.OWNER)
CURSOR: tl.constexpr = tl.constexpr(numbers.CURSOR)
USED: tl.constexpr = tl.constexpr(numbers.USED)
TOKENS: tl.constexpr = tl.constexpr(numbers.TOKENS)

TEXT: tl.constexpr = tl.constexpr(numbers.TEXT)
MEMORY: tl.constexpr = tl.constexpr(numbers.MEMORY)
RECORDED: tl.constexpr = tl.constexpr(numbers.RECORDED)
FIELDS: tl.constexpr = tl.constexpr(8)
"""Numbers of a run in the scratch space."""
CLEARED: tl.constexpr = tl.constexpr(16)
"""Blocks that are cleared at a time."""
TILE: tl.constexpr = tl.constexpr(32)
"""Tokens that are written side by side: a lane has a bit for each of the others, see `_link`."""


@triton.jit(do_not_specialize=["n", "stride", "region"])
def append(
    arena,
    rows,
    tokens,
    begins,
    counts,
    n,
    stride,
    region,
    REGIONS: tl.constexpr,
    REGION_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BUCKETS: tl.constexpr,
    STATES: tl.constexpr,
    SCRATCH: tl.constexpr,
    SCRATCH_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    COUNTED: tl.constexpr,
    RUNS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Appends n runs of tokens, each to a sequence of its own.

    Args:
        rows: int32[n], the row of each run, negative for none; for `RECORDED` the numbers of the new sequences.
        tokens: int32[...]; run r has the `counts[r]` from number `begins[r] * stride` on.
        region: the tenant's region, for `RECORDED` only.
        REGIONS, STATES, SCRATCH: where regions of this kind, the states and the scratch space begin in the arena.
        KIND: `TEXT`, a program for each row, `MEMORY`, a program for each row, of which the first of a tenant writes
            for all of its rows, or `RECORDED`, one program.
        COUNTED: 1 if the memory has the tokens that are added to the text.
        RUNS: so many runs are written at a time, a power of two, 1 for `TEXT`.
        PIECE: and so many tokens of each, so that at most half of the blocks are claimed at a time.
    """
    program = tl.program_id(0)
    states = arena + STATES
    scratch = arena + SCRATCH + tl.cast(program, tl.int64) * SCRATCH_SIZE
    first, last = program * 0, program * 0 + n
    if KIND == TEXT:
        region = tl.load(rows + program)
        first, last = program, program + 1
    if KIND == MEMORY:
        region = _led_region(states, rows, program, RUNS)
    last = tl.where(region >= 0, last, first)
    base = REGIONS + tl.cast(tl.maximum(region, 0), tl.int64) * REGION_SIZE
    for chunk in range(first, last, RUNS):
        lanes = chunk + tl.arange(0, RUNS)
        row = tl.load(rows + lanes, mask=lanes < last, other=-1)
        count = tl.load(counts + lanes, mask=row >= 0, other=0)
        begin = tl.load(begins + lanes, mask=row >= 0, other=0) * stride
        state = states + tl.maximum(row, 0) * STATE
        if KIND == TEXT:
            at = tl.load(state + TEXT_AT, mask=row >= 0, other=-1)
            owner = at * 0
            marked = at * 0
            if COUNTED:
                written = tl.load(state + WRITTEN, mask=row >= 0, other=0)
                tl.store(state + WRITTEN, written + count, mask=row >= 0)
            skipped = tl.maximum(count - BLOCKS * BLOCK, 0)
            begin += skipped
            count -= skipped
        if KIND == MEMORY:
            learns = tl.load(state + LEARNS, mask=row >= 0, other=0)
            count = tl.where((_region(states, row) == region) & (learns > 0), count, 0)
            at = tl.load(state + MEMORY_AT, mask=count > 0, other=-1)
            owner = tl.load(state + OWNER, mask=count > 0, other=0)
            marked = tl.where((at < 0) & (count > 0), 1, 0)
        if KIND == RECORDED:
            at = row * 0 - 1
            owner = row
            marked = tl.where(count > 0, 1, 0)
        count += marked
        longest = tl.max(count, axis=0)
        for done in range(0, longest, PIECE):
            length = tl.minimum(tl.maximum(count - done, 0), PIECE)
            source = begin + done - marked
            mark = tl.where((marked > 0) & (done == 0), 1, 0)
            at = _piece(arena, base, scratch, tokens, source, length, mark, at, owner, BLOCKS, BUCKETS, RUNS)
        if KIND == TEXT:
            tl.store(state + TEXT_AT, at, mask=count > 0)
        if KIND == MEMORY:
            tl.store(state + MEMORY_AT, at, mask=count > 0)


@triton.jit
def begin_outputs(arena, rows, STATES: tl.constexpr):
    """The output of each row, int32[programs], begins after its last token; nothing for negative ones."""
    row = tl.load(rows + tl.program_id(0))
    state = arena + STATES + tl.maximum(row, 0) * STATE
    tl.store(state + PROMPT_END, tl.load(state + TEXT_AT) + 1, mask=row >= 0)


@triton.jit
def _region(states, rows):
    """The tenants' regions of rows; -1 where a row is negative."""
    return tl.load(states + tl.maximum(rows, 0) * STATE + REGION, mask=rows >= 0, other=-1)


@triton.jit
def _led_region(states, rows, program, RUNS: tl.constexpr):
    """The region of a program's row, if that is the first row of its tenant; else -1."""
    region = _region(states, tl.load(rows + program))
    for q in range(0, program, RUNS):
        lanes = q + tl.arange(0, RUNS)
        others = tl.load(rows + lanes, mask=lanes < program, other=-1)
        same = tl.sum(tl.where(_region(states, others) == region, 1, 0), axis=0)
        region = tl.where(same > 0, -1, region)
    return region


@triton.jit
def _piece(
    arena,
    base,
    scratch,
    tokens,
    source,
    length,
    mark,
    at,
    owner,
    BLOCKS: tl.constexpr,
    BUCKETS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Appends `length` tokens, from `source` on, in each of the lanes, and returns where their last ones are then.

    The result is that of one lane after the other. Tokens that a later lane overwrites are not written at all.

    Args:
        mark: 1 for lanes in which a start mark is in the place of the first token.
        at, owner: the lanes' last positions and the numbers of their sequences.
    """
    ring = arena + ring_at(base, BLOCKS)
    cursor = tl.load(ring + CURSOR)
    used = tl.load(ring + USED)
    stored = tl.load(ring + TOKENS)
    block = tl.where(at >= 0, at, 0) // BLOCK
    fields = arena + next_at(base, block, BLOCKS)
    goes_on = (at >= 0) & (length > 0)
    goes_on = goes_on & (tl.load(fields + 2 * BLOCKS, mask=goes_on, other=-1) == owner)
    age = (block - cursor + BLOCKS) % BLOCKS
    # Tokens are counted from the beginning of the block that a lane goes on in, or of one before its first.
    offset = tl.where(goes_on, at % BLOCK + 1, BLOCK)
    claims = (offset + length - 1) // BLOCK
    before = tl.cumsum(claims, 0) - claims
    late = tl.max(tl.where(goes_on & (age < before), 1, 0), axis=0)
    while late > 0:  # lanes before claim the block of a lane, which then begins anew and may claim one more
        goes_on = goes_on & (age >= before)
        offset = tl.where(goes_on, offset, BLOCK)
        claims = (offset + length - 1) // BLOCK
        before = tl.cumsum(claims, 0) - claims
        late = tl.max(tl.where(goes_on & (age < before), 1, 0), axis=0)
    claimed = tl.sum(claims, axis=0)

    lost = _clear(arena, base, cursor, claimed, BLOCKS)
    tl.debug_barrier()
    kept = goes_on & (age >= claimed)
    tl.store(fields, (cursor + before) % BLOCKS, mask=kept & (claims > 0))
    previous = tl.load(fields + BLOCKS, mask=kept, other=-1)
    starts = tl.cumsum(length, 0) - length
    total = tl.sum(length, axis=0)
    own = scratch + tl.arange(0, RUNS) * FIELDS
    tl.store(own, source - starts)
    tl.store(own + 1, offset - starts)
    tl.store(own + 2, tl.where(kept, block, NOWHERE))
    tl.store(own + 3, previous)
    tl.store(own + 4, cursor + before - 1)
    tl.store(own + 5, claims)
    tl.store(own + 6, owner)
    tl.store(own + 7, tl.where(mark > 0, starts, -1))
    tl.debug_barrier()

    added = total * 0
    for tile in range(0, total, TILE):
        added += _tile(arena, base, scratch, tokens, starts, total, tile, BLOCKS, BUCKETS, RUNS)
    tl.store(ring + CURSOR, (cursor + claimed) % BLOCKS)
    tl.store(ring + USED, tl.minimum(used + claimed, BLOCKS))
    tl.store(ring + TOKENS, stored + added - lost)
    end = offset + length - 1
    within = tl.where(end < BLOCK, block, (cursor + before + end // BLOCK - 1 + BLOCKS) % BLOCKS)
    tl.debug_barrier()
    return tl.where(length > 0, within * BLOCK + end % BLOCK, at)


@triton.jit
def _clear(arena, base, cursor, claimed, BLOCKS: tl.constexpr):
    """Forgets the tokens of the ring's next blocks and unlinks their neighbours; returns how many tokens these are."""
    lost = claimed * 0
    for first in range(0, claimed, CLEARED):
        lanes = first + tl.arange(0, CLEARED)
        taken = lanes < claimed
        block = (cursor + lanes) % BLOCKS
        fields = arena + next_at(base, block, BLOCKS)
        following = tl.load(fields, mask=taken, other=-1)
        previous = tl.load(fields + BLOCKS, mask=taken, other=-1)
        after = arena + next_at(base, tl.maximum(following, 0), BLOCKS) + BLOCKS
        tl.store(after, following * 0 + NOWHERE, mask=following >= 0)
        ahead = arena + next_at(base, tl.maximum(previous, 0), BLOCKS)
        tl.store(ahead, previous * 0 + NOWHERE, mask=previous >= 0)
        log = arena + base + block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        old = tl.load(log, mask=taken[:, None], other=NOWHERE)
        tl.store(log, old * 0 + NOWHERE, mask=taken[:, None])
        lost += tl.sum(tl.sum(tl.where((old >= 0) & (old != START), 1, 0), axis=1), axis=0)
    return lost


@triton.jit
def _tile(
    arena,
    base,
    scratch,
    tokens,
    starts,
    total,
    tile,
    BLOCKS: tl.constexpr,
    BUCKETS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Writes and links the tokens from number `tile` on of all runs; returns how many, start marks not counted.

    Args:
        starts: int32[RUNS], the number of the first token of each run.
    """
    lane = tile + tl.arange(0, TILE)
    real = lane < total
    run = tl.sum(tl.where(starts[None, :] <= lane[:, None], 1, 0), axis=1) - 1
    own = scratch + run * FIELDS
    source = tl.load(own) + lane
    rank = tl.load(own + 1) + lane
    block = tl.load(own + 2)
    previous = tl.load(own + 3)
    claim = tl.load(own + 4)
    claims = tl.load(own + 5)
    marked = tl.load(own + 7) == lane

    token = tl.load(tokens + source, mask=real & (marked == 0), other=START)
    number = rank // BLOCK
    within = tl.where(number > 0, (claim + number) % BLOCKS, block)
    real = real & (within >= 0)
    at = tl.where(real, within * BLOCK + rank % BLOCK, 0)
    tl.store(arena + base + at, token, mask=real)
    positions = scratch + RUNS * FIELDS
    tl.store(positions + tl.arange(0, TILE), at)
    begins = real & (number > 0) & (rank % BLOCK == 0)
    fields = arena + next_at(base, tl.where(begins, within, 0), BLOCKS)
    before = tl.where(number > 1, (claim + number - 1) % BLOCKS, block)
    after = tl.where(number < claims, (claim + number + 1) % BLOCKS, NOWHERE)
    tl.store(fields, after, mask=begins)
    tl.store(fields + BLOCKS, before, mask=begins)
    tl.store(fields + 2 * BLOCKS, tl.load(own + 6), mask=begins)
    tl.debug_barrier()

    key = tl.cast(token * 0, tl.uint64)
    known = real
    for order in tl.static_range(ORDERS):
        for back in tl.static_range((1 << order) // 2, 1 << order):
            earlier = rank + BLOCK - back
            piece = earlier // BLOCK
            there = tl.where(piece > 1, (claim + piece - 1) % BLOCKS, tl.where(piece < 1, previous, block))
            known = known & (there >= 0)
            place = tl.where(known, there * BLOCK + earlier % BLOCK, 0)
            key = mixed(key, tl.load(arena + base + place, mask=known, other=0))
        _link(arena, base, positions, order, key, at, known, real, BLOCKS, BUCKETS)
    return tl.sum(tl.where(real & (token != START), 1, 0), axis=0)


@triton.jit
def _link(arena, base, positions, order, key, at, known, real, BLOCKS: tl.constexpr, BUCKETS: tl.constexpr):
    """Links each position to the occurrences before it of the phrases of one order.

    Args:
        positions: where the scratch space has the positions of the lanes.
        key: the hashes of the phrases that end in the lanes.
        at: the lanes' positions.
        known: whether the phrase lies within the sequence.
        real: whether the lane has a position.
    """
    lane = tl.arange(0, TILE)
    bucket = tl.where(known, tl.cast(key & (BUCKETS - 1), tl.int32), -1)
    same = known[:, None] & (bucket[:, None] == bucket[None, :])
    last = tl.max(tl.where(same, lane[None, :], -1), axis=1)
    # Bit 30 - j stands for lane j, which has the same bucket and comes before: the lowest bit for the nearest.
    ahead = tl.sum(tl.where(same & (lane[None, :] < lane[:, None]), 0x40000000 >> lane[None, :], 0), axis=1)
    way = tl.arange(0, LINKED)[None, :]
    older = way - 1 - ones(ahead)[:, None]
    ahead = ahead[:, None] + way * 0
    for i in tl.static_range(LINKED - 1):
        ahead = tl.where(way > i, ahead & (ahead - 1), ahead)
    near = tl.load(positions + (30 - ones((ahead & -ahead) - 1)), mask=ahead != 0, other=NOWHERE)

    heads = arena + head_at(base, key, order, BLOCKS, BUCKETS)
    head = tl.load(heads, mask=known, other=NOWHERE)
    head = tl.where(head != at, head, NOWHERE)
    links = arena + links_at(base, tl.maximum(head, 0), order, BLOCKS)[:, None] + older
    linked = tl.load(links, mask=(head[:, None] >= 0) & (older >= 0), other=NOWHERE)
    linked = tl.where(older < -1, near, tl.where(older == -1, head[:, None], linked))
    tl.debug_barrier()
    tl.store(arena + links_at(base, at, order, BLOCKS)[:, None] + way, linked, mask=real[:, None])
    tl.store(heads, at, mask=known & (last == lane))
