"""Linear layers in 16 bits for CPUs that cannot multiply in them: FBGEMM reads float16 and computes in float32.

oneDNN needs AVX-512 for bfloat16; without it torch multiplies row by row, and a draft tree of 8 nodes takes 7 times as
long as one token. Weights of 16 bits are half of what float32 has to read, which is most of what a step costs.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import nn
from torch.nn.functional import pad

_LARGEST_EXPONENT = 15
"""Scaled weights are below 2 to this power, within the 65,504 that float16 holds."""
_FLOAT32_ROUNDING = 2.0**-24
_TRIAL_SHAPE = 96, 128
_TRIAL_ROWS = 360
_MOST_PADDING = 16


class FbgemmLinear(nn.Module):
    """An `nn.Linear` whose weight, [out, in], is packed by FBGEMM as float16. Sums are float32 and rounded once.

    float16 rounds bfloat16 weights below 2**-17. Where that is more than float32 itself would round, the weight is
    scaled by a power of two first; then one is exact unless it is 2**31 times smaller than the greatest.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        """Nothing: for those who ask for its dtype or device."""
        weight = linear.weight.detach().float()
        bias = None if linear.bias is None else linear.bias.detach().float()
        self._unscale = None
        if (weight.half().float() - weight).norm() > _FLOAT32_ROUNDING * weight.norm():
            exponent = _LARGEST_EXPONENT - math.frexp(float(weight.abs().max()))[1]
            weight *= 2.0**exponent
            self._unscale = torch.tensor([2.0**-exponent])
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._multiple = row_multiple() or 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in] to [..., out]. A row's bits do not depend on the others."""
        rows = inputs.reshape(-1, self.in_features)
        count = rows.shape[0]
        if count == 1:
            rows = rows.expand(self._multiple, -1)
        elif missing := -count % self._multiple:
            rows = pad(rows, (0, 0, 0, missing))
        rows = rows.float() if self._unscale is None else rows * self._unscale
        sums: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._packed)
        return sums[:count].to(inputs.dtype).view(*inputs.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.weight.dtype}"


def multiplies_in(dtype: torch.dtype) -> bool:
    """Whether FBGEMM is there for weights of this type, and sums a row alike among other numbers of rows."""
    return dtype in (torch.bfloat16, torch.float16) and row_multiple() is not None


@cache
def row_multiple() -> int | None:
    """Numbers of rows that are multiples of this get the same bits for each row; None where there is no such number.

    FBGEMM cuts rows into runs of one to six, or of more with AVX-512, and sums those of one and two in another order.
    How it cuts depends on nothing but the number of rows.
    """
    if torch.backends.quantized.engine not in ("x86", "fbgemm"):
        return None
    outs, ins = _TRIAL_SHAPE
    seeded = torch.Generator().manual_seed(0)
    rows = torch.randn(_TRIAL_ROWS, ins, generator=seeded)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(outs, ins, generator=seeded), None)
    product = torch.ops.quantized.linear_dynamic_fp16
    expected = product(rows, packed)
    for multiple in range(1, _MOST_PADDING + 1):
        counts = range(multiple, _TRIAL_ROWS, multiple)
        if all(torch.equal(product(rows[-count:], packed), expected[-count:]) for count in counts):
            return multiple
    return None
