"""The recurrences of state layers over the draft trees of a step, compiled for CPUs.

Each token takes its state from its parent's, so that a node costs the same in a chain and in a tree, and is computed
the same way whatever else is in the step. A batch row is first its replayed tokens (accepted nodes of the step before),
then its chain, which change its state in place, then its nodes, whose states are in a workspace.
"""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from draftwood_strategies.draft import Float32Array, Int32Array

_EPSILON = 1e-6
"""In the norms of queries and keys, as in transformers."""

BoolArray = npt.NDArray[np.bool_]


@numba.njit(cache=True, nogil=True)
def ancestors(parents: Int32Array, cu_seqlens: Int32Array, replayed_offsets: Int32Array, places: Int32Array) -> None:
    """For each token the entries of a convolution's inputs that it takes, itself first, in `places` int32[T, K].

    The inputs are K - 1 of each row's state, oldest first, then the replayed tokens of all rows, then the step's.

    Args:
        parents: int32[T], within a row; -1 for its beginning.
        cu_seqlens: int32[S + 1], of the tokens of each row.
        replayed_offsets: int32[S + 1], of its replayed ones.
    """
    rows, kept = cu_seqlens.shape[0] - 1, places.shape[1] - 1
    old, new = rows * kept, rows * kept + replayed_offsets[rows]
    for s in range(rows):
        replayed = replayed_offsets[s + 1] - replayed_offsets[s]
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            at = t - cu_seqlens[s]
            for tap in range(kept + 1):
                behind = -1 - at
                if at >= 0:
                    places[t, tap] = new + cu_seqlens[s] + at
                    at = parents[cu_seqlens[s] + at]
                    continue
                if behind < replayed:
                    places[t, tap] = old + replayed_offsets[s + 1] - 1 - behind
                else:
                    places[t, tap] = s * kept + kept - 1 - (behind - replayed)
                at -= 1


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def recurrence(
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    gates: Float32Array,
    betas: Float32Array,
    old_key: Float32Array,
    old_value: Float32Array,
    old_gates: Float32Array,
    old_betas: Float32Array,
    rates: Float32Array,
    skips: Float32Array,
    parents: Int32Array,
    inner: BoolArray,
    cu_seqlens: Int32Array,
    roots: Int32Array,
    page_ends: Int32Array,
    replayed_offsets: Int32Array,
    states: Float32Array,
    ends: Float32Array,
    nodes: Float32Array,
    sums: Float32Array,
    heads: tuple[int, int],
    output: Float32Array,
) -> None:
    """The gated delta rule (Yang et al., 2024, arXiv 2412.06464), or with rates the recurrence of Mamba 2 (Dao and Gu,
    2024, arXiv 2405.21060), for some heads, `heads[0]` to `heads[1]`.

    Args:
        query, key: [T, key heads, K]; value: [T, H, V]; C, B and x of Mamba 2.
        gates: logarithms of decays [T, H, 1 or K]; of Mamba 2 time steps [T, H, 1].
        betas: [T, H]; of Mamba 2 [0, 0].
        old_key, old_value, old_gates, old_betas: the same of replayed tokens.
        rates, skips: A and D [H] of Mamba 2; [0] for the delta rule.
        parents: int32[T], within a row.
        inner: bool[T], which nodes have children.
        roots: int32[S], the last token of each row's chain.
        page_ends: int32[S], the first token behind those after which the state goes to `ends`; -1 for none.
        states: [S, H, K, V], before the replayed tokens; afterwards behind the roots.
        ends: [S, H, K, V].
        nodes: [most nodes of a row, K, V] and sums: [2, V], workspace.
        output: [T, H, V].
    """
    group, delta = value.shape[1] // key.shape[1], rates.shape[0] == 0
    for s in range(roots.shape[0]):
        for h in range(heads[0], heads[1]):
            state, shared = states[s, h], h // group
            for t in range(replayed_offsets[s], replayed_offsets[s + 1]):
                k, v, g = old_key[t, shared], old_value[t, h], old_gates[t, h]
                if delta:
                    _delta_token(state, state, k, k, v, g, old_betas[t, h], True, sums[0], sums[1])
                else:
                    _state_space_token(state, state, k, k, v, g[0], rates[h], True, sums[0])
            for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
                node, above = t - roots[s] - 1, parents[t] - (roots[s] - cu_seqlens[s]) - 1
                before = state if node < 0 or above < 0 else nodes[above]
                after = state if node < 0 else nodes[max(node, 0)]
                q, k, v, g, out = query[t, shared], key[t, shared], value[t, h], gates[t, h], output[t, h]
                keeps = node < 0 or inner[t]
                if delta:
                    _delta_token(before, after, q, k, v, g, betas[t, h], keeps, sums[0], out)
                else:
                    _state_space_token(before, after, q, k, v, g[0], rates[h], keeps, out)
                    for j in range(out.shape[0]):
                        out[j] += skips[h] * v[j]
                if t + 1 == page_ends[s]:
                    ends[s, h] = state


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def _delta_token(
    before: Float32Array,
    after: Float32Array,
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    decay: Float32Array,
    beta: np.float32,
    keeps: bool,
    delta: Float32Array,
    output: Float32Array,
) -> None:
    """One token of one head: its output [V], and the state [K, V] after it if `keeps`. `delta` is workspace."""
    rows, columns = before.shape
    of_query, of_key = np.float32(_EPSILON), np.float32(_EPSILON)
    for i in range(rows):
        of_query += query[i] * query[i]
        of_key += key[i] * key[i]
    of_query = np.float32(1.0) / (np.sqrt(of_query) * np.sqrt(np.float32(rows)))
    of_key = np.float32(1.0) / np.sqrt(of_key)
    fading, common = np.exp(decay[0]), np.float32(0.0)
    for j in range(columns):
        delta[j] = output[j] = np.float32(0.0)
    for i in range(rows):
        if decay.shape[0] > 1:
            fading = np.exp(decay[i])
        k, q = key[i] * of_key, query[i] * of_query
        common += k * q
        k *= fading
        q *= fading
        for j in range(columns):
            delta[j] += k * before[i, j]
            output[j] += q * before[i, j]
    for j in range(columns):
        delta[j] = (value[j] - delta[j]) * beta
        output[j] += common * delta[j]
    if not keeps:
        return
    for i in range(rows):
        if decay.shape[0] > 1:
            fading = np.exp(decay[i])
        k = key[i] * of_key
        for j in range(columns):
            after[i, j] = fading * before[i, j] + k * delta[j]


@numba.njit(cache=True, nogil=True, fastmath={"contract"})
def _state_space_token(
    before: Float32Array,
    after: Float32Array,
    query: Float32Array,
    key: Float32Array,
    value: Float32Array,
    step: np.float32,
    rate: np.float32,
    keeps: bool,
    output: Float32Array,
) -> None:
    """As `_delta_token`; the output without what skips the recurrence."""
    rows, columns = before.shape
    fading = np.float32(math.exp(step * rate))
    for j in range(columns):
        output[j] = np.float32(0.0)
    for i in range(rows):
        k, q = key[i] * step, query[i]
        for j in range(columns):
            number = fading * before[i, j] + k * value[j]
            output[j] += q * number
            if keeps:
                after[i, j] = number
