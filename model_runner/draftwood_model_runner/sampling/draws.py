"""Gumbel noise that depends on seed, position and token alone.

Philox is a counter-based generator (Salmon et al., 2011): the noise of one token is computed without that of others.
Its raw bits do not change between NumPy versions.
"""

from __future__ import annotations

import math
import threading
from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling.selection import (
    BLOCK,
    FARTHEST,
    Workspace,
    apply_temperature,
    dropped_share,
    find_edge,
    find_greatest,
    key_of,
    least_weight,
    score_of,
    token_weights,
    weight_at,
)
from draftwood_strategies.arrays import Float32Array, Int64Array, Integer, Real
from draftwood_strategies.native import Struct, arrays_at, compiled

UNIFORM_UNIT = 2.0**-52
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_FIRST_KEY_STEP, _SECOND_KEY_STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10

BoolArray = npt.NDArray[np.bool_]
_INFINITE = 0x7F800000
"""The key of infinity; that of -infinity is -_INFINITE - 1."""
_SLACK = 1e-9
"""Uniform numbers so close to the limit are not ruled out by it: more than all rounding."""
_FAR = np.float32(FARTHEST)
_UNUSED_BITS = np.uint64(12)
_LANES = 4


def gumbel_noise(size: int, seed: int, position: int) -> npt.NDArray[np.float64]:
    """float64[size] of standard Gumbel noise, one number for each token; a pure function of its arguments."""
    bits = np.random.Philox(key=np.array([seed, position], np.uint64)).random_raw(size)
    # Midpoints of 2^52 equal intervals: never 0, never 1.
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * UNIFORM_UNIT
    return np.asarray(-np.log(-np.log(uniform)))


@intrinsic
def _high_product(typing_context: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of a product of two unsigned numbers of 64 bits."""
    utilities: Any = cgutils

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ir = utilities.ir  # of llvmlite
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(arguments[0], wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, wide(64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


_high: Any = cast(Any, _high_product)


@numba.njit(nogil=True, inline="always")
def random_bits(quad: Any, seed: Any, position: Any) -> Any:
    """In compiled code: four numbers of 64 bits, the raw output of `numpy.random.Philox(key=[seed, position])` at
    4 * quad and behind. NumPy counts its blocks from 1.

    Args:
        quad, seed, position: uint64.
    """
    first, second, third, fourth = quad + np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0)
    for _ in range(_ROUNDS):
        upper, lower = _high(_FIRST_FACTOR, first), _FIRST_FACTOR * first
        other_upper, other_lower = _high(_SECOND_FACTOR, third), _SECOND_FACTOR * third
        first, second = other_upper ^ second ^ seed, other_lower
        third, fourth = upper ^ fourth ^ position, lower
        seed += _FIRST_KEY_STEP
        position += _SECOND_KEY_STEP
    return first, second, third, fourth


class _Local(threading.local):
    work: Struct[Workspace] | None = None


_local = _Local()


def draw_token(scores: Float32Array, params: SamplingParams, position: int) -> int:
    """A token drawn from the softmax of scores over the temperature, among the tokens that are kept.

    Args:
        scores: float32[vocab], contiguous. If the greatest is infinite, or none is finite, it is drawn without noise.
        position: what noise depends on, beside the seed and the token.
    """
    work = _workspace(scores.shape[0])
    token = _sample(
        scores,
        np.float32(params.temperature),
        params.top_k,
        dropped_share(params.top_p),
        least_weight(params.min_p),
        np.uint64(params.seed),
        np.uint64(position),
        work.address,
        np.empty(2, np.int64),
    )
    return int(token)


def kept_tokens(scores: Float32Array, params: SamplingParams) -> BoolArray:
    """bool[vocab]: the tokens that `draw_token` draws from.

    Args:
        scores: as there, one of them finite, none greater.
    """
    work, edge = _workspace(scores.shape[0]), np.empty(2, np.int64)
    temperature = np.float32(params.temperature)
    find_greatest(scores.view(np.int32), work.fields.greatest)
    _find_edge(scores, temperature, params.top_k, dropped_share(params.top_p), work.address, edge)
    over_temperature = scores / temperature
    bits = (over_temperature + np.float32(0.0)).view(np.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    kept = (keys > edge[0]) | ((keys == edge[0]) & (np.arange(keys.size) >= edge[1]))
    return np.asarray(kept & np.isfinite(scores) & (token_weights(over_temperature) >= least_weight(params.min_p)))


def sampling_margin(scores: Float32Array, params: SamplingParams, position: int, token: int) -> float:
    """By how much scores would have to be off for `token` to be drawn; infinite for a token with a score of -inf.

    The token must be among those that are kept, and each kept one with a larger sum of score and noise must either lose
    to it or be left out. A token crosses the edge of what is kept at its distance to the nearest one on the other side:
    exact for top-k. For top-p it is an estimate, since what counts there is the sum of all probabilities before it.

    Args:
        scores, position: as for `draw_token`.
        token: not the one that was drawn.
    """
    if not np.isfinite(scores[token]):
        return float("inf")
    kept, warm = kept_tokens(scores, params), scores.astype(np.float64) / params.temperature
    sums = warm + gumbel_noise(warm.size, params.seed, position)
    margin = 0.0 if kept[token] else float(warm[kept].min() - warm[token])
    ahead = kept & (sums > sums[token])
    if ahead.any():
        edge = float(warm[~kept].max()) if not kept.all() else -np.inf
        margin = max(margin, float(np.minimum(sums[ahead] - sums[token], warm[ahead] - edge).max()))
    return margin * params.temperature


def _workspace(vocab: int) -> Struct[Workspace]:
    """That of the thread."""
    work = _local.work
    if work is None or work.fields.entries.shape[0] != vocab:
        work = _local.work = Struct(Workspace.of(vocab))
    return work


@compiled
def _sample(
    scores: Float32Array,
    temperature: Real,
    top_k: Integer,
    share: Real,
    min_weight: Real,
    seed: Integer,
    position: Integer,
    work_address: Integer,
    edge: Int64Array,
) -> int:
    work = arrays_at(Workspace, work_address)
    highest = find_greatest(scores.view(np.int32), work.greatest)
    if not -_INFINITE - 1 < highest < _INFINITE:
        return _first_with(scores, highest)
    find_edge(scores, temperature, top_k, share, work, edge)
    return _greatest_sum(scores, temperature, edge, min_weight, seed, position, work)


@compiled
def _find_edge(
    scores: Float32Array, temperature: Real, top_k: Integer, share: Real, work_address: Integer, edge: Int64Array
) -> None:
    find_edge(scores, temperature, top_k, share, arrays_at(Workspace, work_address), edge)


@compiled
def _first_with(scores: Float32Array, key: Integer) -> int:
    for token in range(scores.shape[0]):
        if key_of(scores[token]) == key:
            return token
    return 0


@compiled
def _greatest_sum(
    scores: Float32Array,
    temperature: Real,
    edge: Int64Array,
    min_weight: Real,
    seed: Integer,
    position: Integer,
    work: Workspace,
) -> int:
    """The first token of those with the greatest sum of score and noise, among those from the edge on."""
    vocab, floor, first_kept = scores.shape[0], edge[0], edge[1]
    max_score = np.float32(-np.inf)
    for block in range(work.greatest.shape[0]):
        max_score = max(max_score, apply_temperature(score_of(work.greatest[block]), temperature))
    best, at = -np.inf, 0
    for block in range(work.greatest.shape[0]):
        greatest = apply_temperature(score_of(work.greatest[block]), temperature)
        if key_of(greatest) < floor:
            continue
        limit = _limit(greatest, best)
        for quad in range(block * BLOCK // _LANES, (min(vocab, (block + 1) * BLOCK) + _LANES - 1) // _LANES):
            drawn = random_bits(np.uint64(quad), seed, position)
            for lane in range(_LANES):
                bits, token = drawn[lane] >> _UNUSED_BITS, quad * _LANES + lane
                if np.int64(bits) < limit or token >= vocab:
                    continue
                score = apply_temperature(scores[token], temperature)
                key = key_of(score)
                if key < floor or (key == floor and token < first_kept):
                    continue
                if min_weight > 0.0 and _is_light(max_score - score, min_weight):
                    continue
                noisy = np.float64(score) - math.log(-math.log((np.float64(bits) + 0.5) * UNIFORM_UNIT))
                if noisy > best:
                    best, at = noisy, token
                    limit = _limit(greatest, best)
    return at


@numba.njit(nogil=True, inline="always")
def _limit(greatest: Any, best: Any) -> Any:
    """Random bits below this make no sum greater than `best` with a score of `greatest` or less."""
    return np.int64((math.exp(-math.exp(np.float64(greatest) - best)) - _SLACK) / UNIFORM_UNIT)


@numba.njit(nogil=True, inline="always")
def _is_light(distance: Any, min_weight: Any) -> Any:
    return not distance < _FAR or weight_at(distance) < min_weight
