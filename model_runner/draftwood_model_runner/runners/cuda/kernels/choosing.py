"""Chooses the next token after each node of a draft tree, as `sampling.TokenChooser` does on the host.

Thresholds of top-k and top-p are found by search over the bits of the scores, two at a time, so that no row is sorted.
Tokens that share a score are kept or left out together; for top-p, transformers keeps those that its sort puts last.
Each row is summed in an order of its own: what is chosen does not depend on the other rows of a step.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["first", "mask_words"])
def adjust_scores(
    logits,
    scores,
    first,
    row_sequences,
    row_masks,
    masks,
    row_nodes,
    parents,
    tokens,
    positions,
    unlocked_at,
    penalties,
    entry_begins,
    entry_tokens,
    entry_counts,
    entry_biases,
    entry_flags,
    vocab,
    logit_stride,
    mask_words,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Scores after masks, penalties and biases, at each node by its own prefix: one program for each row of scores.

    Args:
        logits: [first + row, vocab].
        scores: float32[row, vocab], out.
        first: the row of logits that the first row of scores is of.
        row_sequences: int32[row], -1 for rows that are chosen on the host.
        row_masks: int32[row], negative for none.
        masks: int32[mask, mask_words]: a bit for each token, set if it may follow.
        row_nodes: int32[first + row]: the token of the step that a row follows.
        parents: int32[token], the token of the step before each one in its tree; -1 for the root and what comes before.
        tokens, positions: int32[token].
        unlocked_at: int32[sequence], the first position where the output may end.
        penalties: float32[sequence, 3]: repetition, presence, frequency.
        entry_begins: int32[sequence + 1], into the tokens that are not left as they are:
        entry_tokens, entry_counts, entry_biases, entry_flags: int32, int32, float32, int32[entry]; a count is of the
            output so far, flag 1 of a token seen in prompt or output, 2 of one that ends the output. All tokens of the
            draft are among them, if there are penalties.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    if sequence < 0:
        return
    out = scores + row * vocab
    mask = tl.load(row_masks + row).to(tl.int64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + (first + row) * logit_stride + at, mask=at < vocab, other=0.0).to(tl.float32)
        if mask >= 0:
            words = tl.load(masks + mask * mask_words + at // 32, mask=at < vocab, other=0)
            values = tl.where(((words >> (at % 32)) & 1) != 0, values, float("-inf"))
        tl.store(out + at, values, mask=at < vocab)
    tl.debug_barrier()
    repetition = tl.load(penalties + sequence * 3)
    presence = tl.load(penalties + sequence * 3 + 1)
    frequency = tl.load(penalties + sequence * 3 + 2)
    node = tl.load(row_nodes + first + row)
    locked = tl.load(positions + node) + 1 < tl.load(unlocked_at + sequence)
    end = tl.load(entry_begins + sequence + 1)
    for start in range(tl.load(entry_begins + sequence), end, ENTRIES):
        at = start + tl.arange(0, ENTRIES)
        there = at < end
        token = tl.load(entry_tokens + at, mask=there, other=-1)
        count = tl.load(entry_counts + at, mask=there, other=0)
        flags = tl.load(entry_flags + at, mask=there, other=0)
        ancestor = node
        parent = tl.load(parents + ancestor)
        while parent >= 0:
            count += (tl.load(tokens + ancestor) == token).to(tl.int32)
            ancestor = parent
            parent = tl.load(parents + ancestor)
        value = tl.load(out + token, mask=there, other=0.0)
        seen = ((flags & 1) != 0) | (count > 0)
        value = tl.where(seen, tl.where(value < 0, value * repetition, value / repetition), value)
        value -= tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32)
        value += tl.load(entry_biases + at, mask=there, other=0.0)
        value = tl.where(locked & ((flags & 2) != 0), float("-inf"), value)
        tl.store(out + token, value, mask=there)


@triton.jit(do_not_specialize=["first"])
def choose_tokens(
    scores,
    chosen,
    first,
    row_sequences,
    row_masks,
    row_nodes,
    positions,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    vocab,
    chosen_stride,
    BLOCK: tl.constexpr,
):
    """The token that a sequence writes after each node: one program for each row of scores.

    Args:
        scores: float32[row, vocab].
        chosen: int32[first + row, ...] with the stride given, out; rows of sequence -1 stay as they are, and those of
            an unknown mask (-2) get no token (-1).
        first, row_sequences, row_masks, row_nodes, positions: as in `adjust_scores`.
        temperatures, top_ps, min_ps: float32[sequence]; top_ks: int32[sequence]; seeds: int64[sequence].
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(row_sequences + row)
    if sequence < 0:
        return
    chosen += (first + row) * chosen_stride
    if tl.load(row_masks + row) == -2:
        tl.store(chosen, -1)
        return
    scores += row * vocab
    temperature = tl.load(temperatures + sequence)
    if temperature == 0.0:
        tl.store(chosen, _argmax(scores, vocab, BLOCK))
        return
    highest = _highest(scores, vocab, BLOCK) / temperature
    top_k = tl.load(top_ks + sequence)
    top_p = tl.load(top_ps + sequence)
    floor = tl.full([], 0, tl.int64)
    if (top_k > 0) & (top_k < vocab):
        floor = _search(scores, vocab, temperature, highest, floor, top_k.to(tl.float32), False, BLOCK)
    if top_p < 1.0:
        wanted = _mass(scores, vocab, temperature, highest, floor, BLOCK) * top_p
        floor = _search(scores, vocab, temperature, highest, floor, wanted, True, BLOCK)
    position = tl.load(positions + tl.load(row_nodes + first + row)) + 1
    least = tl.load(min_ps + sequence)
    token = _sample(scores, vocab, temperature, highest, floor, least,
                    tl.load(seeds + sequence), position, BLOCK)  # fmt: skip
    tl.store(chosen, token)


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
def _keys(values):
    """int64 in [0, 2^32) that order as float32 values do."""
    bits = values.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _mass(scores, vocab, temperature, highest, floor, BLOCK: tl.constexpr):
    """What tokens with keys of at least `floor` weigh together, relative to the most probable one."""
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, vocab, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf")) / temperature
        total += tl.where(_keys(values) >= floor, tl.exp2((values - highest) * LOG2_E), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _search(scores, vocab, temperature, highest, floor, wanted, WEIGHED: tl.constexpr, BLOCK: tl.constexpr):
    """The greatest key such that tokens of at least this key are as many as wanted, or weigh as much together; of the
    latter only those of at least `floor` count."""
    found = tl.full([], 0, tl.int64)
    for i in range(0, 16):
        unit = tl.full([], 1, tl.int64) << (30 - 2 * i)
        first = tl.full([BLOCK], 0.0, tl.float32)
        second = tl.full([BLOCK], 0.0, tl.float32)
        third = tl.full([BLOCK], 0.0, tl.float32)
        for start in range(0, vocab, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            values = tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf")) / temperature
            keys = _keys(values)
            weights = tl.where(tokens < vocab, 1.0, 0.0)
            if WEIGHED:
                weights = tl.where(keys >= floor, tl.exp2((values - highest) * LOG2_E), 0.0)
            first += tl.where(keys >= found + unit, weights, 0.0)
            second += tl.where(keys >= found + 2 * unit, weights, 0.0)
            third += tl.where(keys >= found + 3 * unit, weights, 0.0)
        steps = (tl.sum(first, 0) >= wanted).to(tl.int64)
        steps = tl.where(tl.sum(second, 0) >= wanted, 2, steps)
        steps = tl.where(tl.sum(third, 0) >= wanted, 3, steps)
        found += steps * unit
    return found


@triton.jit
def _sample(scores, vocab, temperature, highest, floor, least, seed, position, BLOCK: tl.constexpr):
    """The token whose score, over the temperature, is greatest after noise, among those that are kept."""
    best = tl.full([BLOCK], float("-inf"), tl.float64)
    at = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, vocab, 4 * BLOCK):
        quads = start // 4 + tl.arange(0, BLOCK)
        a, b, c, d = _philox(quads, seed, position)
        for lane in tl.static_range(4):
            tokens = 4 * quads + lane
            values = tl.load(scores + tokens, mask=tokens < vocab, other=float("-inf")) / temperature
            keys = _keys(values)
            kept = keys >= floor
            kept &= tl.exp2((values - highest) * LOG2_E) >= least
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


@triton.jit
def _philox(quads, seed, position):
    """uint64 x 4: the raw output of `numpy.random.Philox(key=[seed, position])` at 4 * quads and behind (Philox4x64-10
    of Salmon et al., 2011; NumPy counts its blocks from 1)."""
    zero = (quads * 0).to(tl.uint64)
    c0 = (quads + 1).to(tl.uint64)
    c1 = zero
    c2 = zero
    c3 = zero
    k0 = zero + seed.to(tl.uint64, bitcast=True)
    k1 = zero + position.to(tl.uint64)
    m0 = zero + 0xD2E7470EE14C6C93
    m1 = zero + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0 = tl.umulhi(m0, c0)
        high1 = tl.umulhi(m1, c2)
        low0 = m0 * c0
        low1 = m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += 0x9E3779B97F4A7C15
        k1 += 0xBB67AE8584CAA73B
    return c0, c1, c2, c3
