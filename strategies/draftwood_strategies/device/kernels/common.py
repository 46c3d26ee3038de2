"""What kernels share: phrase indexes in the arena, and the weights of votes, as those of `trie` on the host.

`base` is where a region begins in the arena, one number or a lane each; `BLOCKS` and `BUCKETS` are those of its
`arena.Region`. Positions count from the beginning of the region's log.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_strategies.device import arena as numbers
from draftwood_strategies.trie import phrase_index, retrieval
from draftwood_strategies.trie import weights as host

BLOCK: tl.constexpr = tl.constexpr(phrase_index.TOKENS_PER_BLOCK)
ORDERS: tl.constexpr = tl.constexpr(len(phrase_index.ORDERS))
LINKED: tl.constexpr = tl.constexpr(numbers.LINKED)
RING: tl.constexpr = tl.constexpr(numbers.RING)
NOWHERE: tl.constexpr = tl.constexpr(phrase_index.NOWHERE)
UNKNOWN: tl.constexpr = tl.constexpr(retrieval.UNKNOWN)
START: tl.constexpr = tl.constexpr(phrase_index.START)
UNIT: tl.constexpr = tl.constexpr(float(1 << numbers.UNIT_BITS))
LONGEST: tl.constexpr = tl.constexpr(retrieval.LONGEST)
COLUMNS: tl.constexpr = tl.constexpr(host.FEATURES)
AGREEING_AT: tl.constexpr = tl.constexpr(host.AGREEING_AT)
NEWER_AT: tl.constexpr = tl.constexpr(host.NEWER_AT)
RECENT_AT: tl.constexpr = tl.constexpr(host.RECENT_AT)
ESCAPES_AT: tl.constexpr = tl.constexpr(numbers.ESCAPES_AT)
ODDS_AT: tl.constexpr = tl.constexpr(numbers.ODDS_AT)
LENGTHS: tl.constexpr = tl.constexpr(host.LENGTHS)
SLOTS: tl.constexpr = tl.constexpr(host.SLOTS)
LENGTHS_AT: tl.constexpr = tl.constexpr(host.LENGTH_AT)
TOKENS_AT: tl.constexpr = tl.constexpr(host.TOKENS_AT)


@triton.jit
def mixed(key, token):
    """The hash, uint64, of a phrase that is one token longer, to the left, than the one of hash `key`."""
    x = (key * 0x9E3779B97F4A7C15) ^ (tl.cast(tl.cast(token, tl.int64), tl.uint64) + 0x7F4A7C15)
    x ^= x >> 29
    x *= 0xBF58476D1CE4E5B9
    return (x ^ (x >> 32)) & 0x7FFFFFFFFFFFFFFF


@triton.jit
def links_at(base, at, order, BLOCKS):
    """Where the `LINKED` occurrences before position `at` of the phrase of this order that ends there are."""
    return base + BLOCKS * BLOCK + (tl.cast(at, tl.int64) * ORDERS + order) * LINKED


@triton.jit
def next_at(base, block, BLOCKS):
    """Where the number of the block after a block in its sequence is; `BLOCKS` further that of the one before it, and
    `BLOCKS` further again the number of the sequence."""
    return base + BLOCKS * BLOCK * (1 + ORDERS * LINKED) + tl.cast(block, tl.int64)


@triton.jit
def ring_at(base, BLOCKS):
    """Where the ring of a region is."""
    return base + BLOCKS * BLOCK * (1 + ORDERS * LINKED) + 3 * BLOCKS


@triton.jit
def head_at(base, key, order, BLOCKS, BUCKETS):
    """Where the newest occurrence of the phrases of this hash and order is."""
    bucket = tl.cast(key & tl.cast(BUCKETS - 1, tl.uint64), tl.int64)
    return ring_at(base, BLOCKS) + RING + order * BUCKETS + bucket


@triton.jit
def following(arena, base, at, mask, BLOCKS):
    """The position after `at` in its sequence; `NOWHERE` if none."""
    after = at + 1
    crosses = mask & (after % BLOCK == 0)
    block = tl.load(arena + next_at(base, tl.where(crosses, at // BLOCK, 0), BLOCKS), mask=crosses, other=-1)
    return tl.where(crosses, tl.where(block >= 0, block * BLOCK, NOWHERE), tl.where(mask, after, NOWHERE))


@triton.jit
def as_float(bits):
    """The float32 of these bits."""
    return tl.cast(bits, tl.float32, bitcast=True)


@triton.jit
def as_bits(number):
    """The bits of a float32."""
    return tl.cast(number, tl.int32, bitcast=True)


@triton.jit
def ones(bits):
    """How many of the lowest 31 bits are set, for lanes of int32 that are not negative."""
    bits = (bits & 0x55555555) + ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits & 0x0F0F0F0F) + ((bits >> 4) & 0x0F0F0F0F)
    bits = bits + (bits >> 8)
    return (bits + (bits >> 16)) & 31


@triton.jit
def log2_bin(n, BINS: tl.constexpr):
    """As `retrieval.log2_bin`: 0 for 0, 1 for 1, 2 for 2 and 3, and so on; at most `BINS` - 1."""
    b = n * 0
    for i in tl.static_range(BINS - 1):
        b += tl.where(n >= (1 << i), 1, 0)
    return b


@triton.jit
def recent_bin(arena, base, end, token, mask, BLOCKS, BUCKETS):
    """As `retrieval.recent_bin`, for lanes of tokens, in the text that ends at position `end`: how long ago it had
    them, from the four newest tokens with the same hash."""
    key = mixed(tl.cast(token * 0, tl.uint64), token)
    head = tl.load(arena + head_at(base, key, 0, BLOCKS, BUCKETS), mask=mask, other=-1)
    latest = head * 0 - 1
    at = head
    for way in tl.static_range(4):
        open = mask & (latest < 0) & (at >= 0)
        has = tl.load(arena + base + tl.where(open, at, 0), mask=open, other=-1) == token
        latest = tl.where(open & has, at, latest)
        link = links_at(base, tl.where(open, head, 0), 0, BLOCKS) + way
        at = tl.load(arena + link, mask=open & (latest < 0), other=-1)
    age = end - latest
    b = tl.where(age >= 4, 2, 1)
    for i in tl.static_range(2, 6):
        b += tl.where(age >= (1 << (2 * i)), 1, 0)
    return tl.where(latest >= 0, b, 0)


@triton.jit
def weight_of(weights, kind, length, agreeing, newer, recent, mask):
    """The weight of a vote, from the pointer to its tenant's weights, for lanes."""
    row = weights + kind * COLUMNS
    total = tl.load(row + length, mask=mask, other=0)
    total += tl.load(row + AGREEING_AT + agreeing, mask=mask, other=0)
    total += tl.load(row + NEWER_AT + newer, mask=mask, other=0)
    total += tl.load(row + RECENT_AT + recent, mask=mask, other=0)
    return tl.where(mask, tl.exp(tl.cast(total, tl.float32) / UNIT), 0.0)


@triton.jit
def stretched(share):
    """Log-odds of a share, as on the host."""
    bounded = tl.minimum(tl.maximum(share, 0.001), 0.9995)
    return tl.log(bounded / (1.0 - bounded))


@triton.jit
def chance(odds, share, support, token, last, before, mask):
    """As `trie.weights.chance`, from the pointer to a tenant's odds, for lanes: the probability, and where the table
    has the token alone, after one token and after two."""
    alone = mixed(tl.cast(token * 0, tl.uint64), token)
    after_one = mixed(alone, last)
    after_two = mixed(after_one, before)
    slot_1 = TOKENS_AT + tl.cast(alone & (SLOTS - 1), tl.int32)
    slot_2 = TOKENS_AT + tl.cast(after_one & (SLOTS - 1), tl.int32)
    slot_3 = TOKENS_AT + tl.cast(after_two & (SLOTS - 1), tl.int32)
    known = tl.where(mask, support, 0)
    bias = tl.load(odds + 1 + known * 0, mask=mask, other=0)
    bias += tl.load(odds + LENGTHS_AT + (known & 31), mask=mask, other=0)
    bias += tl.load(odds + LENGTHS_AT + LENGTHS + ((known >> 5) & 31), mask=mask, other=0)
    bias += tl.load(odds + LENGTHS_AT + 2 * LENGTHS + (known >> 10), mask=mask, other=0)
    bias += tl.load(odds + slot_1, mask=mask, other=0)
    bias += tl.load(odds + slot_2, mask=mask, other=0)
    bias += tl.load(odds + slot_3, mask=mask, other=0)
    scale = tl.cast(tl.load(odds), tl.float32) / UNIT
    logit = scale * stretched(share) + tl.cast(bias, tl.float32) / UNIT
    return 1.0 / (1.0 + tl.exp(-logit)), slot_1, slot_2, slot_3
