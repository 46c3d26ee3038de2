"""Checks that draft trees can be verified on a model by the kernels for GPUs, and takes the model over."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import AttentionCall, attention_calls
from draftwood_model_runner.runners.base import KVCompaction, StepBatch
from draftwood_model_runner.runners.cuda import constants
from draftwood_model_runner.runners.cuda.exact_linear import make_exact
from draftwood_model_runner.runners.cuda.fusing.model import fuse, remove
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.states.shapes import MixerShape, shapes_of
from draftwood_model_runner.runners.cuda.steps.attention import STEP
from draftwood_model_runner.runners.cuda.steps.results import LaunchedStep
from draftwood_model_runner.runners.probing import does_not_run, try_beyond_thresholds, unsupported_layers
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.states.finding import find_mixers
from draftwood_model_runner.runners.states.mixers import Mixer
from draftwood_model_runner.runners.trials import PATH, Stepper, Trial, require_same

_log = logging.getLogger(__name__)
_CONTEXT, _LONG_CONTEXT = PAGE_SIZE - 3, 6 * PAGE_SIZE - 3
"""Tokens of the prompt, and of that of a small copy or a model with recurrent layers: more than linear attention
computes in one chunk. The path behind it crosses the end of a page."""


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
    name, mixers = type(module).__name__, list[Mixer]()
    try:
        module.set_attn_implementation("eager")
        if reason:
            mixers += find_mixers(module)
            if not mixers:
                raise UnsupportedModelError(f"{name}: {reason}")
        calls = attention_calls(module, max_context, every_layer=not mixers)
        module.set_attn_implementation("eager")
        trial = Trial.of(module, _LONG_CONTEXT if mixers or max_context == CONTEXT else _CONTEXT)
        expected = trial.generated(module)
        layout = _layout(module, calls, shapes_of(module, mixers), exact)
        STEP.install(module)
        if exact:
            make_exact(module)
        if mixers or not _fused(module, layout, calls, trial, expected):
            require_same(module, _drafted(module, layout, trial), expected)
    except Exception as error:
        for mixer in mixers:
            mixer.remove()
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(does_not_run(name, error)) from error
    return layout


def _layout(module: Any, calls: SequenceOf[AttentionCall], mixers: tuple[MixerShape, ...], exact: bool) -> CudaLayout:
    layers = [call.layer for call in calls]
    if not layers:
        raise ValueError("none of its layers attends")
    if None in layers or len({*layers}) < len(layers):
        raise ValueError(f"the layers that attend have the numbers {layers}")
    shapes, group = tuple(call.shape for call in calls), max(call.group for call in calls)
    numbers = tuple(int(layer or 0) for layer in layers)
    return CudaLayout(shapes, group, calls[0].dtype, module.device, exact, numbers, mixers)


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
        found: torch.Tensor = latest[0].wait()[0].predictions.logits
        return found

    def accept(moves: KVCompaction, nodes: list[int]) -> None:
        runner.compact_kv(moves)
        latest[0].accept(0, nodes)

    return trial.continued(Stepper(runner.pages, step), trial.tree(), PAGE_SIZE, accept)


def _is_exact(module: Any, layout: CudaLayout, max_context: int) -> bool:
    length = min(constants.EXACT_RUN - 2, max_context - PATH - 1)  # the true path crosses the end of a run
    runner = CudaRunner(module, layout, 2 * (length + 4 * PAGE_SIZE), graphs=False)
    model = Stepper(runner.pages, lambda batch: runner.step(batch, 0).logits)
    return Trial.of(module, length, seed=1).same_bits(model)
