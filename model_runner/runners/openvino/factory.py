"""Takes a transformers model over for OpenVINO: converts it, checks what it computes, compiles it."""

from __future__ import annotations

from typing import Any, ClassVar

import openvino as ov
import torch

from model_runner.errors import UnsupportedRunnerError
from model_runner.runners.kv_capacity import default_capacity
from model_runner.runners.openvino.bfloat16 import keep_bfloat16
from model_runner.runners.openvino.conversion import convert
from model_runner.runners.openvino.probe import probe
from model_runner.runners.openvino.runner import OpenVinoRunner

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_CPU = torch.device("cpu")


class OpenVinoRunnerFactory:
    """Implements `runners.base.RunnerFactory`. Keeps nothing of the module but its weights.

    Args:
        module: an unmodified transformers model on a CPU; is left as it was.
        max_context: positions that it will be run on at most.

    Raises:
        UnsupportedRunnerError: the model cannot be converted, or computes something else then; with the reason.
    """

    name: ClassVar[str] = "openvino"
    exact: ClassVar[bool] = False

    def __init__(self, module: Any, max_context: int) -> None:
        dtype = str(module.dtype).removeprefix("torch.")
        if dtype not in _PRECISIONS:
            raise UnsupportedRunnerError(f"OpenVINO: dtype {dtype} is not supported; use float32 or bfloat16")
        if dtype == "bfloat16" and "BF16" not in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UnsupportedRunnerError("OpenVINO: this CPU has no bfloat16 instructions; use float32")
        self._model, self._layout, self._window = convert(module, max_context)
        if dtype == "bfloat16":
            keep_bfloat16(self._model)
        self._compiled: tuple[int, ov.CompiledModel] | None = None
        probe(module, self.runner, max_context)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._layout.bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        return default_capacity(self._layout.bytes_per_token, _CPU, context, sequences)

    def runner(self, kv_tokens: int, threads: int | None = None) -> OpenVinoRunner:
        """Compiles the model anew if the last runner had another number of threads; weights are held once for each
        number that a live runner has."""
        threads = threads or torch.get_num_threads()
        if self._compiled is None or self._compiled[0] != threads:
            self._compiled = None  # the weights of the last one are freed first, if no runner has them
            self._compiled = threads, _compile(self._model, self._layout.dtype, threads)
        return OpenVinoRunner(self._compiled[1], self._layout, self._window, kv_tokens)


def _compile(model: ov.Model, dtype: str, threads: int) -> ov.CompiledModel:
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": str(threads),
    }
    return ov.Core().compile_model(model, "CPU", options)
