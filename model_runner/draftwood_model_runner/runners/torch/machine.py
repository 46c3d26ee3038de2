"""Widths that kernels are compiled for, and how many kernels torch and oneDNN keep."""

from __future__ import annotations

import os
from bisect import bisect_left

KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that torch and oneDNN read at their first product: how many kernels each keeps."""

_WIDTHS = (*range(1, 33), *range(34, 65, 2), *range(72, 129, 8), *range(144, 257, 16), *range(288, 513, 32))
_BEYOND = 64


def kernel_width(rows: int) -> int:
    """The number of rows that a product of `rows` rows is best filled up to.

    oneDNN compiles a kernel for each, in 0.3 ms, and keeps it: 0.55 MiB. Up to 32 rows each has its own, above it is up
    to an eighth more.
    """
    if rows > _WIDTHS[-1]:
        return -(-rows // _BEYOND) * _BEYOND
    return int(_WIDTHS[bisect_left(_WIDTHS, rows)])


def bound_kernel_caches(shapes: int) -> None:
    """Lets torch and oneDNN keep kernels for weights of `shapes` shapes and all usual widths, unless the environment
    already sets a number: the default of 1,024 takes half a gigabyte. Has no effect after the first product of the
    process, when both libraries have read their limits.
    """
    for name in KERNEL_CACHES:
        os.environ.setdefault(name, str(shapes * (len(_WIDTHS) + 8)))
