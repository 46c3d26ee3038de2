"""Replaces the small operations of a model by kernels that do several at once.

Between two matrix products a layer of transformers launches some thirty kernels, each of which takes longer to start
than to run. What is replaced is found by its shape and then tried: where a kernel computes something else than the
module does, beyond rounding, the module stays as it was.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from model_runner.runners.cuda.device.launching import launch
from model_runner.runners.cuda.kernels.fused import rms_norm, rotate, silu_product
from model_runner.runners.cuda.steps.attention import STEP, power_of_2

_log = logging.getLogger(__name__)
_ROTATION = "apply_rotary_pos_emb"
_LARGEST_ROW = 16_384
"""Numbers that one program normalizes: its registers hold them."""
_BLOCK = 1024
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference that is rounding, of numbers of about 1."""


@torch.inference_mode()
def fuse(module: nn.Module) -> dict[str, int]:
    """Replaces what can be in a model, and in the file of its class; returns how much of what.

    Norms and MLPs of the model change for good. The rotation of a file is shared by its models: it is the old one
    wherever no step is computed.
    """
    counts = {"norms": 0, "MLPs": 0, "rotations": 0}
    for part in module.modules():
        name = type(part).__name__
        if name.endswith("RMSNorm") and _fuse_norm(part):
            counts["norms"] += 1
        elif {"gate_proj", "up_proj", "down_proj", "act_fn"} <= {*dict(part.named_children())} and _fuse_mlp(part):
            counts["MLPs"] += 1
    counts["rotations"] = int(_fuse_rotation(sys.modules[type(module).__module__]))
    _log.info("operations in one kernel each: %s", ", ".join(f"{count} {what}" for what, count in counts.items()))
    return counts


def _fuse_norm(norm: Any) -> bool:
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if epsilon is None or weight is None or weight.dim() != 1 or weight.numel() > _LARGEST_ROW:
        return False
    sample = torch.randn(3, weight.numel(), dtype=weight.dtype, device=weight.device)
    for shifted in (False, True):
        fused = fused_norm(weight, float(epsilon), shifted)
        if _agree(fused, norm.forward, sample):
            norm.forward = fused
            return True
    return False


def fused_norm(weight: torch.Tensor, epsilon: float, shifted: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """The norm of rows by a weight [size]; `shifted`: by 1 more."""
    size = weight.numel()

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., size] of [..., size]."""
        rows = hidden_states.reshape(-1, size)
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        launch(
            rms_norm,
            (rows.shape[0],),
            *(rows, weight, output, epsilon, rows.stride(0)),
            SIZE=size,
            BLOCK=power_of_2(size),
            SHIFTED=shifted,
        )
        return output.view(hidden_states.shape)

    return forward


def _fuse_mlp(mlp: Any) -> bool:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = down(fused_silu(gate(x), up(x)))
        return output

    width = getattr(gate, "in_features", None)
    if width is None:
        return False
    dtype = next(mlp.parameters()).dtype
    sample = torch.randn(1, 3, width, dtype=dtype, device=next(mlp.parameters()).device)
    if not dtype.is_floating_point or not _agree(forward, mlp.forward, sample):
        return False
    mlp.forward = forward
    return True


def fused_silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, of two tensors of one shape."""
    gate, up = gate.contiguous(), up.contiguous()
    product, count = torch.empty_like(gate), gate.numel()
    launch(silu_product, (-(-count // _BLOCK),), *(gate, up, product, count), BLOCK=_BLOCK)
    return product


def _fuse_rotation(file: Any) -> bool:
    original = getattr(file, _ROTATION, None)
    if original is None:
        return False
    if not hasattr(original, "unfused"):
        setattr(file, _ROTATION, _rotation(original))
    return True


def _rotation(original: Callable[..., Any]) -> Callable[..., Any]:
    agrees: dict[tuple[torch.dtype, int], bool] = {}

    def rotated(q: Any, k: Any, cos: Any, sin: Any, *arguments: Any, **options: Any) -> Any:
        """Query and key [1, head, T, size], rotated by cos and sin [1, T, size]."""
        usual = not arguments and not options and q.dim() == 4 and cos.dim() == 3 and q.shape[0] == 1
        if STEP.get(None) is None or not usual or cos.shape[-1] != q.shape[-1] or cos.dtype != q.dtype:
            return original(q, k, cos, sin, *arguments, **options)
        kind = (q.dtype, q.shape[-1])
        if kind not in agrees:
            samples = [torch.randn(1, 2, 3, q.shape[-1], dtype=q.dtype, device=q.device) for _ in range(2)]
            angles = [torch.rand(1, 3, q.shape[-1], dtype=q.dtype, device=q.device) for _ in range(2)]
            expected = original(*samples, *angles)
            pairs = zip((fused_rotation(one, *angles) for one in samples), expected, strict=True)
            agrees[kind] = all(_near(one, right) for one, right in pairs)
        if not agrees[kind]:
            return original(q, k, cos, sin)
        return fused_rotation(q, cos, sin), fused_rotation(k, cos, sin)

    rotated.unfused = original  # type: ignore[attr-defined]
    return rotated


def fused_rotation(hidden: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Queries or keys [1, head, T, size], rotated by cosines and sines [1, T, size]."""
    _, heads, tokens, size = hidden.shape
    hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    output = torch.empty((tokens, heads, size), dtype=hidden.dtype, device=hidden.device)
    launch(
        rotate,
        (tokens,),
        *(hidden, cosines.contiguous(), sines.contiguous(), output, hidden.stride(2), hidden.stride(1)),
        HEADS=heads,
        HEADS_BLOCK=power_of_2(heads),
        HALF=size // 2,
        BLOCK=power_of_2(size // 2),
    )
    return output.transpose(0, 1)[None]


def _agree(fused: Callable[[torch.Tensor], torch.Tensor], plain: Callable[[torch.Tensor], Any], sample: Any) -> bool:
    """Whether two functions compute the same of a sample, but for rounding; False if one of them raises."""
    try:
        return _near(fused(sample), plain(sample))
    except Exception as error:
        _log.info("an operation is not replaced: %s: %s", type(error).__name__, error)
        return False


def _near(output: torch.Tensor, expected: torch.Tensor) -> bool:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        return False
    scale = max(1.0, float(expected.float().abs().max()))
    return float((output.float() - expected.float()).abs().max()) <= _TOLERANCE[output.dtype] * scale
