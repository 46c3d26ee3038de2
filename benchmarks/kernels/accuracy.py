"""How far the interpreted kernels are from what is right, computed in float64 or by the host.

Run as a program of its own (`python -m benchmarks.kernels.accuracy`), as Triton interprets kernels only where it was
told so before it is imported. Prints `{kernel: largest error}`.
"""

from __future__ import annotations

import json
import os

import numpy as np
import torch

SEEDS = 6
DTYPES = (torch.float32, torch.float16)
"""The interpreter multiplies the raw bits of bfloat16."""


def measure() -> dict[str, float]:
    """The largest error of each kernel: of attention, over numbers of about 1; of others, over tokens or entries."""
    from benchmarks.kernels.reference import attended, random_batch
    from model_runner.runners.base import KVShape
    from model_runner.runners.cuda.device.launching import require_triton

    require_triton(torch.device("cpu"))
    attention = {str(dtype).removeprefix("torch."): 0.0 for dtype in DTYPES}
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        rows = [
            (int(random.integers(0, 200)), int(random.integers(1, 20)), int(random.integers(0, 70))) for _ in range(3)
        ]
        batch, pages = random_batch(random, rows, deep=0.7)
        for dtype in DTYPES:
            output, expected, _ = attended(
                batch, pages, KVShape(1, 32, 32), 2, dtype, random, window=[None, 50][seed % 2], many_rows=seed % 3 == 0
            )
            error = float((output.double() - expected).abs().max())
            name = str(dtype).removeprefix("torch.")
            attention[name] = max(attention[name], error)
    return {
        "attention_parts": attention["float32"],
        "merge_parts": attention["float32"],
        "float16": attention["float16"],
    }


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps(measure()))
