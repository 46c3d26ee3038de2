"""Drafts of the mixture for all rows of a step, as `mixing.candidates` and `mixing.drafting` make them: one program
a row.

The draft is a list of nodes, the most probable first. The best of those that are not expanded yet are expanded `BATCH`
at a time, and their children take their places in the list. As a score depends on the path alone, the nodes that are
left are those of the host, which takes one node after the other. What a lane writes for others goes through the row's
scratch space.
"""

from __future__ import annotations

from itertools import accumulate

import triton
import triton.language as tl

from draftwood_strategies import successors
from draftwood_strategies.device import arena as numbers
from draftwood_strategies.device.kernels.common import UNIT, as_bits, as_float
from draftwood_strategies.mixing import candidates, drafting

ORDERS: tl.constexpr = tl.constexpr(successors.ORDERS)
WIDTH: tl.constexpr = tl.constexpr(successors.WIDTH)
TAG: tl.constexpr = tl.constexpr(successors.TAG)
WRITTEN: tl.constexpr = tl.constexpr(successors.WRITTEN)
STEADY: tl.constexpr = tl.constexpr(successors.STEADY)
STEADIEST: tl.constexpr = tl.constexpr(successors.STEADY_BINS - 1)
MODEL_COLUMNS: tl.constexpr = tl.constexpr(successors.COLUMNS)
COLUMNS: tl.constexpr = tl.constexpr(numbers.TABLE_COLUMNS)
WAYS: tl.constexpr = tl.constexpr(successors._BUCKET)
OF_BUCKET: tl.constexpr = tl.constexpr(-successors._BUCKET)
CHANCE_BINS: tl.constexpr = tl.constexpr(candidates.CHANCE_BINS)
LEAST_CHANCE: tl.constexpr = tl.constexpr(candidates.LEAST_CHANCE)
LEAST_LEFT: tl.constexpr = tl.constexpr(candidates._LEAST_LEFT)
BEST_CHANCE: tl.constexpr = tl.constexpr(drafting._BEST_CHANCE)
OUTSIDE: tl.constexpr = tl.constexpr(candidates.OUTSIDE)
ESCAPES_AT: tl.constexpr = tl.constexpr(numbers.MIXED_ESCAPES_AT)
TRUST_AT: tl.constexpr = tl.constexpr(numbers.TRUST_AT)
BIAS_AT: tl.constexpr = tl.constexpr(numbers.BIAS_AT)
TAIL: tl.constexpr = tl.constexpr(numbers.TAIL)
TOPS: tl.constexpr = tl.constexpr(numbers.TOPS)
TOPS_AT: tl.constexpr = tl.constexpr(numbers.TOPS_AT)
HAS_DRAFT: tl.constexpr = tl.constexpr(numbers.HAS_DRAFT)
STATE: tl.constexpr = tl.constexpr(numbers.STATE)
REGION: tl.constexpr = tl.constexpr(numbers.REGION)
DRAFTED: tl.constexpr = tl.constexpr(numbers.DRAFTED)
NODES: tl.constexpr = tl.constexpr(numbers.MOST_NODES)
VERIFIED: tl.constexpr = tl.constexpr(2 * numbers.MOST_NODES)
"""Lanes for the nodes of a verified tree: one more than a draft has."""
POOL: tl.constexpr = tl.constexpr(numbers.POOL)
CHUNK: tl.constexpr = tl.constexpr(16)
_BATCH = 8
BATCH: tl.constexpr = tl.constexpr(_BATCH)
"""Nodes that are expanded side by side."""
OF_NODE: tl.constexpr = tl.constexpr(successors.ORDERS * successors.WIDTH)
"""Successors of the rows of a node."""
CONTEXTS: tl.constexpr = tl.constexpr(_BATCH * successors.ORDERS)
TOKENS: tl.constexpr = tl.constexpr(_BATCH * successors.ORDERS * successors.WIDTH)
NEVER: tl.constexpr = tl.constexpr(-1e30)
"""A logit."""
assert _BATCH * successors.ORDERS * successors.WIDTH + numbers.MOST_NODES <= numbers.POOL

# Parts of the row's scratch space, and where they begin.
_LIST = numbers.MOST_NODES + 16
_SIZES = (
    _BATCH * successors.ORDERS,
    *4 * (_BATCH,),
    *3 * (_BATCH * successors.ORDERS,),
    *3 * (_BATCH * successors.ORDERS * successors.WIDTH,),
    numbers.MOST_NODES,
    *6 * (_LIST,),
    _LIST * successors.ORDERS,
    *4 * (numbers.POOL,),
)
(
    SLOT_CONTEXTS,
    SLOT_TREES,
    SLOT_NODES,
    SLOT_LEVELS,
    SLOT_LONGEST,
    OWN_ROWS,
    MODEL_ROWS,
    STEADINESS,
    SLOT_TOKENS,
    SLOT_WEIGHTS,
    SLOT_MATCHES,
    TREE_PARTS,
    LIST_SCORES,
    LIST_TOKENS,
    LIST_PARENTS,
    LIST_TREES,
    LIST_DONE,
    LIST_MOVED,
    LIST_CONTEXTS,
    POOL_SCORES,
    POOL_TOKENS,
    POOL_PARENTS,
    POOL_TREES,
    _END,
) = (tl.constexpr(begin) for begin in accumulate(_SIZES, initial=0))
assert sum(_SIZES) <= numbers.SCRATCH
ROOT: tl.constexpr = NODES
"""The place in the list of what the draft follows."""


@triton.jit
def extended(key, token):
    """As `successors.extended`, for lanes of int64."""
    x = (key * 0x2545F491 + tl.cast(token, tl.int64) + 0x3C6EF35F) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x05EBCA6B) & 0xFFFFFFFF
    return x ^ (x >> 13)


@triton.jit
def tag_of(key):
    """What a row has of the hash of its context."""
    return tl.cast(key - 0x80000000, tl.int32)


@triton.jit
def bucket_of(key, rows):
    """The first row of a context's bucket."""
    return tl.cast(((key * 0x9E3779B1) >> 12) & (rows - 1) & OF_BUCKET, tl.int32)


@triton.jit
def find(table, rows, key, mask, COLUMNS_: tl.constexpr):
    """As `successors.find`, for lanes: the rows of contexts in the table at a pointer."""
    ways = bucket_of(key, rows)[:, None] + tl.arange(0, WAYS)[None, :]
    tag = tl.load(table + ways * COLUMNS_ + TAG, mask=mask[:, None], other=0)
    written = tl.load(table + ways * COLUMNS_ + WRITTEN, mask=mask[:, None], other=0)
    return tl.max(tl.where(mask[:, None] & (tag == tag_of(key)[:, None]) & (written > 0), ways, -1), axis=1)


@triton.jit
def source_tree(arena, draft, size, MOST: tl.constexpr):
    """The trie's draft: of each node the token, the parent, the probability once its parent is accepted, see
    `candidates.add_source`, the logarithm and the bin of that."""
    lane = tl.arange(0, NODES)
    inside = lane < size
    token = tl.load(arena + draft + lane, mask=inside, other=-1)
    parent = tl.load(arena + draft + MOST + lane, mask=inside, other=-3)
    score = as_float(tl.load(arena + draft + 4 * MOST + lane, mask=inside, other=0))
    above = tl.load(arena + draft + 4 * MOST + tl.maximum(parent, 0), mask=parent >= 0, other=as_bits(1.0))
    chance = score / tl.maximum(as_float(above), 1e-30)
    chance = tl.minimum(tl.maximum(chance, LEAST_CHANCE), 1.0)
    bin = tl.floor(tl.log(chance / (1.0 + 1e-6 - chance)) + 4.0)
    bin = tl.cast(tl.minimum(tl.maximum(bin, 0.0), CHANCE_BINS - 1.0), tl.int32)
    return token, parent, chance, tl.log(chance), bin


@triton.jit
def candidates_of(
    arena,
    scratch,
    weights,
    table,
    model_table,
    model_rows,
    has_table,
    count,
    tree_token,
    tree_parent,
    chance,
    log_chance,
    bin,
    ROWS: tl.constexpr,
):
    """The candidates after the `count` nodes whose contexts and places in the trie's tree are in the slots, as
    `candidates.collect` finds them, and their probabilities.

    Args:
        weights, table: where the tenant's are in the arena.
        has_table: 1 if it has one.
        tree_token to bin: as of `source_tree`.
        ROWS: of the tenant's table.

    Returns:
        For each successor in the rows of a slot its token, -1 for none, its probability, where its weight is among the
        others, the tree's node that has the same token, -1 for none, and whether it stands for all of its token. For
        each of the tree's nodes its slot, -1 for none, and its probability. For each slot what the source leaves over,
        its level and longest known context, and the probability of the escape.
    """
    slot = tl.arange(0, BATCH)
    tree = tl.load(arena + scratch + SLOT_TREES + slot)
    child = (tree_parent[None, :] == tree[:, None]) & (slot < count)[:, None]
    of_children = tl.where(child, chance[None, :], 0.0)
    best = tl.max(of_children, axis=1)
    level = tl.where(best <= 0.0, 0, tl.where(best < 0.3, 1, tl.where(best < 0.8, 2, 3)))
    left = tl.log(tl.maximum(1.0 - tl.sum(of_children, axis=1), LEAST_LEFT))

    lane = tl.arange(0, CONTEXTS)
    order = lane % ORDERS
    open = lane // ORDERS < count
    key = tl.cast(lane * 0, tl.int64)
    for back in tl.static_range(ORDERS):
        token = tl.load(arena + scratch + SLOT_CONTEXTS + (lane // ORDERS) * ORDERS + back)
        key = tl.where(order >= back, extended(key, token), key)
        open &= (order < back) | (token >= 0)
    own = find(arena + table, ROWS, key, open & (lane * 0 + has_table > 0), COLUMNS)
    models = find(model_table, model_rows, key, open & (own < 0), MODEL_COLUMNS)
    known = (own >= 0) | (models >= 0)
    steady = tl.load(arena + table + tl.maximum(own, 0) * COLUMNS + STEADY, mask=own >= 0, other=0)
    steady += tl.load(model_table + tl.maximum(models, 0) * MODEL_COLUMNS + STEADY, mask=models >= 0, other=0)
    longest = tl.max(tl.reshape(tl.where(known, order + 1, 0), (BATCH, ORDERS)), axis=1)
    tl.store(arena + scratch + OWN_ROWS + lane, own)
    tl.store(arena + scratch + MODEL_ROWS + lane, models)
    tl.store(arena + scratch + STEADINESS + lane, tl.minimum(tl.maximum(steady, 0), STEADIEST))
    tl.store(arena + scratch + SLOT_LEVELS + slot, level)
    tl.store(arena + scratch + SLOT_LONGEST + slot, longest)
    tl.debug_barrier()

    each = tl.arange(0, TOKENS)
    rank = each % WIDTH
    at = each // WIDTH
    own = tl.load(arena + scratch + OWN_ROWS + at)
    models = tl.load(arena + scratch + MODEL_ROWS + at)
    token = tl.load(arena + table + tl.maximum(own, 0) * COLUMNS + rank, mask=own >= 0, other=-1)
    models = tl.where(own >= 0, -1, models)
    token = tl.where(
        models >= 0,
        tl.load(model_table + tl.maximum(models, 0) * MODEL_COLUMNS + rank, mask=models >= 0, other=-1),
        token,
    )
    place = tl.load(arena + scratch + SLOT_LEVELS + each // OF_NODE) * (ORDERS + 1)
    place = (place + tl.load(arena + scratch + SLOT_LONGEST + each // OF_NODE)) * ORDERS + at % ORDERS
    place = (place * (STEADIEST + 1) + tl.load(arena + scratch + STEADINESS + at)) * WIDTH + rank
    weight = tl.cast(tl.load(arena + weights + place, mask=token >= 0, other=0), tl.float32) / UNIT
    tl.store(arena + scratch + SLOT_TOKENS + each, token)
    tl.store(arena + scratch + SLOT_WEIGHTS + each, as_bits(weight))
    tl.store(arena + scratch + SLOT_MATCHES + each, each * 0 - 1)
    tl.debug_barrier()

    # What the tree's nodes get of the table, and which successors they are.
    node = tl.arange(0, NODES)
    of_slot = tl.max(tl.where(child, slot[:, None], -1), axis=0)
    is_child = of_slot >= 0
    of_level = tl.load(arena + scratch + SLOT_LEVELS + tl.maximum(of_slot, 0))
    trust = tl.cast(tl.load(arena + weights + TRUST_AT + of_level), tl.float32) / UNIT
    bias = tl.cast(tl.load(arena + weights + BIAS_AT + of_level * CHANCE_BINS + bin), tl.float32) / UNIT
    part = trust * log_chance + bias
    tl.store(arena + scratch + TREE_PARTS + node, as_bits(part))
    node_logit = part
    column = tl.arange(0, WIDTH)[None, :]
    for back in tl.static_range(ORDERS):
        other = tl.maximum(of_slot, 0)[:, None] * OF_NODE + back * WIDTH + column
        same = tl.load(arena + scratch + SLOT_TOKENS + other) == tree_token[:, None]
        same &= is_child[:, None]
        of_weight = as_float(tl.load(arena + scratch + SLOT_WEIGHTS + other))
        node_logit += tl.sum(tl.where(same, of_weight, 0.0), axis=1)
        tl.store(arena + scratch + SLOT_MATCHES + other, node[:, None] + column * 0, mask=same)
    tl.debug_barrier()

    # Successors with the same token in several rows of a node are one candidate.
    match = tl.load(arena + scratch + SLOT_MATCHES + each)
    trust = tl.cast(tl.load(arena + weights + TRUST_AT + level), tl.float32) / UNIT
    without = tl.where(level > 0, trust * left, 0.0)
    shared = tl.reshape(without[:, None] + tl.reshape(weight * 0.0, (BATCH, OF_NODE)), (TOKENS,))
    logit = tl.where(match >= 0, as_float(tl.load(arena + scratch + TREE_PARTS + tl.maximum(match, 0))), shared)
    first = each * 0 + OF_NODE
    for back in tl.static_range(ORDERS):
        other = (each // OF_NODE * OF_NODE + back * WIDTH)[:, None] + column
        same = tl.load(arena + scratch + SLOT_TOKENS + other) == token[:, None]
        of_weight = as_float(tl.load(arena + scratch + SLOT_WEIGHTS + other))
        logit += tl.sum(tl.where(same, of_weight, 0.0), axis=1)
        first = tl.minimum(first, tl.min(tl.where(same, back * WIDTH + column, OF_NODE), axis=1))
    leads = (token >= 0) & (match < 0) & (first == each % OF_NODE)

    escapes = tl.cast(tl.load(arena + weights + ESCAPES_AT + level * (ORDERS + 1) + longest), tl.float32) / UNIT
    escape = without + escapes
    of_rows = tl.reshape(tl.where(leads, logit, NEVER), (BATCH, OF_NODE))
    of_nodes = tl.where(child, node_logit[None, :], NEVER)
    top = tl.maximum(tl.maximum(escape, tl.max(of_rows, axis=1)), tl.max(of_nodes, axis=1))
    of_nodes = tl.exp(of_nodes - top[:, None])
    total = tl.exp(escape - top) + tl.sum(tl.exp(of_rows - top[:, None]), axis=1) + tl.sum(of_nodes, axis=1)
    probability = tl.exp(tl.reshape(logit, (BATCH, OF_NODE)) - top[:, None]) / total[:, None]
    probability = tl.reshape(probability, (TOKENS,))
    of_node = tl.sum(tl.where(child, of_nodes / total[:, None], 0.0), axis=0)
    return (
        token,
        tl.where(token >= 0, probability, 0.0),
        place,
        match,
        leads,
        of_slot,
        of_node,
        left,
        level,
        longest,
        tl.exp(escape - top) / total,
    )


@triton.jit
def offer(arena, scratch, size, budget, token, score, leads, of_slot, tree_token, of_node):
    """Gives the candidates of all slots their places in the list, if they are among the `budget` best; returns how many
    nodes it has now."""
    each = tl.arange(0, TOKENS)
    node = tl.arange(0, NODES)
    floor = as_float(tl.load(arena + scratch + LIST_SCORES + (budget - 1)))
    floor = tl.where(size >= budget, floor, -1.0)
    above = tl.load(arena + scratch + SLOT_NODES + each // OF_NODE)
    node_above = tl.load(arena + scratch + SLOT_NODES + tl.maximum(of_slot, 0))
    node_score = of_node * as_float(tl.load(arena + scratch + LIST_SCORES + node_above, mask=of_slot >= 0, other=0))
    leads &= score > floor
    at = tl.cumsum(tl.cast(leads, tl.int32), axis=0) - 1
    taken = tl.sum(tl.cast(leads, tl.int32), axis=0)
    tl.store(arena + scratch + POOL_SCORES + at, as_bits(score), mask=leads)
    tl.store(arena + scratch + POOL_TOKENS + at, token, mask=leads)
    tl.store(arena + scratch + POOL_PARENTS + at, above, mask=leads)
    tl.store(arena + scratch + POOL_TREES + at, each * 0 + OUTSIDE, mask=leads)
    leads = (of_slot >= 0) & (node_score > floor)
    at = tl.cumsum(tl.cast(leads, tl.int32), axis=0) - 1 + taken
    pool_size = taken + tl.sum(tl.cast(leads, tl.int32), axis=0)
    tl.store(arena + scratch + POOL_SCORES + at, as_bits(node_score), mask=leads)
    tl.store(arena + scratch + POOL_TOKENS + at, tree_token, mask=leads)
    tl.store(arena + scratch + POOL_PARENTS + at, node_above, mask=leads)
    tl.store(arena + scratch + POOL_TREES + at, node, mask=leads)
    tl.debug_barrier()

    pool = tl.arange(0, POOL)
    inside = pool < pool_size
    score = as_float(tl.load(arena + scratch + POOL_SCORES + pool, mask=inside, other=as_bits(-1.0)))
    own = as_float(tl.load(arena + scratch + LIST_SCORES + node, mask=node < size, other=as_bits(-1.0)))
    place = pool * 0
    for begin in range(0, size, CHUNK):
        other = begin + tl.arange(0, CHUNK)[None, :]
        of_score = as_float(tl.load(arena + scratch + LIST_SCORES + other, mask=other < size, other=as_bits(-2.0)))
        place += tl.sum(tl.cast(of_score >= score[:, None], tl.int32), axis=1)
    moved = node
    for begin in range(0, pool_size, CHUNK):
        other = begin + tl.arange(0, CHUNK)[None, :]
        of_score = as_float(tl.load(arena + scratch + POOL_SCORES + other, mask=other < pool_size, other=as_bits(-2.0)))
        wins = (of_score > score[:, None]) | ((of_score == score[:, None]) & (other < pool[:, None]))
        place += tl.sum(tl.cast(wins, tl.int32), axis=1)
        moved += tl.sum(tl.cast(of_score > own[:, None], tl.int32), axis=1)
    tl.store(arena + scratch + LIST_MOVED + node, moved)
    tl.store(arena + scratch + LIST_MOVED + ROOT, ROOT)
    tl.debug_barrier()
    kept = inside & (place < budget)
    stays = (node < size) & (moved < budget)
    above = tl.load(arena + scratch + POOL_PARENTS + pool, mask=kept, other=ROOT)
    second = tl.load(arena + scratch + LIST_CONTEXTS + above * ORDERS)
    third = tl.load(arena + scratch + LIST_CONTEXTS + above * ORDERS + 1)
    fourth = tl.load(arena + scratch + LIST_CONTEXTS + above * ORDERS + 2)
    above = tl.load(arena + scratch + LIST_MOVED + above)
    token = tl.load(arena + scratch + POOL_TOKENS + pool, mask=kept, other=0)
    tree = tl.load(arena + scratch + POOL_TREES + pool, mask=kept, other=0)
    own_token = tl.load(arena + scratch + LIST_TOKENS + node, mask=stays, other=0)
    own_above = tl.load(arena + scratch + LIST_PARENTS + node, mask=stays, other=ROOT)
    own_above = tl.load(arena + scratch + LIST_MOVED + own_above)
    own_tree = tl.load(arena + scratch + LIST_TREES + node, mask=stays, other=0)
    own_done = tl.load(arena + scratch + LIST_DONE + node, mask=stays, other=0)
    back = tl.arange(0, ORDERS)[None, :]
    context = scratch + LIST_CONTEXTS + back
    own_context = tl.load(arena + context + node[:, None] * ORDERS, mask=stays[:, None], other=0)
    tl.debug_barrier()
    tl.store(arena + scratch + LIST_SCORES + moved, as_bits(own), mask=stays)
    tl.store(arena + scratch + LIST_TOKENS + moved, own_token, mask=stays)
    tl.store(arena + scratch + LIST_PARENTS + moved, own_above, mask=stays)
    tl.store(arena + scratch + LIST_TREES + moved, own_tree, mask=stays)
    tl.store(arena + scratch + LIST_DONE + moved, own_done, mask=stays)
    tl.store(arena + context + moved[:, None] * ORDERS, own_context, mask=stays[:, None])
    tl.store(arena + scratch + LIST_SCORES + place, as_bits(score), mask=kept)
    tl.store(arena + scratch + LIST_TOKENS + place, token, mask=kept)
    tl.store(arena + scratch + LIST_PARENTS + place, above, mask=kept)
    tl.store(arena + scratch + LIST_TREES + place, tree, mask=kept)
    tl.store(arena + scratch + LIST_DONE + place, token * 0, mask=kept)
    tl.store(arena + scratch + LIST_CONTEXTS + place * ORDERS, token, mask=kept)
    tl.store(arena + scratch + LIST_CONTEXTS + place * ORDERS + 1, second, mask=kept)
    tl.store(arena + scratch + LIST_CONTEXTS + place * ORDERS + 2, third, mask=kept)
    tl.store(arena + scratch + LIST_CONTEXTS + place * ORDERS + 3, fourth, mask=kept)
    tl.debug_barrier()
    return tl.minimum(budget, size + pool_size)


@triton.jit
def choose(arena, scratch, size, budget):
    """Puts the best nodes that are not expanded into the slots; returns how many. What scores no more than the last one
    of a full list has no child in it."""
    node = tl.arange(0, NODES)
    score = as_float(tl.load(arena + scratch + LIST_SCORES + node, mask=node < size, other=as_bits(-1.0)))
    floor = as_float(tl.load(arena + scratch + LIST_SCORES + (budget - 1)))
    open = (node < size) & ((score > floor) | (node * 0 + size < budget))
    open &= tl.load(arena + scratch + LIST_DONE + node, mask=node < size, other=1) == 0
    slot = tl.cumsum(tl.cast(open, tl.int32), axis=0) - 1
    open &= slot < BATCH
    tl.store(arena + scratch + SLOT_NODES + slot, node, mask=open)
    tl.store(arena + scratch + LIST_DONE + node, node * 0 + 1, mask=open)
    tl.debug_barrier()
    return tl.sum(tl.cast(open, tl.int32), axis=0)


@triton.jit
def load_slots(arena, scratch):
    """Copies of the nodes in the slots their contexts and their places in the trie's tree; those of unused slots are
    any node's."""
    slot = tl.arange(0, BATCH)
    tree = tl.load(arena + scratch + LIST_TREES + tl.load(arena + scratch + SLOT_NODES + slot))
    tl.store(arena + scratch + SLOT_TREES + slot, tree)
    lane = tl.arange(0, CONTEXTS)
    node = tl.load(arena + scratch + SLOT_NODES + lane // ORDERS)
    token = tl.load(arena + scratch + LIST_CONTEXTS + node * ORDERS + lane % ORDERS)
    tl.store(arena + scratch + SLOT_CONTEXTS + lane, token)
    tl.debug_barrier()


@triton.jit
def fill(arena, scratch, mixed, size, budget):
    """As `drafting.fill`: adds the latest top tokens at the root; returns how many nodes the list has now."""
    node = tl.arange(0, NODES)
    is_root = (node < size) & (tl.load(arena + scratch + LIST_PARENTS + node) == ROOT)
    of_root = tl.where(is_root, as_float(tl.load(arena + scratch + LIST_SCORES + node)), 0.0)
    left = tl.maximum(1.0 - tl.sum(of_root, axis=0), 0.0) * BEST_CHANCE
    tops = tl.load(arena + mixed + TOPS)
    lane = tl.arange(0, VERIFIED)
    rank = size * 0
    added = size * 0
    while (rank < WIDTH) & (size < budget) & (tops > 0):
        of_rank = mixed + TOPS_AT + rank
        token = tl.load(arena + of_rank + lane * WIDTH, mask=lane < tops, other=-1)
        open = lane < tops
        for begin in range(0, tops, CHUNK):
            other = begin + tl.arange(0, CHUNK)[None, :]
            earlier = tl.load(arena + of_rank + other * WIDTH, mask=other < tops, other=-2)
            same = (earlier == token[:, None]) & (other < lane[:, None])
            open &= tl.sum(tl.cast(same, tl.int32), axis=1) == 0
        for begin in range(0, size, CHUNK):
            other = begin + tl.arange(0, CHUNK)[None, :]
            there = tl.load(arena + scratch + LIST_TOKENS + other, mask=other < size, other=-2)
            above = tl.load(arena + scratch + LIST_PARENTS + other, mask=other < size, other=-2)
            open &= tl.sum(tl.cast((there == token[:, None]) & (above == ROOT), tl.int32), axis=1) == 0
        place = tl.cumsum(tl.cast(open, tl.int32), axis=0) - 1
        more = tl.minimum(tl.sum(tl.cast(open, tl.int32), axis=0), budget - size)
        open &= place < more
        score = left / tl.cast(place + added + 1, tl.float32)
        tl.store(arena + scratch + LIST_SCORES + size + place, as_bits(score), mask=open)
        tl.store(arena + scratch + LIST_TOKENS + size + place, token, mask=open)
        tl.store(arena + scratch + LIST_PARENTS + size + place, lane * 0 + ROOT, mask=open)
        tl.debug_barrier()
        size += more
        added += more
        rank += 1
    return size


@triton.jit(do_not_specialize=["stride", "model_rows"])
def mix(
    arena,
    model_table,
    rows,
    budgets,
    tokens,
    parents,
    scores,
    sizes,
    stride,
    model_rows,
    WEIGHTS: tl.constexpr,
    STATES: tl.constexpr,
    DRAFTS: tl.constexpr,
    SCRATCH: tl.constexpr,
    MIXED: tl.constexpr,
    MIXTURE: tl.constexpr,
    TABLE: tl.constexpr,
    WEIGHTS_SIZE: tl.constexpr,
    SCRATCH_SIZE: tl.constexpr,
    MIXED_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MOST: tl.constexpr,
    TENANTS: tl.constexpr,
):
    """Writes the drafts of the rows of a step that mix, from the trie's drafts of this step.

    Args:
        arena: int32, see `arena.Layout`, of which `WEIGHTS` to `MIXED` are offsets, and `MIXTURE` and `TABLE` those in
            a tenant's weights.
        model_table: int32[model_rows, MODEL_COLUMNS], the model's successor table.
        rows, budgets: int32[b], the row of each program, negative for none, and the most nodes of its draft.
        tokens, parents: int32[b, stride], out.
        scores: float32[b, stride], out.
        sizes: int32[b], out: how many nodes each draft has. All stay as they are where a row is negative.
        ROWS: of a tenant's table.
        MOST: nodes of a draft that the arena has space for.
    """
    program = tl.program_id(0)
    row = tl.load(rows + program)
    budget = tl.minimum(tl.load(budgets + program), MOST)
    if row < 0:
        return
    if budget < 1:
        tl.store(sizes + program, 0)
        return
    state = STATES + tl.cast(row, tl.int64) * STATE
    region = tl.load(arena + state + REGION)
    has_table = tl.where(region >= 0, 1, 0)
    weights = WEIGHTS + tl.cast(tl.where(region >= 0, region, TENANTS), tl.int64) * WEIGHTS_SIZE
    table = weights + TABLE
    weights += MIXTURE
    scratch = SCRATCH + tl.cast(row, tl.int64) * SCRATCH_SIZE
    mixed = MIXED + tl.cast(row, tl.int64) * MIXED_SIZE
    draft = DRAFTS + tl.cast(row, tl.int64) * (5 * MOST)
    drafted = tl.load(arena + state + DRAFTED)
    tree_token, tree_parent, chance, log_chance, bin = source_tree(arena, draft, drafted, MOST)
    back = tl.arange(0, ORDERS)
    slot = tl.arange(0, BATCH)
    tl.store(arena + scratch + LIST_SCORES + ROOT, as_bits(1.0))
    tl.store(arena + scratch + LIST_TREES + ROOT, -1)
    tl.store(arena + scratch + LIST_CONTEXTS + ROOT * ORDERS + back, tl.load(arena + mixed + TAIL + back))
    tl.store(arena + scratch + SLOT_NODES + slot, slot * 0 + ROOT)
    tl.debug_barrier()
    size, count = budget * 0, budget * 0 + 1
    while count > 0:
        load_slots(arena, scratch)
        token, probability, _, _, leads, of_slot, of_node, _, _, _, _ = candidates_of(
            arena,
            scratch,
            weights,
            table,
            model_table,
            model_rows,
            has_table,
            count,
            tree_token,
            tree_parent,
            chance,
            log_chance,
            bin,
            ROWS,
        )
        above = tl.load(arena + scratch + SLOT_NODES + tl.arange(0, TOKENS) // OF_NODE)
        score = probability * as_float(tl.load(arena + scratch + LIST_SCORES + above))
        size = offer(arena, scratch, size, budget, token, score, leads, of_slot, tree_token, of_node)
        count = choose(arena, scratch, size, budget)
    size = fill(arena, scratch, mixed, size, budget)
    node = tl.arange(0, NODES)
    inside = node < size
    above = tl.load(arena + scratch + LIST_PARENTS + node, mask=inside, other=ROOT)
    tl.store(tokens + program * stride + node, tl.load(arena + scratch + LIST_TOKENS + node), mask=inside)
    tl.store(parents + program * stride + node, tl.where(above == ROOT, -1, above), mask=inside)
    tl.store(scores + program * stride + node, as_float(tl.load(arena + scratch + LIST_SCORES + node)), mask=inside)
    tl.store(sizes + program, size)
    tl.store(arena + mixed + HAS_DRAFT, 1)
