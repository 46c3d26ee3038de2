"""Which model and tokenizer these are, whatever they are called and in whatever precision they run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from draftwood_model_runner.loading.tokenizer import Tokenizer

_ELEMENTS = 16
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_SMALLEST = 2.0**-14
"""Below it, float16 has fewer digits than bfloat16."""


def fingerprint(module: Any, tokenizer: Tokenizer) -> str:
    """16 hexadecimal digits of the architecture, a few elements of every weight, and the vocabulary.

    A model that was trained further differs in some weight, also if only an adapter was merged into a few matrices. The
    weights' names do not count, and the vocabulary does instead of the tokenizer's file: both change with libraries.
    Elements count as bfloat16: a checkpoint is one model in all precisions, 8 bits included. What one of them wrote
    makes good drafts for the others, and drafts decide no token.
    """
    digest = hashlib.sha256(type(module).__name__.encode())
    weights = [weight.detach() for weight in module.parameters() if weight.numel()]
    samples = [
        f"{tuple(weight.shape)}".encode() + sample for weight, sample in zip(weights, _samples(weights), strict=True)
    ]
    for sample in sorted(samples):
        digest.update(sample)
    for token, number in sorted(tokenizer.token_ids().items()):
        digest.update(f"{number} {token}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _samples(weights: list[torch.Tensor]) -> list[bytes]:
    """A few elements of each weight, evenly spaced, as the bytes of bfloat16."""
    picked = []
    for weight in weights:
        flat = _plain(weight).reshape(-1)
        at = torch.linspace(0, flat.numel() - 1, min(_ELEMENTS, flat.numel()), dtype=torch.float64).long()
        picked.append(flat[at.to(flat.device)].float())
    values = torch.cat([one.cpu() for one in picked])
    values[values.abs() < _SMALLEST] = 0.0
    rows = values.to(torch.bfloat16).view(torch.int16).split([one.numel() for one in picked])
    return [row.numpy().tobytes() for row in rows]


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """A weight as a tensor whose elements can be picked."""
    if isinstance(weight, DTensor):
        return weight.full_tensor()  # by all ranks alike
    if type(weight) in (torch.Tensor, nn.Parameter):
        return weight.float() if weight.dtype in _FLOAT8 else weight
    return weight.dequantize()  # such as torchao's
