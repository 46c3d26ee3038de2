"""Checks that drafts can be verified on a model with recurrent layers by the kernels for GPUs, and takes it over."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import AttentionCall, attention_calls
from draftwood_model_runner.runners.base import KVCompaction, StepBatch
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.states.shapes import MixerShape, shapes_of
from draftwood_model_runner.runners.cuda.steps.attention import STEP
from draftwood_model_runner.runners.cuda.steps.results import LaunchedStep
from draftwood_model_runner.runners.probing import does_not_run, past_thresholds
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.states.finding import find_mixers
from draftwood_model_runner.runners.states.mixers import Mixer
from draftwood_model_runner.runners.trials import PATH, Stepper, Trial, require_same

_CONTEXT = 6 * PAGE_SIZE - 3
"""Tokens of the prompt, more than linear attention computes in one chunk."""


def stateful_layout(module: Any, max_context: int, reason: str) -> CudaLayout:
    """Makes a model with recurrent layers ready for draft trees.

    A prompt in two steps, a draft tree, and a step after some of it was accepted must give the logits that the
    unmodified model computes as in `generate`.

    Args:
        max_context: as for `cuda.probe.probe`.
        reason: why a model without such layers is refused.

    Raises:
        UnsupportedModelError: they differ, or the kernels do not compute all mixers, with the reason. The model then
            is as it was, but for its attention.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UnsupportedModelError(f"{type(module).__name__}: {reason}")  # ranks do not tell each other of states

    def trial(copied: Any) -> None:
        _tried(copied, CONTEXT, reason)

    past_thresholds(module, max_context, trial)
    return _tried(module, max_context, reason)


def _tried(module: Any, max_context: int, reason: str) -> CudaLayout:
    name, mixers = type(module).__name__, list[Mixer]()
    try:
        module.set_attn_implementation("eager")
        mixers += find_mixers(module)
        if not mixers:
            raise UnsupportedModelError(f"{name}: {reason}")
        trial = Trial.of(module, _CONTEXT)
        plain = trial.generated(module)
        of_mixers = shapes_of(module, mixers)
        calls = attention_calls(module, max_context, every_layer=False)
        layout = _layout(module, calls, of_mixers)
        STEP.install(module)
        require_same(module, _drafted(module, layout, trial), plain)
    except Exception as error:
        for mixer in mixers:
            mixer.remove()
        if isinstance(error, UnsupportedModelError):
            raise
        raise UnsupportedModelError(does_not_run(name, error)) from error
    return layout


def _layout(module: Any, calls: SequenceOf[AttentionCall], mixers: tuple[MixerShape, ...]) -> CudaLayout:
    layers = tuple(call.layer for call in calls)
    if not layers:
        raise ValueError("none of its layers attends")
    if None in layers or len({*layers}) < len(layers):
        raise ValueError(f"the layers that attend have the numbers {layers}")
    shapes, group = tuple(call.shape for call in calls), max(call.group for call in calls)
    numbers = tuple(int(layer or 0) for layer in layers)
    return CudaLayout(shapes, group, calls[0].dtype, module.device, layers=numbers, mixers=mixers)


def _drafted(module: Any, layout: CudaLayout, trial: Trial) -> torch.Tensor:
    runner = CudaRunner(module, layout, _CONTEXT + 2 * PATH, graphs=False, sequences=1)
    latest: list[LaunchedStep] = []

    def step(batch: StepBatch) -> torch.Tensor:
        latest[:] = [runner.launch(batch, 0)]
        found: torch.Tensor = latest[0].wait()[0].predictions.logits
        return found

    def accept(moves: KVCompaction, nodes: list[int]) -> None:
        runner.compact_kv(moves)
        latest[0].accept(0, nodes)

    return trial.continued(Stepper(runner.pages, step), trial.tree(), PAGE_SIZE, accept)
