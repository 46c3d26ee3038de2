"""Checks that draft trees can be verified on a model by the kernels for GPUs, and takes the model over."""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import AttentionCall, attention_calls
from draftwood_model_runner.runners.cuda import constants
from draftwood_model_runner.runners.cuda.exact_linear import make_exact
from draftwood_model_runner.runners.cuda.fusing.forward import remove
from draftwood_model_runner.runners.cuda.fusing.model import fuse
from draftwood_model_runner.runners.cuda.kv_cache import PAGE_SIZE
from draftwood_model_runner.runners.cuda.runner import CudaLayout, CudaRunner
from draftwood_model_runner.runners.cuda.states.probe import stateful_layout
from draftwood_model_runner.runners.cuda.steps.attention import STEP
from draftwood_model_runner.runners.probing import does_not_run, other_layers, past_thresholds, same_bits
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.trials import PATH, Stepper, Trial, require_same

_log = logging.getLogger(__name__)
_CONTEXT, _LONG_CONTEXT = PAGE_SIZE - 3, 6 * PAGE_SIZE - 3
"""Tokens of the prompt, and of that of a small copy. The path behind it crosses the end of a page."""


@torch.inference_mode()
def probe(module: Any, max_context: int, exact: bool) -> CudaLayout:
    """Puts paged attention and fused operations into a model; returns the shape of its keys and values.

    As `runners.torch.probe`: the logits along the true path of a small tree must be those of the unmodified model.

    Args:
        exact: put exact attention and linear layers into it; logits must be bit-identical with and without drafts.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    if module.device.type == "cuda":
        torch.cuda.set_device(module.device)  # where Triton launches kernels
    remove(module)  # of an earlier runner
    if reason := other_layers(config, max_context):
        if exact:
            raise UnsupportedModelError(f"{name}: {reason}")
        return stateful_layout(module, max_context, reason)
    calls = attention_calls(module, max_context)

    def trial(copied: Any) -> None:
        _take_over(copied, attention_calls(copied, CONTEXT), exact, _LONG_CONTEXT)

    past_thresholds(module, max_context, trial)
    layout = _take_over(module, calls, exact, _CONTEXT)
    if exact and not _is_exact(module, layout, max_context):
        raise UnsupportedModelError(f"{name}: in exact mode the bits of its logits still depend on the batch")
    return layout


def _take_over(module: Any, calls: SequenceOf[AttentionCall], exact: bool, context: int) -> CudaLayout:
    """Replaces attention, and what else can be, and compares logits over a tree after a prompt of `context` tokens."""
    shapes, group = tuple(call.shape for call in calls), max(call.group for call in calls)
    layout, trial = CudaLayout(shapes, group, calls[0].dtype, module.device, exact), Trial.of(module, context)
    try:
        module.set_attn_implementation("eager")
        plain = trial.plain(module)
        STEP.install(module)
        if exact:
            make_exact(module)
        if _fused(module, layout, calls, trial, plain):
            return layout
        logits = trial.drafted(_stepper(module, layout, context + 2 * PATH), trial.tree())
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error
    require_same(module, logits, plain)
    return layout


def _fused(
    module: Any, layout: CudaLayout, calls: SequenceOf[AttentionCall], trial: Trial, plain: torch.Tensor
) -> bool:
    """Fuses what can be in a model; whether it then computes the same. If not, nothing of it stays fused."""
    try:
        if not fuse(module, [call.options for call in calls], layout.exact):
            return False
        require_same(module, trial.drafted(_stepper(module, layout, trial.context + 2 * PATH), trial.tree()), plain)
        return True
    except Exception as error:
        remove(module)
        _log.warning(
            "%s runs without fused operations, which takes longer: %s: %s",
            *(type(module).__name__, type(error).__name__, error),
        )
        return False


def _stepper(module: Any, layout: CudaLayout, kv_tokens: int) -> Stepper:
    runner = CudaRunner(module, layout, kv_tokens, graphs=False)
    return Stepper(runner.pages, lambda batch: runner.step(batch, 0).logits)


def _is_exact(module: Any, layout: CudaLayout, max_context: int) -> bool:
    length = min(constants.EXACT_RUN - 2, max_context - PATH - 1)  # the true path crosses the end of a run
    trial = Trial.of(module, length, seed=1)
    model = _stepper(module, layout, 2 * (length + 4 * PAGE_SIZE))
    return same_bits(model.step, model.pages, trial.tokens[:length], trial.path, trial.vocab)
