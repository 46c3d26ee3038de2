"""Learning of the mixture from a step, as `mixing.learning` and `successors.update_table` do on the host.

Every row's steps are taken from the weights and the table before the step. `observe` adds the weights' steps up as
whole numbers, and lets each context that was verified claim its row of the tenant's table; `apply` adds the sums to the
weights, and writes the rows. Of several nodes that claim one row the last one of the last sequence has it, be it of the
same context or of another one, as a hint cache may lose one. So no row mixes two contexts, and each GPU that is given
the same has the same table, whatever the order of programs. A context of three tokens or more gets a row once the
shorter one had one before the step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_strategies import successors
from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.learning import PIECE, ROWS_IN_FULL, STATE, rows_of_tenant, whole
from draftwood_strategies.device.kernels.mixing import (
    BATCH,
    BIAS_AT,
    CHANCE_BINS,
    COLUMNS,
    CONTEXTS,
    DRAFTED,
    ESCAPES_AT,
    HAS_DRAFT,
    NODES,
    OF_NODE,
    ORDERS,
    OUTSIDE,
    REGION,
    SLOT_CONTEXTS,
    SLOT_TREES,
    STEADIEST,
    STEADY,
    TAG,
    TAIL,
    TOKENS,
    TOPS,
    TOPS_AT,
    TRUST_AT,
    VERIFIED,
    WAYS,
    WIDTH,
    WRITTEN,
    bucket_of,
    candidates_of,
    extended,
    find,
    source_tree,
    tag_of,
)
from draftwood_strategies.mixing import learning

LEARNS: tl.constexpr = tl.constexpr(numbers.LEARNS)
SEEN_AT: tl.constexpr = tl.constexpr(numbers.SEEN_AT)
WEIGHTS_OF_MIXTURE: tl.constexpr = tl.constexpr(numbers.MIXED)
PIECES: tl.constexpr = tl.constexpr(-(-numbers.MIXED // numbers.WEIGHTS_AT_ONCE))
CLOCK_AT: tl.constexpr = tl.constexpr(numbers.CLOCK_AT)
CLAIMED: tl.constexpr = tl.constexpr(numbers.CLAIMED)
RATE: tl.constexpr = tl.constexpr(learning._RATE)
TRUST_RATE: tl.constexpr = tl.constexpr(learning._TRUST_RATE)
FIRST_RATE: tl.constexpr = tl.constexpr(learning._FIRST_RATE)
FIRST_TOKENS: tl.constexpr = tl.constexpr(learning._FIRST_TOKENS)
GREATEST: tl.constexpr = tl.constexpr(int(learning._GREATEST) << numbers.UNIT_BITS)
LAST_CLOCK: tl.constexpr = tl.constexpr((1 << 31) - 1)
"""Later steps count as this one, after a year: rows are as old as each other then."""
AT_ONCE: tl.constexpr = tl.constexpr(numbers.NODES_AT_ONCE)
LANES: tl.constexpr = tl.constexpr(numbers.NODES_AT_ONCE * successors.ORDERS)
"""Nodes for contexts of each length."""


@triton.jit
def correct(
    arena,
    scratch,
    weights,
    accepted,
    first,
    count,
    token,
    probability,
    place,
    match,
    leads,
    tree_token,
    log_chance,
    bin,
    of_slot,
    of_node,
    left,
    level,
    longest,
    escape,
):
    """Adds up a step of the weights for each of `count` accepted tokens, from number `first` on, which are in the
    slots; see `mixing.learning._correct`.

    Args:
        accepted: where the tokens are.
        token to escape: as of `candidates_of`.
    """
    slot = tl.arange(0, BATCH)
    each = tl.arange(0, TOKENS)
    added = weights + WEIGHTS_OF_MIXTURE
    of_slots = slot < count
    seen = tl.load(arena + weights + SEEN_AT + level * (ORDERS + 1) + longest)
    rate = RATE * ((FIRST_RATE - 1.0) / (tl.cast(seen, tl.float32) / FIRST_TOKENS + 1.0) + 1.0)
    tl.atomic_add(arena + added + SEEN_AT + level * (ORDERS + 1) + longest, slot * 0 + 1, mask=of_slots)

    written = tl.load(accepted + first + each // OF_NODE, mask=each // OF_NODE < count, other=-1)
    hit = (token >= 0) & (token == written)
    node_hit = (of_slot >= 0) & (
        tree_token == tl.load(accepted + first + tl.maximum(of_slot, 0), mask=of_slot >= 0, other=-1)
    )
    in_slot = of_slot[None, :] == slot[:, None]
    hits = tl.max(tl.reshape(tl.cast(hit, tl.int32), (BATCH, OF_NODE)), axis=1)
    hits = tl.maximum(hits, tl.max(tl.where(in_slot & node_hit[None, :], 1, 0), axis=1))
    wrong = tl.where(of_slots, tl.where(hits == 0, 1.0, 0.0) - escape, 0.0)
    tl.atomic_add(arena + added + ESCAPES_AT + level * (ORDERS + 1) + longest, whole(rate * wrong), mask=of_slots)

    gradient = tl.where(token >= 0, tl.where(hit, 1.0, 0.0) - probability, 0.0)
    of_rows = tl.reshape(gradient, (BATCH, OF_NODE))
    by = whole(tl.reshape(of_rows * rate[:, None], (TOKENS,)))
    tl.atomic_add(arena + added + place, by, mask=(token >= 0) & (each // OF_NODE < count))
    alone = tl.reshape(tl.where(leads, gradient, 0.0), (BATCH, OF_NODE))
    trust = (wrong + tl.sum(alone, axis=1)) * left

    of_tree = tl.where(of_slot >= 0, tl.where(node_hit, 1.0, 0.0) - of_node, 0.0)
    trust += tl.sum(tl.where(in_slot, (of_tree * log_chance)[None, :], 0.0), axis=1)
    tl.atomic_add(arena + added + TRUST_AT + level, whole(trust * TRUST_RATE), mask=of_slots & (level > 0))
    its_rate = tl.sum(tl.where(in_slot, rate[:, None], 0.0), axis=0)
    its_level = tl.sum(tl.where(in_slot, level[:, None], 0), axis=0)
    tl.atomic_add(arena + added + BIAS_AT + its_level * CHANCE_BINS + bin, whole(its_rate * of_tree), mask=of_slot >= 0)


@triton.jit
def correct_weights(
    arena,
    scratch,
    weights,
    table,
    mixed,
    draft,
    drafted,
    model_table,
    model_rows,
    tokens,
    count,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Adds up a step of a tenant's weights for each accepted token of a row."""
    tree_token, tree_parent, chance, log_chance, bin = source_tree(arena, draft, drafted, MOST)
    node = tl.arange(0, NODES)
    lane = tl.arange(0, CONTEXTS)
    at = count * 0 - 1
    for first in range(0, count, BATCH):
        more = tl.minimum(count - first, BATCH)
        for step in range(0, more):
            tl.store(arena + scratch + SLOT_TREES + step, at)
            follows = (tree_parent == at) & (tree_token == tl.load(tokens + first + step))
            at = tl.max(tl.where(follows, node, OUTSIDE), axis=0)
        back = first + lane // ORDERS - 1 - lane % ORDERS
        written = tl.load(tokens + back, mask=(back >= 0) & (back < count), other=-1)
        before = tl.load(arena + (mixed + TAIL - 1 - back), mask=back < 0, other=-1)
        tl.store(arena + scratch + SLOT_CONTEXTS + lane, tl.where(back >= 0, written, before))
        tl.debug_barrier()
        found, probability, place, match, leads, of_slot, of_node, left, level, longest, escape = candidates_of(
            arena,
            scratch,
            weights,
            table,
            model_table,
            model_rows,
            count * 0 + 1,
            more,
            tree_token,
            tree_parent,
            chance,
            log_chance,
            bin,
            ROWS,
        )
        correct(
            arena,
            scratch,
            weights,
            tokens,
            first,
            more,
            found,
            probability,
            place,
            match,
            leads,
            tree_token,
            log_chance,
            bin,
            of_slot,
            of_node,
            left,
            level,
            longest,
            escape,
        )
        tl.debug_barrier()


@triton.jit
def claim_rows(
    arena,
    table,
    mixed,
    tokens,
    parents,
    begin,
    size,
    first,
    program,
    ROWS: tl.constexpr,
    TARGETS: tl.constexpr,
    HASHES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Claims a row of the tenant's table for each context that the nodes from number `first` on have, see
    `successors.update_table`.

    Args:
        tokens, parents: int32[...], of which the verified tree begins at `begin` and has `size` nodes; parents are
            counted from the beginning of the arrays. What is no child of its nodes is padding.
    """
    lane = tl.arange(0, LANES)
    node = first + lane // ORDERS
    order = lane % ORDERS
    inside = node < size
    above = tl.load(parents + begin + node, mask=inside, other=-1)
    inside &= (node == 0) | (above >= 0)
    key = tl.cast(lane * 0, tl.int64)
    known = inside
    at = tl.where(inside, node, 0)
    behind = lane * 0
    for back in tl.static_range(ORDERS):
        in_tree = at > 0
        token = tl.load(tokens + begin + at, mask=in_tree, other=-1)
        before = tl.load(arena + mixed + TAIL + behind, mask=at == 0, other=-1)
        token = tl.where(in_tree, token, before)
        behind += tl.where(in_tree, 0, 1)
        at = tl.load(parents + begin + at, mask=in_tree, other=begin) - begin
        at = tl.maximum(at, 0)
        key = tl.where(order >= back, extended(key, token), key)
        known &= (order < back) | (token >= 0)
    row = find(arena + table, ROWS, key, known, COLUMNS)
    ways = bucket_of(key, ROWS)[:, None] + tl.arange(0, WAYS)[None, :]
    age = tl.load(arena + table + ways * COLUMNS + WRITTEN, mask=known[:, None], other=0)
    # Of rows that are as old, each context takes another one.
    turn = (tl.cast(key & (WAYS - 1), tl.int32)[:, None] + ways) % WAYS
    age = (tl.cast(age, tl.int64) * WAYS + turn) * WAYS + ways % WAYS
    oldest = bucket_of(key, ROWS) + tl.cast(tl.min(age, axis=1) % WAYS, tl.int32)

    had = tl.reshape(tl.cast(row >= 0, tl.int32), (AT_ONCE, ORDERS))
    orders = tl.arange(0, ORDERS)[None, :]
    missing = tl.min(tl.where((orders > 0) & (had == 0), orders, ORDERS), axis=1)
    reached = tl.reshape(tl.cast(orders <= missing[:, None], tl.int32), (LANES,)) > 0
    known &= reached
    target = tl.where(row >= 0, row * 2, oldest * 2 + 1)
    claim = (program * (MOST + 1) + node) * ORDERS + order + 1
    tl.atomic_max(arena + table + (target // 2) * COLUMNS + CLAIMED, claim, mask=known)
    there = mixed + first * ORDERS + lane
    stored = node <= MOST
    tl.store(arena + there + TARGETS, tl.where(known, target, -1), mask=stored)
    tl.store(arena + there + HASHES, tag_of(key), mask=stored)


@triton.jit(do_not_specialize=["n", "stride", "model_rows"])
def observe(
    arena,
    model_table,
    rows,
    tokens,
    counts,
    sources,
    tree_tokens,
    tree_parents,
    offsets,
    n,
    stride,
    model_rows,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    DRAFTS: tl.constexpr,
    SCRATCH: tl.constexpr,
    MIXED: tl.constexpr,
    MIXTURE: tl.constexpr,
    TABLE: tl.constexpr,
    TARGETS: tl.constexpr,
    HASHES: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    SCRATCH_SIZE: tl.constexpr,
    MIXED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Adds up the steps of the weights from the latest draft of each row that learns, and claims rows of its tenant's
    table. The first program of a row does the one, the others do the other, `AT_ONCE` nodes each.

    Args:
        arena to model_rows, WEIGHTS to TABLE: as for `mix`.
        rows, counts: int32[n], negative for none, and how many tokens each accepted; 0 leaves a row as it is.
        tokens: int32[n, stride].
        sources: int32[n], of each row the number of its verified tree.
        tree_tokens, tree_parents: as for `claim_rows`.
        offsets: int32[...], where each tree begins, and where the last one ends.
        TARGETS, HASHES: see `arena.TOPS_AT`.
        RUNS: so many rows are looked at at a time, a power of two.
    """
    program = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + program)
    if row < 0:
        return
    state = STATES + tl.cast(row, tl.int64) * STATE
    region = tl.load(arena + state + REGION)
    if region < 0:
        return
    weights = WEIGHTS + tl.cast(region, tl.int64) * WEIGHTS_SIZE
    table = weights + TABLE
    weights += MIXTURE
    mixed = MIXED + tl.cast(row, tl.int64) * MIXED_SIZE
    if piece == 0:
        _, earlier = rows_of_tenant(arena, rows, n, program, region, STATES, RUNS)
        if earlier == 0:
            clock = tl.load(arena + weights + CLOCK_AT)
            tl.store(arena + weights + CLOCK_AT, tl.minimum(clock, LAST_CLOCK - 1) + 1)
    count = tl.load(counts + program)
    if (count < 1) | (tl.load(arena + state + LEARNS) == 0):
        return
    if piece == 0:
        if tl.load(arena + mixed + HAS_DRAFT) > 0:
            correct_weights(
                arena,
                SCRATCH + tl.cast(row, tl.int64) * SCRATCH_SIZE,
                weights,
                table,
                mixed,
                DRAFTS + tl.cast(row, tl.int64) * (5 * MOST),
                tl.load(arena + state + DRAFTED),
                model_table,
                model_rows,
                tokens + program * stride,
                count,
                ROWS,
                MOST,
            )
    else:
        tree = tl.load(sources + program)
        begin = tl.load(offsets + tree)
        size = tl.minimum(tl.load(offsets + tree + 1) - begin, MOST + 1)
        first = (piece - 1) * AT_ONCE
        if first < size:
            claim_rows(
                arena,
                table,
                mixed,
                tree_tokens,
                tree_parents,
                begin,
                size,
                first,
                program,
                ROWS,
                TARGETS,
                HASHES,
                MOST,
            )


@triton.jit
def write_rows(
    arena,
    table,
    mixed,
    clock,
    top_tokens,
    top_stride,
    begin,
    size,
    first,
    program,
    TARGETS: tl.constexpr,
    HASHES: tl.constexpr,
    MOST: tl.constexpr,
):
    """Writes the rows of the tenant's table that nodes from number `first` on have claimed."""
    lane = tl.arange(0, LANES)
    node = first + lane // ORDERS
    target = tl.load(arena + mixed + first * ORDERS + lane + TARGETS, mask=node < size, other=-1)
    at = table + tl.maximum(target, 0) // 2 * COLUMNS
    claim = (program * (MOST + 1) + node) * ORDERS + lane % ORDERS + 1
    mine = (target >= 0) & (tl.load(arena + at + CLAIMED, mask=target >= 0, other=0) == claim)
    best = tl.load(top_tokens + (begin + node) * top_stride, mask=mine, other=-1)
    was = tl.load(arena + at, mask=mine, other=-1)
    steady = tl.load(arena + at + STEADY, mask=mine, other=0)
    steady = tl.where((target % 2 == 0) & (was == best), tl.minimum(steady + 1, STEADIEST), 0)
    tl.debug_barrier()
    rank = tl.arange(0, WIDTH)[None, :]
    top = tl.load(top_tokens + (begin + node)[:, None] * top_stride + rank, mask=mine[:, None], other=-1)
    tl.store(arena + at[:, None] + rank, top, mask=mine[:, None])
    tag = tl.load(arena + mixed + first * ORDERS + lane + HASHES, mask=mine, other=0)
    tl.store(arena + at + TAG, tag, mask=mine)
    tl.store(arena + at + WRITTEN, lane * 0 + clock, mask=mine)
    tl.store(arena + at + STEADY, steady, mask=mine)
    tl.store(arena + at + CLAIMED, lane * 0, mask=mine)


@triton.jit
def move_on(arena, mixed, tokens, count, tree_parents, top_tokens, top_stride, begin, size):
    """The row ends with the accepted tokens now, and has the top tokens of all nodes that are no padding."""
    back = tl.arange(0, ORDERS)
    written = tl.load(tokens + (count - 1 - back), mask=back < count, other=-1)
    before = tl.load(arena + (mixed + TAIL + back - count), mask=back >= count, other=-1)
    node = tl.arange(0, VERIFIED)
    above = tl.load(tree_parents + begin + node, mask=node < size, other=-1)
    real = (node < size) & ((node == 0) | (above >= 0))
    at = mixed + TOPS_AT + (tl.cumsum(tl.cast(real, tl.int32), axis=0) - 1) * WIDTH
    rank = tl.arange(0, WIDTH)[None, :]
    top = tl.load(top_tokens + (begin + node)[:, None] * top_stride + rank, mask=real[:, None], other=-1)
    tl.debug_barrier()
    tl.store(arena + mixed + TAIL + back, tl.where(back < count, written, before))
    tl.store(arena + at[:, None] + rank, top, mask=real[:, None])
    tl.store(arena + mixed + TOPS, tl.sum(tl.cast(real, tl.int32), axis=0))
    tl.store(arena + mixed + HAS_DRAFT, 0)


@triton.jit(do_not_specialize=["n", "stride", "top_stride"])
def apply(
    arena,
    rows,
    tokens,
    counts,
    sources,
    tree_parents,
    top_tokens,
    offsets,
    n,
    stride,
    top_stride,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    MIXED: tl.constexpr,
    MIXTURE: tl.constexpr,
    TABLE: tl.constexpr,
    TARGETS: tl.constexpr,
    HASHES: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    MIXED_SIZE: tl.constexpr,
    MOST: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Adds to the weights of each tenant what its rows of a step added up, writes the rows of its table that they
    claimed, and moves the rows on. The first program of a row does all but the table, the others `AT_ONCE` nodes each.

    Args:
        arena to offsets, WEIGHTS to RUNS: as for `observe`.
        top_tokens: int32[..., top_stride], the most probable tokens after each of the trees' nodes.
    """
    program = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.load(rows + program)
    if row < 0:
        return
    count = tl.load(counts + program)
    state = STATES + tl.cast(row, tl.int64) * STATE
    region = tl.load(arena + state + REGION)
    learns = tl.where((region >= 0) & (count > 0), tl.load(arena + state + LEARNS), 0)
    weights = WEIGHTS + tl.cast(tl.maximum(region, 0), tl.int64) * WEIGHTS_SIZE + MIXTURE
    table = weights - MIXTURE + TABLE
    mixed = MIXED + tl.cast(row, tl.int64) * MIXED_SIZE
    tree = tl.load(sources + program)
    begin = tl.load(offsets + tree)
    size = tl.minimum(tl.load(offsets + tree + 1) - begin, MOST + 1)
    first = (piece - 1) * AT_ONCE
    if piece > 0:
        if (learns > 0) & (first < size):
            clock = tl.load(arena + weights + CLOCK_AT)
            write_rows(
                arena,
                table,
                mixed,
                clock,
                top_tokens,
                top_stride,
                begin,
                size,
                first,
                program,
                TARGETS,
                HASHES,
                MOST,
            )
        return
    if count > 0:
        move_on(arena, mixed, tokens + program * stride, count, tree_parents, top_tokens, top_stride, begin, size)
    if region < 0:
        return
    same, earlier = rows_of_tenant(arena, rows, n, program, region, STATES, RUNS)
    if earlier > 0:
        return
    for part in range(0, PIECES):
        number = part * PIECE + tl.arange(0, PIECE)
        at = arena + weights + number
        inside = number < WEIGHTS_OF_MIXTURE
        added = tl.load(at + WEIGHTS_OF_MIXTURE, mask=inside, other=0)
        share = tl.cast(added, tl.float32) * (tl.cast(tl.minimum(same, ROWS_IN_FULL), tl.float32) / same)
        value = tl.load(at, mask=inside, other=0)
        seen = value + added
        value += tl.cast(tl.floor(share + 0.5), tl.int32)
        value = tl.where(number < SEEN_AT, tl.minimum(tl.maximum(value, -GREATEST), GREATEST), seen)
        tl.store(at, value, mask=inside & (added != 0))
        tl.store(at + WEIGHTS_OF_MIXTURE, added * 0, mask=inside & (added != 0))
