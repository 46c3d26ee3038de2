"""Random numbers for sampling, the same bits as NumPy's on the host."""

from __future__ import annotations

import triton
import triton.language as tl


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
