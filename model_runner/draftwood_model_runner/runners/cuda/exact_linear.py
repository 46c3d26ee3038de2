"""Linear layers for exact mode: what they compute of a token does not depend on how many others there are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from draftwood_model_runner.runners.cuda.constants import LINEAR_BLOCK
from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.kernels.linear import linear


def make_exact(module: nn.Module) -> int:
    """Replaces the linear layers of a model; returns how many. Quantized ones, and experts in one tensor, stay."""
    count = 0
    for part in module.modules():
        if type(part) is nn.Linear:
            part.forward = exact_linear(part.weight, part.bias)  # type: ignore[method-assign,assignment]
        elif type(part) is Conv1D:  # a linear layer whose weight is transposed
            part.forward = exact_linear(part.weight.T, part.bias)  # type: ignore[method-assign]
        else:
            continue
        count += 1
    return count


def exact_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of a weight [columns, inner] and a bias [columns]."""
    columns, inner = weight.shape
    block_rows, block_columns, block_inner = LINEAR_BLOCK

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., columns] of [..., inner]."""
        hidden = hidden_states.reshape(-1, inner).contiguous()
        output = hidden.new_empty((hidden.shape[0], columns))
        if hidden.shape[0]:
            launch(
                linear,
                (-(-columns // block_columns), -(-hidden.shape[0] // block_rows)),
                *(hidden, weight, output if bias is None else bias, output),
                *(hidden.shape[0], columns, inner, weight.stride(0), weight.stride(1)),
                WITH_BIAS=bias is not None,
                ROWS=block_rows,
                COLUMNS=block_columns,
                INNER=block_inner,
            )
        return output.view(*hidden_states.shape[:-1], columns)

    return forward
