"""How far the interpreted kernels are from what is right, computed in float64 or by the host.

Run as a program of its own (`python -m draftwood_benchmarks.kernels.accuracy`), as Triton interprets kernels only where
it was told so before it is imported. Prints `{kernel: largest error}`.
"""

from __future__ import annotations

import json
import os

import numpy as np
import torch

SEEDS = 6
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def small_operations() -> dict[str, float]:
    """The fused operations against float64, and the most probable tokens, whose error is the share that is wrong."""
    from draftwood_benchmarks.kernels.reference import CPU
    from draftwood_model_runner.runners.base import KVShape
    from draftwood_model_runner.runners.cuda.exact_linear import exact_linear
    from draftwood_model_runner.runners.cuda.steps.forward import Workspace, find_top
    from draftwood_model_runner.runners.cuda.steps.results import TOP

    torch.manual_seed(0)
    rows, matrix = torch.randn(5, 96), torch.randn(80, 96) / 10
    space = Workspace((KVShape(1, 16, 16),), 3, 1, 1, 16, 1, CPU)
    space.arrays.row_count.fill_(3)
    logits = torch.randn(3, 9000)
    find_top(logits, space)
    wrong = (space.top[:, :TOP].long() != logits.topk(TOP).indices).double().mean()
    linear = float((exact_linear(matrix, None)(rows).double() - rows.double() @ matrix.double().T).abs().max())
    fused = {
        name: max(float((output.double() - right).abs().max()) for output, right in pairs)
        for name, pairs in _fused_operations().items()
    }
    return {"linear": linear, **fused, "top_of_blocks": float(wrong), "top_of_rows": float(wrong)}


def recurrent_layers() -> dict[str, float]:
    """The kernels of recurrent layers over draft trees, in float32: outputs, states, and what is kept of nodes."""
    from draftwood_benchmarks.kernels.state_reference import Shape, StateCase, random_rows

    errors = {"convolve": 0.0, "delta_rule": 0.0, "state_space": 0.0}
    for seed in range(SEEDS // 2):
        random = np.random.default_rng(seed)
        case = StateCase(random, random_rows(random, 2, most_nodes=[8, 40][seed % 2]), Shape(2, 1, 16, 24), padding=1)
        for pair in (*case.convolution(20), *case.delta_rule(), *case.state_space()):
            name = pair.name.split(":")[0]
            errors[name] = max(errors[name], pair.error)
    return errors


def _fused_operations() -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of parts of wider rows, as joined products leave them: what the kernels compute, and what is right."""
    from draftwood_model_runner.runners.cuda.fusing.attention import fused_rotation
    from draftwood_model_runner.runners.cuda.fusing.mlp import fused_silu
    from draftwood_model_runner.runners.cuda.fusing.norms import FusedNorm

    wide = torch.randn(1, 5, 320)
    gate, up = wide.split(160, -1)
    residual, angles = torch.randn(1, 5, 160), torch.randn(2, 1, 5, 32)
    query, key = wide[..., :96].view(1, 5, 3, 32), wide[..., 96:160].view(1, 5, 2, 32)
    turned = fused_rotation(query.transpose(1, 2), key.transpose(1, 2), *angles)
    weight, of_heads = torch.randn(160), torch.randn(32)
    norm = FusedNorm(weight, 1e-6, add_one=False)
    total, normed = norm.of_sum(residual, up)
    return {
        "rms_norm": [
            (norm(gate), _normed(gate, weight)),
            (FusedNorm(of_heads, 1e-6, add_one=False)(query), _normed(query, of_heads)),
            (total, up.double() + residual.double()),
            (normed, _normed(up.double() + residual.double(), weight)),
        ],
        "silu_product": [(fused_silu(gate, up), gate.double() * torch.sigmoid(gate.double()) * up.double())],
        "rotate": [(turned[0], _rotated(query, angles)), (turned[1], _rotated(key, angles))],
    }


def _normed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The root mean square norm in float64."""
    exact = rows.double()
    return weight.double() * exact / (exact.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def _rotated(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """[1, head, T, size] of heads [1, T, head, size], rotated by cosines and sines [2, 1, T, size], in float64."""
    exact, half = heads.double().transpose(1, 2), heads.shape[-1] // 2
    turned = torch.cat([-exact[..., half:], exact[..., :half]], -1)
    return exact * angles[0].double() + turned * angles[1].double()


def measure() -> dict[str, float]:
    """The largest error of each kernel: of attention, over numbers of about 1; of others, over tokens or entries."""
    from draftwood_benchmarks.kernels.interpreting import patch_interpreter
    from draftwood_benchmarks.kernels.reference import attended, random_batch
    from draftwood_model_runner.runners.base import KVShape
    from draftwood_model_runner.runners.cuda.device.launching import require_triton

    require_triton(torch.device("cpu"))
    patch_interpreter()
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
        "bfloat16": attention["bfloat16"],
        **small_operations(),
        **recurrent_layers(),
    }


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1"
    print(json.dumps(measure()))
