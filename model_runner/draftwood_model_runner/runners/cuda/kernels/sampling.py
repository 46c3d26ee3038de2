"""Chooses the next token after each node of a draft tree, as `sampling.TokenSampler` does on the host, and walks the
tree.

Thresholds of top-k and top-p are found by search over the bits of the scores, two at a time, so that no row is sorted.
Probabilities are integers, by `selection.token_weights`, and divisions are rounded as on the host. So what is kept is
the same, also of tokens that share a score.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood_model_runner.sampling import selection as token_weights

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
    entry_offsets,
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
        entry_offsets: int32[sequence + 1], into the tokens that are not left as they are:
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
    end = tl.load(entry_offsets + sequence + 1)
    for start in range(tl.load(entry_offsets + sequence), end, ENTRIES):
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
        value = tl.where(seen, tl.where(value < 0, value * repetition, tl.div_rn(value, repetition)), value)
        value -= tl.where(count > 0, presence, 0.0) + frequency * count.to(tl.float32)
        value += tl.load(entry_biases + at, mask=there, other=0.0)
        value = tl.where(locked & ((flags & 2) != 0), float("-inf"), value)
        tl.store(out + token, value, mask=there)


@triton.jit
def _ordered(values, tokens):
    """int64: keys that order as (value, -token) do, so that the greatest is the lowest of equally probable tokens."""
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - tokens).to(tl.int64)


@triton.jit
def top_of_blocks(logits, best, wanted, vocab, row_stride, blocks, BLOCK: tl.constexpr, TOP: tl.constexpr):
    """The TOP greatest keys of each block of a row: one program for each row and block.

    Args:
        logits: [row, vocab].
        best: int64[row, blocks, TOP], out.
        wanted: int32[1], rows that are not padding.
    """
    row = tl.program_id(0)
    if row >= tl.load(wanted):
        return
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row.to(tl.int64) * row_stride + tokens, mask=tokens < vocab, other=float("-inf"))
    keys = tl.where(tokens < vocab, _ordered(values, tokens), -(1 << 62))
    for i in tl.static_range(TOP):
        greatest = tl.max(keys, 0)
        tl.store(best + (row * blocks + block) * TOP + i, greatest)
        keys = tl.where(keys == greatest, -(1 << 62), keys)


@triton.jit
def top_of_rows(best, tokens, wanted, count, SIZE: tl.constexpr, TOP: tl.constexpr):
    """The TOP most probable tokens of each row, best first: one program for each row.

    Args:
        best: int64[row, count], of `top_of_blocks`.
        tokens: int32[row, TOP + 1], out; the last one is the first again, the token that is chosen.
        wanted: int32[1], rows that are not padding.
    """
    row = tl.program_id(0)
    if row >= tl.load(wanted):
        return
    at = tl.arange(0, SIZE)
    keys = tl.load(best + row * count + at, mask=at < count, other=-(1 << 62))
    for i in tl.static_range(TOP):
        greatest = tl.max(keys, 0)
        token = 0x7FFFFFFF - (greatest & 0xFFFFFFFF).to(tl.int32)
        tl.store(tokens + row * (TOP + 1) + i, token)
        if i == 0:
            tl.store(tokens + row * (TOP + 1) + TOP, token)
        keys = tl.where(keys == greatest, -(1 << 62), keys)


@triton.jit
def philox(quads, seed, position):
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
    min_weight = tl.load(least_weights + sequence)
    floor = tl.full([], 0, tl.int64)
    first_kept = tl.full([], 0, tl.int32)
    if (top_k > 0) & (top_k < vocab):
        floor = _search(scores, weights, vocab, floor, top_k.to(tl.int64), False, BLOCK)
    if (share >= 0.0) | (min_weight > 0.0):
        _weigh(scores, weights, vocab, BLOCK)
        tl.debug_barrier()
    if share >= 0.0:
        total = _mass(scores, weights, vocab, floor, BLOCK)
        wanted = tl.maximum(total - (total.to(tl.float64) * share).to(tl.int64), 1)
        floor = _search(scores, weights, vocab, floor, wanted, True, BLOCK)
        first_kept = _first_at(scores, weights, vocab, floor, wanted, BLOCK)
    position = tl.load(positions + tl.load(row_nodes + first + row)) + 1
    seed = tl.load(seeds + sequence)
    token = _sample(scores, weights, vocab, floor, first_kept, min_weight, seed, position, BLOCK)
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
    """Sets weights[token], as `selection.token_weights`."""
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
    key = tl.full([], 0, tl.int64)
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
            first += tl.where(keys >= key + unit, counted, 0)
            second += tl.where(keys >= key + 2 * unit, counted, 0)
            third += tl.where(keys >= key + 3 * unit, counted, 0)
        steps = (tl.sum(first, 0) >= wanted).to(tl.int64)
        steps = tl.where(tl.sum(second, 0) >= wanted, 2, steps)
        steps = tl.where(tl.sum(third, 0) >= wanted, 3, steps)
        key += steps * unit
    return key


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
def _sample(scores, weights, vocab, floor, first, min_weight, seed, position, BLOCK: tl.constexpr):
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
            if min_weight > 0.0:
                kept &= tl.load(weights + tokens, mask=tokens < vocab, other=0.0) >= min_weight
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
def accept_paths(
    sampled,
    tokens,
    parents,
    slots,
    logit_rows,
    offsets,
    on_device,
    positions,
    moves,
    counts,
    written,
    ends,
    sampled_stride,
    NODES: tl.constexpr,
):
    """The moves of keys and values of accepted nodes to their place after the committed ones, and what is written: one
    program a batch row.

    Args:
        sampled: int32[row, ...] with the stride given, the token after each row of logits.
        tokens, parents: int32[token]; a parent is a token of the step, -1 for none.
        slots: int64[token].
        logit_rows: int32[row], the token of the step that each row of logits follows.
        offsets: int32[batch row + 1], the rows of logits of each batch row; the first is the root of its tree.
        on_device: int32[batch row], 0 for those that the host chooses for: no path is accepted.
        positions: int32[token].
        moves: int64[row, 2], out: source and target slot for each accepted node, from the first row of its tree on.
        counts: int32[batch row], out: accepted nodes.
        written: int32[batch row, NODES], out: the tokens of the nodes, and the one after them.
        ends: int32[batch row], out: the position of the last token that is written.
    """
    batch_row = tl.program_id(0)
    begin = tl.load(offsets + batch_row)
    size = tl.load(offsets + batch_row + 1) - begin
    accepted = 0
    if (tl.load(on_device + batch_row) != 0) & (size > 0):
        root = tl.load(logit_rows + begin)
        nodes = tl.arange(0, NODES)
        there = (nodes > 0) & (nodes < size)
        node_tokens = tl.load(tokens + root + nodes, mask=there, other=-1)
        node_parents = tl.load(parents + root + nodes, mask=there, other=-1) - root
        node = 0
        while node >= 0:
            target = tl.load(sampled + (begin + node).to(tl.int64) * sampled_stride)
            tl.store(written + batch_row * NODES + accepted, target)
            follows = there & (node_parents == node) & (node_tokens == target)
            child = tl.min(tl.where(follows, nodes, NODES), 0)
            node = tl.where(child < NODES, child, -1)
            if node >= 0:
                source = tl.load(slots + root + node)
                accepted += 1
                behind = tl.load(slots + root + accepted)
                tl.store(moves + 2 * (begin + accepted - 1), source)
                tl.store(moves + 2 * (begin + accepted - 1) + 1, behind)
        tl.store(ends + batch_row, tl.load(positions + root) + accepted + 1)
    tl.store(counts + batch_row, accepted)
