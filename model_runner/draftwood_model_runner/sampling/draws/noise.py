"""Gumbel noise that depends on seed, position and token alone.

Philox is a counter-based generator (Salmon et al., 2011): the noise of one token is computed without that of others.
Its raw bits do not change between NumPy versions.
"""

from __future__ import annotations

from typing import Any, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.core import cgutils, types
from numba.extending import intrinsic

UNIFORM_UNIT = 2.0**-52
_FIRST_FACTOR, _SECOND_FACTOR = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_FIRST_KEY_STEP, _SECOND_KEY_STEP = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10


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
