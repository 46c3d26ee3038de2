"""Takes a transformers model over for the kernels for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from draftwood_model_runner.errors import UnsupportedModelError, UnsupportedRunnerError
from draftwood_model_runner.runners.capacity.kv_arrays import bytes_per_token
from draftwood_model_runner.runners.capacity.kv_capacity import default_capacity
from draftwood_model_runner.runners.cuda.probe import probe
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner


@dataclass(frozen=True, eq=False, slots=True)
class CudaRunnerFactory:
    """Implements `runners.base.RunnerFactory`.

    Attributes:
        module: a transformers model whose attention is `attention.paged_attention`, see `probe`.
    """

    name: ClassVar[str] = "cuda"
    window: ClassVar[None] = None
    module: Any
    layout: CudaLayout

    @property
    def exact(self) -> bool:
        return self.layout.exact

    @property
    def kv_bytes_per_token(self) -> int:
        return bytes_per_token(self.layout.shapes, self.layout.dtype.itemsize)

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        per_sequence = self.layout.bytes_per_sequence
        return default_capacity(self.kv_bytes_per_token, self.layout.device, context, sequences, per_sequence)

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> CudaRunner:
        return CudaRunner(self.module, self.layout, kv_tokens, sequences=sequences)


def take_over(module: Any, max_context: int, exact: bool) -> CudaRunnerFactory:
    """The model as this runner computes it; its attention is replaced.

    Args:
        exact: compute so that rounding does not depend on drafts and batch, which takes longer.

    Raises:
        UnsupportedRunnerError: draft trees cannot be verified on the model by this runner; gives the reason.
    """
    try:
        return CudaRunnerFactory(module, probe(module, max_context, exact))
    except UnsupportedModelError as error:
        raise UnsupportedRunnerError(f"CUDA: {error}") from error
