"""Takes a transformers model over for the kernels for GPUs, if a trial shows that they compute the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from draftwood_model_runner.errors import UnsupportedModelError, UnsupportedRunnerError
from draftwood_model_runner.runners.base import KVCompaction, StepBatch
from draftwood_model_runner.runners.cuda import tiling
from draftwood_model_runner.runners.cuda.attention import STEP
from draftwood_model_runner.runners.cuda.layers import fuse, make_exact, remove
from draftwood_model_runner.runners.cuda.memory import NO_FEATURES, PAGE_SIZE, FeatureShape
from draftwood_model_runner.runners.cuda.recurrent_layers import LayerShape, shapes_of
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.sampling import LaunchedStep
from draftwood_model_runner.runners.machine import bytes_per_token, default_capacity
from draftwood_model_runner.runners.model_calls import HANDED_ON, HeadModel, layer_list
from draftwood_model_runner.runners.recurrent_layers import RecurrentLayer, find_recurrent_layers
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.trials import (
    PATH,
    AttentionCall,
    Stepper,
    Trial,
    attention_calls,
    does_not_run,
    require_same,
    try_beyond_thresholds,
    unsupported_layers,
)
from draftwood_strategies.arrays import Float32Array

_log = logging.getLogger(__name__)
_CONTEXT, _LONG_CONTEXT = PAGE_SIZE - 3, 6 * PAGE_SIZE - 3
"""Tokens of the prompt, and of that of a small copy or a model with recurrent layers: more than linear attention
computes in one chunk. The path behind it crosses the end of a page."""


@dataclass(frozen=True, eq=False, slots=True)
class CudaRunnerFactory:
    """Implements `runners.base.RunnerFactory`.

    Attributes:
        module: a transformers model whose attention is `attention.paged_attention`, see `probe`; or a `HeadModel`.
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


def take_over(module: Any, max_context: int, exact: bool, feature_layers: tuple[int, ...] = ()) -> CudaRunnerFactory:
    """The model as this runner computes it; its attention is replaced.

    Args:
        exact: compute so that rounding does not depend on drafts and batch, which takes longer.
        feature_layers: see `loading.loaded.adopt`.

    Raises:
        UnsupportedRunnerError: draft trees cannot be verified on the model by this runner, or it does not show the
            inputs of its layers; gives the reason.
    """
    try:
        if feature_layers:
            layer_list(module)
        layout = probe(module, max_context, exact)
    except UnsupportedModelError as error:
        raise UnsupportedRunnerError(f"CUDA: {error}") from error
    shown = len(feature_layers) * int(module.config.get_text_config().hidden_size)
    features = FeatureShape(feature_layers, shown, 0, module.dtype) if feature_layers else NO_FEATURES
    return CudaRunnerFactory(module, replace(layout, features=features))


def take_over_head(
    head: Any, target: CudaRunnerFactory
) -> tuple[CudaRunnerFactory, Callable[[SequenceOf[Any]], Float32Array]]:
    """A draft head as this runner computes it, without fused operations, and `HeadParts.combine`, which computes on the
    device. It has no exact mode: drafts decide no token.

    Args:
        head: is changed as a model is, and takes the dtype and the device of its target. Its layers have numbers.

    Raises:
        UnsupportedModelError: see `HeadModel`.
    """
    module = HeadModel(head, target.module)
    STEP.install(head)
    numbers = sorted({int(part.layer_idx) for part in head.modules() if hasattr(part, "layer_idx")})
    group = max(int(head.config.num_attention_heads) // shape.kv_heads for shape in head.kv_shapes)
    width = module.hidden_width
    features = FeatureShape(HANDED_ON, width, width, module.dtype)
    layout = CudaLayout(head.kv_shapes, group, module.dtype, module.device, layers=tuple(numbers), features=features)
    return CudaRunnerFactory(module, layout), module.combine


@torch.inference_mode()
def probe(module: Any, max_context: int, exact: bool) -> CudaLayout:
    """Puts paged attention and fused operations into a model; returns the shape of its keys and values.

    As `runners.torch.probe`: the logits along the true path of a small tree must be those of the unmodified model.

    Args:
        exact: put exact attention and linear layers into it; logits must be bit-identical with and without drafts.

    Raises:
        UnsupportedModelError: they differ, or the kernels do not compute all recurrent layers, with the reason. A model
            with such layers then is as it was, but for its attention.
    """
    name = type(module).__name__
    if module.device.type == "cuda":
        torch.cuda.set_device(module.device)  # where Triton launches kernels
    remove(module)  # of an earlier runner
    reason = unsupported_layers(module.config.get_text_config(), max_context)
    ranked = torch.distributed.is_available() and torch.distributed.is_initialized()
    if reason and (exact or ranked):  # ranks do not tell each other of states
        raise UnsupportedModelError(f"{name}: {reason}")
    try_beyond_thresholds(module, max_context, partial(_taken_over, reason=reason, exact=exact))
    layout = _taken_over(module, reason, exact, max_context)
    if exact and not _is_exact(module, layout, max_context):
        raise UnsupportedModelError(f"{name}: in exact mode the bits of its logits still depend on the batch")
    return layout


def _taken_over(module: Any, reason: str | None, exact: bool, max_context: int = CONTEXT) -> CudaLayout:
    """Replaces attention, recurrent layers, and what else can be, and compares logits over a tree.

    Args:
        reason: why a model without recurrent layers is refused, if one with them is not.
        exact, max_context: as for `probe`; by default those of a small copy.
    """
    name, recurrent_layers = type(module).__name__, list[RecurrentLayer]()
    try:
        module.set_attn_implementation("eager")
        if reason:
            recurrent_layers += find_recurrent_layers(module)
            if not recurrent_layers:
                raise UnsupportedModelError(f"{name}: {reason}")
        calls = attention_calls(module, max_context, every_layer=not recurrent_layers)
        module.set_attn_implementation("eager")
        trial = Trial.of(module, _LONG_CONTEXT if recurrent_layers or max_context == CONTEXT else _CONTEXT)
        expected = trial.generated(module)
        layout = _layout(module, calls, shapes_of(module, recurrent_layers), exact)
        STEP.install(module)
        if exact:
            make_exact(module)
        if recurrent_layers or not _fused(module, layout, calls, trial, expected):
            require_same(module, _drafted(module, layout, trial), expected)
    except Exception as error:
        for layer in recurrent_layers:
            layer.remove()
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(does_not_run(name, error)) from error
    return layout


def _layout(
    module: Any, calls: SequenceOf[AttentionCall], recurrent_layers: tuple[LayerShape, ...], exact: bool
) -> CudaLayout:
    layers = [call.layer for call in calls]
    if not layers:
        raise ValueError("none of its layers attends")
    if None in layers or len({*layers}) < len(layers):
        raise ValueError(f"the layers that attend have the numbers {layers}")
    shapes, group = tuple(call.shape for call in calls), max(call.group for call in calls)
    numbers = tuple(int(layer or 0) for layer in layers)
    return CudaLayout(shapes, group, calls[0].dtype, module.device, exact, numbers, recurrent_layers)


def _fused(
    module: Any, layout: CudaLayout, calls: SequenceOf[AttentionCall], trial: Trial, expected: torch.Tensor
) -> bool:
    """Fuses what can be in a model; whether it then computes the same. If not, nothing of it stays fused."""
    try:
        if not fuse(module, [call.options for call in calls], layout.exact):
            return False
        require_same(module, _drafted(module, layout, trial), expected)
        return True
    except Exception as error:
        remove(module)
        _log.warning(
            "%s runs without fused operations, which takes longer: %s: %s",
            *(type(module).__name__, type(error).__name__, error),
        )
        return False


def _drafted(module: Any, layout: CudaLayout, trial: Trial) -> torch.Tensor:
    """`Trial.continued` of the model as it is run."""
    runner = CudaRunner(module, layout, trial.context + 2 * PATH, graphs=False, sequences=1)
    latest: list[LaunchedStep] = []

    def step(batch: StepBatch) -> torch.Tensor:
        latest[:] = [runner.launch(batch, 0)]
        logits: torch.Tensor = latest[0].wait()[0].predictions.logits
        return logits

    def accept(moves: KVCompaction, nodes: list[int]) -> None:
        runner.compact_kv(moves)
        latest[0].accept(0, nodes)

    return trial.continued(Stepper(runner.pages, step), trial.tree(), PAGE_SIZE, accept)


def _is_exact(module: Any, layout: CudaLayout, max_context: int) -> bool:
    length = min(tiling.EXACT_RUN - 2, max_context - PATH - 1)  # the true path crosses the end of a run
    runner = CudaRunner(module, layout, 2 * (length + 4 * PAGE_SIZE), graphs=False)
    model = Stepper(runner.pages, lambda batch: runner.step(batch, 0).logits)
    return Trial.of(module, length, seed=1).same_bits(model)
