"""Takes a transformers model over for OpenVINO: converts it, checks what it computes, compiles it."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, ClassVar

import openvino as ov
import torch

from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.runners.capacity.host import default_threads
from draftwood_model_runner.runners.capacity.kv_capacity import default_capacity
from draftwood_model_runner.runners.openvino.graph.bfloat16 import keep_bfloat16
from draftwood_model_runner.runners.openvino.graph.output_head import cut_at_head
from draftwood_model_runner.runners.openvino.graph.paged_attention import ConvertedModel
from draftwood_model_runner.runners.openvino.graph.pairing import pair_single_tokens
from draftwood_model_runner.runners.openvino.graph.weights import BITS, GROUP, quantize_weights
from draftwood_model_runner.runners.openvino.output_head import OutputHead
from draftwood_model_runner.runners.openvino.probe import probe
from draftwood_model_runner.runners.openvino.runner import OpenVinoRunner

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_ACTIVATION_GROUPS = {"float32": 0, "bfloat16": GROUP}
"""Activations that share a scale where a product with quantized weights rounds them to 8 bits; 0: they are not rounded.
docs/decisions, "8-bit weights", has the measurements: groups of 32 make a step of 32 tokens 1.2 times as long."""
_CPU = torch.device("cpu")


@cache
def core() -> ov.Core:
    """The one `Core` of the process, which is never destroyed.

    Each `Core` gives the main thread a signal stack of its own and takes it back in its destructor, which leaves the
    thread with a freed one where they are not destroyed in the reverse order: the next signal, such as the watchdog's,
    then ends the process.
    """
    return ov.Core()


class OpenVinoRunnerFactory:
    """Implements `runners.base.RunnerFactory`.

    Args:
        threads: CPU threads of a step where a runner is asked for without; None for `default_threads`.
    """

    name: ClassVar[str] = "openvino"
    exact: ClassVar[bool] = False

    def __init__(self, converted: ConvertedModel, threads: int | None = None) -> None:
        self.converted = converted
        self._threads = threads
        self._compiled: tuple[int, ov.CompiledModel, OutputHead | None] | None = None

    @property
    def window(self) -> int | None:
        return self.converted.window if self.converted.in_every_layer else None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.converted.layout.bytes_per_token

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        return default_capacity(self.converted.layout.bytes_per_token, _CPU, context, sequences)

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> OpenVinoRunner:
        """Compiles the model again if the last runner had another number of threads; weights are held once for each
        number that a live runner has."""
        threads = threads or self._threads or default_threads()
        _, layout, window, _ = self.converted
        if self._compiled is None or self._compiled[0] != threads:
            self._compiled = None  # the weights of the last one are freed first, if no runner has them
            self._compiled = threads, *self._compile(threads)
        _, compiled, head = self._compiled
        return OpenVinoRunner(compiled, layout, window, kv_tokens, threads, head)

    def _compile(self, threads: int) -> tuple[ov.CompiledModel, OutputHead | None]:
        """The model and None, or its body and its head if that is large."""
        model, dtype = self.converted.model, self.converted.layout.dtype
        cut = cut_at_head(model, dtype)
        if cut is None:
            return _compile(model, dtype, threads), None
        compile_head = partial(_compile, dtype=dtype, threads=threads, activation_group=GROUP)
        return _compile(cut.body, dtype, threads), OutputHead(cut.head, cut.weights, compile_head, threads)


def take_over(
    module: Any, max_context: int, *, weights: str = "as-is", threads: int | None = None
) -> OpenVinoRunnerFactory:
    """Converts a model, and checks what it computes then. Keeps nothing of the module but its weights.

    Args:
        module: an unmodified transformers model on a CPU; is left as it was.
        max_context: positions that it will be run on at most.
        weights: "as-is", or one of `weights.BITS` to quantize them.
        threads: as for `OpenVinoRunnerFactory`.

    Raises:
        UnsupportedRunnerError: the model cannot be converted or quantized, or computes something else then; with the
            reason.
    """
    # Imports the modelling code of transformers, which a model that is read from a file does without.
    from draftwood_model_runner.runners.openvino.conversion import convert

    dtype = str(module.dtype).removeprefix("torch.")
    if dtype not in _PRECISIONS:
        raise UnsupportedRunnerError(f"OpenVINO: dtype {dtype} is not supported; use float32 or bfloat16")
    if dtype == "bfloat16" and "BF16" not in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise UnsupportedRunnerError("OpenVINO: this CPU has no bfloat16 instructions; use float32")
    converted = convert(module, max_context)
    if weights in BITS:
        quantize_weights(converted.model, BITS[weights])
        if dtype == "bfloat16":
            pair_single_tokens(converted.model)
    elif dtype == "bfloat16":
        keep_bfloat16(converted.model)
    factory = OpenVinoRunnerFactory(converted, threads)
    probe(module, factory.runner, max_context, weights)
    return factory


def _compile(model: ov.Model, dtype: str, threads: int, activation_group: int | None = None) -> ov.CompiledModel:
    """Where activations are rounded, it is in groups of `activation_group`."""
    if activation_group is None:
        activation_group = _ACTIVATION_GROUPS[dtype]
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _PRECISIONS[dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[dtype],
        "INFERENCE_NUM_THREADS": str(threads),
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(activation_group),
    }
    return core().compile_model(model, "CPU", options)
