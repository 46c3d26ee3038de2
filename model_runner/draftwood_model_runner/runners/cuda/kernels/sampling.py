"""Chooses the next token after each node of a draft tree, as `sampling.TokenSampler` does on the host.

Thresholds of top-k and top-p are found by search over the bits of the scores, two at a time, so that no row is sorted.
Probabilities are integers, by `sampling.token_weights`, and divisions are rounded as on the host. So what is kept is
the same, also of tokens that share a score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_model_runner.runners.cuda.kernels.noise import philox
from draftwood_model_runner.sampling import token_weights

LOG2_E: tl.constexpr = tl.constexpr(token_weights.LOG2_E)
FARTHEST: tl.constexpr = tl.constexpr(token_weights.FARTHEST)
WEIGHT_BITS: tl.constexpr = tl.constexpr(token_weights.WEIGHT_BITS)
DISTANCE_BITS: tl.constexpr = tl.constexpr(token_weights.DISTANCE_BITS)
UNIT_BITS: tl.constexpr = tl.constexpr(token_weights.UNIT_BITS)
DISTANCE_UNIT: tl.constexpr = tl.constexpr(float(1 << token_weights.DISTANCE_BITS))
WHOLE_SHIFT: tl.constexpr = tl.constexpr(token_weights.DISTANCE_BITS + token_weights.UNIT_BITS)
PART_MASK: tl.constexpr = tl.constexpr((1 << token_weights.UNIT_BITS) - 1)
WEIGHT_SHIFT: tl.constexpr = tl.constexpr(token_weights.WEIGHT_BITS - token_weights.UNIT_BITS)
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(number) for number in token_weights.EXP2)


@triton.jit(do_not_specialize=["first"])
def sample_tokens(
    scores,
    weights,
    sampled,
    first,
    row_sequences,
    row_masks,
    row_nodes,
    positions,
    temperatures,
    top_ks,
    dropped_shares,
    least_weights,
    seeds,
    vocab,
    sampled_stride,
    BLOCK: tl.constexpr,
):
    """The token that a sequence writes after each node: one program for each row of scores.

    Args:
        scores: float32[row, vocab]; are divided by the temperature.
        weights: float32[row, vocab], where they are put if top-p or min-p leave anything out.
        sampled: int32[first + row, ...] with the stride given, out; rows of sequence -1 stay as they are, and those of
            an unknown mask (-2) get no token (-1).
        first, row_sequences, row_masks, row_nodes, positions: as in `adjust_scores`.
        temperatures, least_weights: float32[sequence], the latter 0 without min-p; top_ks: int32[sequence];
            dropped_shares: float64[sequence], negative without top-p; seeds: int64[sequence].
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    if sequence < 0:
        return
    sampled += (first + row) * sampled_stride
    if tl.load(row_masks + row) == -2:
        tl.store(sampled, -1)
        return
    scores += row * vocab
    weights += row * vocab
    temperature = tl.load(temperatures + sequence)
    if temperature == 0.0:
        tl.store(sampled, _argmax(scores, vocab, BLOCK))
        return
    _apply_temperature(scores, vocab, temperature, BLOCK)
    tl.debug_barrier()
    top_k = tl.load(top_ks + sequence)
    share = tl.load(dropped_shares + sequence)
    least = tl.load(least_weights + sequence)
    floor = tl.full([], 0, tl.int64)
    first_kept = tl.full([], 0, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        floor = _search(scores, weights, vocab, floor, top_k.to(tl.int64), False, BLOCK)
    if (share >= 0.0) | (least > 0.0):
        _weigh(scores, weights, vocab, BLOCK)
        tl.debug_barrier()
    if share >= 0.0:
        total = _mass(scores, weights, vocab, floor, BLOCK)
        wanted = tl.maximum(total - (total.to(tl.float64) * share).to(tl.int64), 1)
        floor = _search(scores, weights, vocab, floor, wanted, True, BLOCK)
        first_kept = _first_at(scores, weights, vocab, floor, wanted, BLOCK)
    position = tl.load(positions + tl.load(row_nodes + first + row)) + 1
    seed = tl.load(seeds + sequence)
    token = _sample(scores, weights, vocab, floor, first_kept, least, seed, position, BLOCK)
    tl.store(sampled, token)


@triton.jit
def _argmax(scores, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    at = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf"))
        at = tl.where(values > best, tokens, at)
        best = tl.maximum(values, best)
    return tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)


@triton.jit
def _highest(scores, vocab, BLOCK: tl.constexpr):
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf")))
    return tl.max(best, 0)


@triton.jit
def _apply_temperature(scores, vocab, temperature, BLOCK: tl.constexpr):
    """Divides the scores by the temperature, in place."""
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(scores + tokens, mask=tokens < vocab, other=0.0)
        tl.store(scores + tokens, tl.div_rn(values, temperature), mask=tokens < vocab)


@triton.jit
def _loaded(scores, tokens, vocab):
    return tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf"))


@triton.jit
def _keys(values):
    """int64 in [0, 2^32) that order as float32 values do, for both zeros the same."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _weigh(scores, weights, vocab, BLOCK: tl.constexpr):
    """Sets weights[token], as `sampling.token_weights.token_weights`."""
    highest = _highest(scores, vocab, BLOCK)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        distance = highest - _loaded(scores, tokens, vocab)
        near = distance < FARTHEST
        binary = (tl.where(near, distance, 0.0) * DISTANCE_UNIT).to(tl.int64) * LOG2_E
        whole = binary >> WHOLE_SHIFT
        part = (binary >> DISTANCE_BITS) & PART_MASK
        power = C5 - ((part * C6) >> UNIT_BITS)
        power = C4 - ((power * part) >> UNIT_BITS)
        power = C3 - ((power * part) >> UNIT_BITS)
        power = C2 - ((power * part) >> UNIT_BITS)
        power = C1 - ((power * part) >> UNIT_BITS)
        power = C0 - ((power * part) >> UNIT_BITS)
        near &= whole <= WEIGHT_BITS
        weight = (power << WEIGHT_SHIFT) >> tl.where(near, whole, 0)
        tl.store(weights + tokens, tl.where(near, weight, 0).to(tl.float32), mask=tokens < vocab)


@triton.jit
def _mass(scores, weights, vocab, floor, BLOCK: tl.constexpr):
    """What tokens with keys of at least `floor` weigh together."""
    total = tl.full([BLOCK], 0, tl.int64)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        keys = _keys(_loaded(scores, tokens, vocab))
        weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0).to(tl.int64)
        total += tl.where(keys >= floor, weight, 0)
    return tl.sum(total, 0)


@triton.jit
def _search(scores, weights, vocab, floor, wanted, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key such that tokens of at least this key are as many as wanted, or weigh as much together; of the
    latter only those of at least `floor` count."""
    found = tl.full([], 0, tl.int64)
    for i in range(0, 16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * i)
        first = tl.full([BLOCK], 0, tl.int64)
        second = tl.full([BLOCK], 0, tl.int64)
        third = tl.full([BLOCK], 0, tl.int64)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            keys = _keys(_loaded(scores, tokens, vocab))
            counted = tl.where(tokens < vocab, 1, 0).to(tl.int64)
            if WEIGHED:
                weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0).to(tl.int64)
                counted = tl.where(keys >= floor, weight, 0)
            first += tl.where(keys >= found + unit, counted, 0)
            second += tl.where(keys >= found + 2 * unit, counted, 0)
            third += tl.where(keys >= found + 3 * unit, counted, 0)
        steps = (tl.sum(first, 0) >= wanted).to(tl.int64)
        steps = tl.where(tl.sum(second, 0) >= wanted, 2, steps)
        steps = tl.where(tl.sum(third, 0) >= wanted, 3, steps)
        found += steps * unit
    return found


@triton.jit
def _first_at(scores, weights, vocab, edge, wanted, BLOCK: tl.constexpr):
    """The first token with the key `edge` that is kept: so many of the last ones as must be added to those with a
    greater key to weigh as much as wanted."""
    above = _mass(scores, weights, vocab, edge + 1, BLOCK)
    ties = tl.full([BLOCK], 0, tl.int32)
    heaviest = tl.full([BLOCK], 1, tl.int64)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        at_edge = (_keys(_loaded(scores, tokens, vocab)) == edge) & (tokens < vocab)
        weight = tl.load(weights + tokens, mask=tokens < vocab, other=0.0).to(tl.int64)
        ties += at_edge.to(tl.int32)
        heaviest = tl.maximum(heaviest, tl.where(at_edge, weight, 1))
    weight = tl.max(heaviest, 0)
    dropped = tl.sum(ties, 0) - ((wanted - above + weight - 1) // weight).to(tl.int32)
    first = tl.full([], 2147483647, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        at_edge = (_keys(_loaded(scores, tokens, vocab)) == edge) & (tokens < vocab)
        places = before + tl.cumsum(at_edge.to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(at_edge & (places > dropped), tokens, 2147483647), 0))
        before += tl.sum(at_edge.to(tl.int32), 0)
    return first


@triton.jit
def _sample(scores, weights, vocab, floor, first, least, seed, position, BLOCK: tl.constexpr):
    """The token whose score, over the temperature, is greatest after noise, among those that are kept: with a key above
    `floor`, or of this key and not before `first`; and with the weight `least`."""
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    at = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, vocab, 4 * BLOCK):
        quads = start // 4 + tl.arange(0, BLOCK)
        a, b, c, d = philox(quads, seed, position)
        for lane in tl.static_range(4):
            tokens = 4 * quads + lane
            values = _loaded(scores, tokens, vocab)
            keys = _keys(values)
            kept = (keys > floor) | ((keys == floor) & (tokens >= first))
            if least > 0.0:
                kept &= tl.load(weights + tokens, mask=tokens < vocab, other=0.0) >= least
            bits = a
            if lane == 1:
                bits = b
            if lane == 2:
                bits = c
            if lane == 3:
                bits = d
            uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
            noisy = values.to(tl.float64) - tl.log(-tl.log(uniform))
            noisy = tl.where(kept & (tokens < vocab), noisy, float("-inf"))
            at = tl.where(noisy > best, tokens, at)
            best = tl.maximum(noisy, best)
    return tl.min(tl.where(best == tl.max(best, 0), at, 2147483647), 0)
