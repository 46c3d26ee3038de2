"""Recurrent layers over the draft trees of a step: each token takes its state from its parent's.

A sequence's state is read from one row of the state memory and written to another, so that a step may be computed
twice. Before its own tokens a batch row replays the nodes that were accepted in the step before, from their inputs.
Then comes its chain, the tokens before its tree; the state after them is written. The nodes of its tree are walked path
by path from there, so no state of a node is kept, whatever the tree's size; a node's inputs are, for the next step to
replay.
A state is computed by the same operations in all three places.

A row of `rows` is int32[9]: the row that the state is read from (-1: it is zero), the one that it is written to, the
one that the state at the end of a page is written to (-1: none) and after how many tokens of its chain; the first token
of the step and how many its chain has; where its part of `walk` begins, how many of these entries are replayed nodes,
and where it ends. The other entries are tokens of the paths, times 2, plus 1 for the first of a further path.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW: tl.constexpr = tl.constexpr(9)
_SOURCE: tl.constexpr = tl.constexpr(0)
_TARGET: tl.constexpr = tl.constexpr(1)
_END: tl.constexpr = tl.constexpr(2)
_PAGE_END: tl.constexpr = tl.constexpr(3)
_FIRST: tl.constexpr = tl.constexpr(4)
_CHAIN: tl.constexpr = tl.constexpr(5)
_WALK: tl.constexpr = tl.constexpr(6)
_REPLAYED: tl.constexpr = tl.constexpr(7)
_WALK_END: tl.constexpr = tl.constexpr(8)
_EPSILON: tl.constexpr = tl.constexpr(1e-6)


@triton.jit
def convolve(
    inputs,
    weight,
    bias,
    output,
    states,
    nodes,
    rows,
    walk,
    token_rows,
    parents,
    token_stride,
    channel_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    NODES: tl.constexpr,
    BIASED: tl.constexpr,
    SILU: tl.constexpr,
):
    """A causal convolution of each channel: one program for each token and BLOCK of channels.

    Args:
        inputs: [token, CHANNELS] with the strides given; output: [token, CHANNELS], zeros for padding.
        weight: [CHANNELS, WIDTH]; bias: [CHANNELS].
        states: [state row, WIDTH - 1, CHANNELS], the last inputs, oldest first.
        nodes: [state row, NODES, CHANNELS], inputs of nodes.
        token_rows: int32[token], its batch row; -1 for padding.
        parents: int32[token], a token of the step; -1 for the first one of a batch row.
    """
    token = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < CHANNELS
    kind = output.dtype.element_ty
    row = rows + tl.load(token_rows + token) * ROW
    mixed = tl.zeros([BLOCK], tl.float32)
    if tl.load(token_rows + token) >= 0:
        source = tl.load(row + _SOURCE).to(tl.int64)
        target = tl.load(row + _TARGET).to(tl.int64)
        end = tl.load(row + _END).to(tl.int64)
        first = tl.load(row + _FIRST)
        node = token - first - tl.load(row + _CHAIN)
        ends_page = (end >= 0) & (token == first + tl.load(row + _PAGE_END) - 1)
        replayed = tl.load(row + _REPLAYED)
        last = walk + tl.load(row + _WALK) + replayed - 1
        keeping = tl.where((node >= 0) & (node < NODES), CHANNELS, 0)
        place = token
        behind = 0
        for tap in tl.static_range(WIDTH):
            in_step = place >= 0
            in_nodes = (place < 0) & (behind < replayed)
            in_state = (place < 0) & (behind >= replayed) & (source >= 0)
            number = tl.load(
                inputs + place.to(tl.int64) * token_stride + at * channel_stride,
                mask=at < tl.where(in_step, CHANNELS, 0),
                other=0.0,
            ).to(tl.float32)
            old = source * NODES + tl.load(last - behind, mask=in_nodes, other=0)
            number += tl.load(nodes + old * CHANNELS + at, mask=at < tl.where(in_nodes, CHANNELS, 0), other=0.0).to(
                tl.float32
            )
            if tap > 0:
                kept = source * (WIDTH - 1) + WIDTH - 2 - behind + replayed
                number += tl.load(
                    states + kept * CHANNELS + at, mask=at < tl.where(in_state, CHANNELS, 0), other=0.0
                ).to(tl.float32)
            mixed += number * tl.load(weight + at * WIDTH + WIDTH - 1 - tap, mask=there, other=0.0).to(tl.float32)
            entry = number.to(states.dtype.element_ty)
            if tap == 0:
                tl.store(nodes + (target * NODES + node) * CHANNELS + at, entry, mask=at < keeping)
            if tap < WIDTH - 1:
                here = (WIDTH - 2 - tap) * CHANNELS + at
                tl.store(
                    states + target * (WIDTH - 1) * CHANNELS + here, entry, mask=at < tl.where(node == -1, CHANNELS, 0)
                )
                tl.store(
                    states + end * (WIDTH - 1) * CHANNELS + here, entry, mask=at < tl.where(ends_page, CHANNELS, 0)
                )
            behind = tl.where(place < 0, behind + 1, behind)
            place = tl.load(parents + place, mask=place >= 0, other=-1)
        if BIASED:
            mixed += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
        mixed = mixed.to(kind).to(tl.float32)
        if SILU:
            mixed = mixed / (1.0 + tl.exp(-mixed))
    tl.store(output + token.to(tl.int64) * CHANNELS + at, mixed.to(kind), mask=there)


@triton.jit
def recurrence(
    query,
    key,
    value,
    gates,
    weights,
    skips,
    output,
    states,
    node_keys,
    node_values,
    node_gates,
    node_weights,
    rows,
    row_count,
    walk,
    query_stride,
    key_stride,
    value_stride,
    scale,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    NODES: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Computes a recurrence: with DELTA the gated delta rule (Yang et al., 2024, arXiv 2412.06464) with normalized
    queries and keys, else that of Mamba 2 (Dao and Gu, 2024, arXiv 2405.21060).

    A program takes one batch row, head and VALUE_BLOCK of its columns after the other, so that the grid depends on the
    device and not on the batch.

    Args:
        query, key: [token, GROUPS, KEY_DIM], value: [token, HEADS, VALUE_DIM], with the strides of tokens given; C, B
            and x of Mamba 2.
        gates: logarithms of decays [token, HEADS]; of Mamba 2 time steps float32[token, HEADS].
        weights: beta [token, HEADS]; of Mamba 2 A float32[HEADS].
        skips: D float32[HEADS] of Mamba 2; scale: of queries of the delta rule.
        output: [token, HEADS, VALUE_DIM], out; padding is left as it is.
        states: float32[state row, HEADS, KEY_DIM, VALUE_DIM].
        node_keys, node_values, node_gates, node_weights: [state row, NODES, ...], inputs of nodes, the last ones of the
            delta rule only.
        row_count: int32[1].
    """
    SLICES: tl.constexpr = (VALUE_DIM + VALUE_BLOCK - 1) // VALUE_BLOCK
    SHARING: tl.constexpr = HEADS // GROUPS
    i = tl.arange(0, KEY_BLOCK)
    in_key = i < KEY_DIM
    kind = output.dtype.element_ty
    for item in range(tl.program_id(0), tl.load(row_count) * HEADS * SLICES, tl.num_programs(0)):
        row = rows + item // (HEADS * SLICES) * ROW
        head = item // SLICES % HEADS
        group = head // SHARING
        j = item % SLICES * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
        in_value = j < VALUE_DIM
        inside = in_key[:, None] & in_value[None, :]
        place = states + (head * KEY_DIM + i[:, None]) * VALUE_DIM + j[None, :]
        source = tl.load(row + _SOURCE).to(tl.int64)
        target = tl.load(row + _TARGET).to(tl.int64)
        first = tl.load(row + _FIRST)
        root_end = first + tl.load(row + _CHAIN)
        page_end = first + tl.load(row + _PAGE_END)
        begin = tl.load(row + _WALK)
        paths = begin + tl.load(row + _REPLAYED)
        rate = 0.0 if DELTA else tl.load(weights + head)
        skip = 0.0 if DELTA else tl.load(skips + head)
        size = HEADS * KEY_DIM * VALUE_DIM
        state = tl.load(place + source * size, mask=_inside(source, i, j, KEY_DIM, VALUE_DIM), other=0.0)
        for n in range(begin, paths):
            node = source * NODES + tl.load(walk + n)
            k = tl.load(node_keys + (node * GROUPS + group) * KEY_DIM + i, mask=in_key, other=0.0)
            v = tl.load(node_values + (node * HEADS + head) * VALUE_DIM + j, mask=in_value, other=0.0)
            g = tl.load(node_gates + node * HEADS + head)
            w = tl.load(node_weights + node * HEADS + head) if DELTA else rate
            state = _after(state, k, v, g, w, DELTA)
        for t in range(first, root_end):
            token = first.to(tl.int64) + (t - first)
            q = tl.load(query + token * query_stride + group * KEY_DIM + i, mask=in_key, other=0.0)
            k = tl.load(key + token * key_stride + group * KEY_DIM + i, mask=in_key, other=0.0)
            v = tl.load(value + token * value_stride + head * VALUE_DIM + j, mask=in_value, other=0.0)
            g = tl.load(gates + token * HEADS + head)
            w = tl.load(weights + token * HEADS + head) if DELTA else rate
            state = _after(state, k, v, g, w, DELTA)
            out = _read(state, q, v, scale, skip, DELTA)
            tl.store(output + (token * HEADS + head) * VALUE_DIM + j, out.to(kind), mask=in_value)
            if t + 1 == page_end:
                end = tl.load(row + _END).to(tl.int64)
                tl.store(place + end * size, state, mask=_inside(end, i, j, KEY_DIM, VALUE_DIM))
        tl.store(place + target * size, state, mask=inside)
        tl.debug_barrier()  # other paths begin with it
        for n in range(paths, tl.load(row + _WALK_END)):
            entry = tl.load(walk + n)
            if entry % 2 == 1:
                state = tl.load(place + target * size, mask=inside, other=0.0)
            token = (entry // 2).to(tl.int64)
            q = tl.load(query + token * query_stride + group * KEY_DIM + i, mask=in_key, other=0.0)
            k = tl.load(key + token * key_stride + group * KEY_DIM + i, mask=in_key, other=0.0)
            v = tl.load(value + token * value_stride + head * VALUE_DIM + j, mask=in_value, other=0.0)
            g = tl.load(gates + token * HEADS + head)
            w = tl.load(weights + token * HEADS + head) if DELTA else rate
            state = _after(state, k, v, g, w, DELTA)
            out = _read(state, q, v, scale, skip, DELTA)
            tl.store(output + (token * HEADS + head) * VALUE_DIM + j, out.to(kind), mask=in_value)
            kept = token - root_end
            node = target * NODES + kept
            once = (kept < NODES) & (item % SLICES == 0)
            tl.store(
                node_values + (node * HEADS + head) * VALUE_DIM + j, v, mask=j < tl.where(kept < NODES, VALUE_DIM, 0)
            )
            tl.store(
                node_keys + (node * GROUPS + group) * KEY_DIM + i,
                k,
                mask=i < tl.where(once & (head % SHARING == 0), KEY_DIM, 0),
            )
            tl.store(node_gates + node * HEADS + head, g, mask=once)
            if DELTA:
                tl.store(node_weights + node * HEADS + head, w, mask=once)
        tl.debug_barrier()


@triton.jit
def _inside(row, i, j, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """[K, V], which numbers of a state there are; none in row -1."""
    return (i < tl.where(row >= 0, KEY_DIM, 0))[:, None] & (j < VALUE_DIM)[None, :]


@triton.jit
def _after(state, key, value, gate, weight, DELTA: tl.constexpr):
    """The state [K, V] after a token."""
    if DELTA:
        k = _normalized(key)[:, None]
        state = state * tl.exp(gate.to(tl.float32))
        delta = (value.to(tl.float32) - tl.sum(state * k, 0)) * weight.to(tl.float32)
        state = state + k * delta[None, :]
    else:
        added = (key.to(tl.float32) * gate)[:, None] * value.to(tl.float32)[None, :]
        state = tl.exp(gate * weight) * state + added
    return state


@triton.jit
def _read(state, query, value, scale, skip, DELTA: tl.constexpr):
    """The output [V] of a token."""
    if DELTA:
        out = tl.sum(state * (_normalized(query) * scale)[:, None], 0)
    else:
        out = tl.sum(state * query.to(tl.float32)[:, None], 0) + skip * value.to(tl.float32)
    return out


@triton.jit
def _normalized(vector):
    numbers = vector.to(tl.float32)
    return numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) + _EPSILON)
