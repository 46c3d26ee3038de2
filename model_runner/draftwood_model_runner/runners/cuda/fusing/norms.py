"""RMS norms in one kernel, and the addition of a residual within them."""

from __future__ import annotations

import torch

from draftwood_model_runner.runners.cuda.device.launching import launch
from draftwood_model_runner.runners.cuda.kernels.fused import rms_norm
from draftwood_model_runner.runners.cuda.steps.attention import power_of_2

LARGEST_ROW = 16_384
"""Numbers that one program normalizes: its registers hold them."""
_FOUR_WARPS = 4096
"""Numbers that the registers of four warps hold in every dtype."""


class FusedNorm:
    """A norm.

    Args:
        weight: [size], at most `LARGEST_ROW`.
        add_one: 1 is added to the weight.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, add_one: bool) -> None:
        self._weight, self._epsilon, self._add_one = weight, epsilon, add_one

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., size] of [..., size]; heads [1, T, head, size] may be part of wider rows."""
        heads = hidden_states.shape[-2] if hidden_states.dim() == 4 else 1
        rows = hidden_states.reshape(-1, heads, self._weight.numel())
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        output = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._launch(rows, output, None)
        return output.view(hidden_states.shape)

    def of_sum(self, residual: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + hidden_states, all [..., size], and the norm of the sum."""
        rows, residual = hidden_states.contiguous().view(-1, 1, self._weight.numel()), residual.contiguous()
        total, output = torch.empty_like(residual), torch.empty_like(residual)
        self._launch(rows, output, (residual, total))
        return total, output

    def _launch(
        self, rows: torch.Tensor, output: torch.Tensor, addition: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        size = self._weight.numel()
        launch(
            rms_norm,
            (rows.shape[0], rows.shape[1]),
            *(rows, *(addition or (rows, output)), self._weight, output),
            *(self._epsilon, rows.stride(0), rows.stride(1)),
            SIZE=size,
            BLOCK=power_of_2(size),
            ADD_ONE=self._add_one,
            ADDED=addition is not None,
            num_warps=4 if size <= _FOUR_WARPS else 8,
        )
