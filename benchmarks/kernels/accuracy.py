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


def small_operations() -> dict[str, float]:
    """The fused operations against float64, and the most probable tokens, whose error is the share that is wrong."""
    from benchmarks.kernels.reference import CPU
    from model_runner.runners.base import KVShape
    from model_runner.runners.cuda.exact_linear import exact_linear
    from model_runner.runners.cuda.fusing import fused_norm, fused_rotation, fused_silu
    from model_runner.runners.cuda.steps.forward import TOP, Workspace, find_top

    torch.manual_seed(0)
    weight, rows = torch.randn(96), torch.randn(5, 96)
    matrix = torch.randn(80, 96) / 10
    exact = rows.double()
    normed = weight.double() * exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    gate, up = torch.randn(2, 5, 300)
    opened = gate.double() * torch.sigmoid(gate.double()) * up.double()
    heads, angles = torch.randn(1, 3, 4, 32), torch.randn(2, 1, 4, 32)
    turned = torch.cat([-heads[..., 16:], heads[..., :16]], -1).double()
    rotated = heads.double() * angles[0].double() + turned * angles[1].double()
    space = Workspace((KVShape(1, 16, 16),), 3, 1, 1, 16, 1, CPU)
    space.arrays.row_count.fill_(3)
    logits = torch.randn(3, 9000)
    find_top(logits, space)
    wrong = (space.top[:, :TOP].long() != logits.topk(TOP).indices).double().mean()
    pairs = {
        "linear": (exact_linear(matrix, None)(rows), exact @ matrix.double().T),
        "rms_norm": (fused_norm(weight, 1e-6, shifted=False)(rows), normed),
        "silu_product": (fused_silu(gate, up), opened),
        "rotate": (fused_rotation(heads, *angles), rotated),
    }
    errors = {name: float((output.double() - right).abs().max()) for name, (output, right) in pairs.items()}
    return errors | {"top_of_blocks": float(wrong), "top_of_rows": float(wrong)}


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
        **small_operations(),
    }


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps(measure()))
