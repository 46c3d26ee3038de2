"""Checks that draft trees can be verified on a model, by comparing their logits with the plain forward pass."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import attention_calls, attention_window
from draftwood_model_runner.runners.positions import follow_positions
from draftwood_model_runner.runners.probing import (
    TOLERANCE,
    difference,
    does_not_run,
    other_layers,
    past_thresholds,
    same_bits,
)
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.torch.attention import BATCH
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from draftwood_model_runner.runners.torch.latents import keep_expanded, keep_latents
from draftwood_model_runner.runners.torch.machine import bound_kernel_caches
from draftwood_model_runner.runners.torch.own.probe import own_layout
from draftwood_model_runner.runners.torch.packed_linear import linear_shapes, noted_calls, pack_linears
from draftwood_model_runner.runners.torch.runner import forward
from draftwood_model_runner.runners.torch.states.probe import stateful_layout
from draftwood_model_runner.runners.trials import PATH, Stepper, Trial, require_same

_log = logging.getLogger(__name__)
_CONTEXT = PAGE_SIZE - 3
"""Tokens of the prompt. The path behind it crosses the end of a page."""
_LONG_CONTEXT = 6 * PAGE_SIZE - 3
"""Tokens of the prompt of a small copy: far beyond the thresholds of `shrinking`."""
_EXACT_CONTEXT = 150
"""Tokens of the prompt in the trial of exact attention: it ends in the second block of `exact_attention`."""


@torch.inference_mode()
def probe(module: Any, exact: bool, max_context: int) -> KVLayout:
    """Makes a model ready for draft trees; returns the shape of its keys and values.

    It gets packed linear layers and tree attention. One that computes something else then, as it attends in code of its
    own, keeps its own attention over a cache of ours, if that computes the same; see `own`.

    A prompt and a small tree, whose true path has a wrong sibling beside every node, go through tree attention. The
    logits along the true path must be those of the unmodified model over the plain sequence. A model with windows or
    other thresholds is tried beyond them as well, on a small copy.

    Args:
        exact: choose exact attention if its logits are bit-identical with and without drafts on this machine.
        max_context: positions that the model will be run on at most.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = type(module).__name__
    bound_kernel_caches(linear_shapes(module))
    try:
        return _tree_attention(module, exact, max_context)
    except UnsupportedModelError as refusal:
        try:
            layout = own_layout(module, max_context)
        except UnsupportedModelError as error:
            raise type(refusal)(f"{refusal}; {error}") from error
        _log.warning(
            "%s: computed one sequence after the other, with its own attention; outputs may differ in rounding. %s",
            name,
            refusal,
        )
        return layout


def _tree_attention(module: Any, exact: bool, max_context: int) -> KVLayout:
    name, config = type(module).__name__, module.config.get_text_config()
    if reason := other_layers(config, max_context):
        if (stateful := stateful_layout(module, max_context)) is not None:
            if exact:
                _log.warning("%s: recurrent layers have no exact mode; outputs may differ in rounding", name)
            return stateful
        raise UnsupportedModelError(f"{name}: {reason}")
    layout = _layout(module, max_context)
    past_thresholds(
        module, max_context, lambda copied: _compare(copied, _layout(copied, CONTEXT), False, _LONG_CONTEXT)
    )
    return _compare(module, layout, exact, _CONTEXT)


def _compare(module: Any, layout: KVLayout, exact: bool, context: int) -> KVLayout:
    """Puts tree attention into a module and compares, with a prompt of `context` tokens; returns the layout in use."""
    trial = Trial.of(module, context)
    try:
        module.set_attn_implementation("eager")
        follow_positions(module)
        with noted_calls(module) as called:
            plain = trial.plain(module)
        pack_linears(module, called)
        BATCH.install(module)
        if exact and module.device.type == "cpu":
            layout = _exact_if_possible(module, layout)
        if not layout.exact and (latent := _over_latents(module, layout, trial, plain)) is not None:
            return latent
        logits = trial.drafted(stepper(module, layout, context + 2 * PATH), trial.tree())
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error
    require_same(module, logits, plain)
    return layout


def _over_latents(module: Any, layout: KVLayout, trial: Trial, plain: torch.Tensor) -> KVLayout | None:
    """A layout that keeps latents in place of keys and values, for a model that has some and computes the same then."""
    name = type(module).__name__
    try:
        kept = keep_latents(module)
        if not kept:
            return None
        shapes = tuple(kept.get(layer, shape) for layer, shape in enumerate(layout.shapes))
        smaller = replace(layout, shapes=shapes)
        model = stepper(module, smaller, trial.context + 2 * PATH)
        differing = difference(trial.drafted(model, trial.tree()), plain)
    except Exception as error:
        differing, reason = math.inf, f"{type(error).__name__}: {error}"
    else:
        reason = f"logits differ by {differing:.1e}"
    if differing <= TOLERANCE[module.dtype]:
        _log.info("%s: keeps latents, %.1f KiB a token", name, smaller.bytes_per_token / 1024)
        return smaller
    keep_expanded(module)
    _log.warning("%s: keeps expanded keys and values, since its latents do not do: %s", name, reason)
    return None


def stepper(module: Any, layout: KVLayout, kv_tokens: int) -> Stepper:
    """Steps of a module with tree attention, for trials."""
    kv = KVCache(layout, kv_tokens)
    return Stepper(kv.pages, lambda batch: forward(module, batch, kv))


def _layout(module: Any, max_context: int) -> KVLayout:
    calls = attention_calls(module, max_context)
    shapes, window = tuple(call.shape for call in calls), attention_window(calls, max_context)
    return KVLayout(shapes, calls[0].dtype, module.device, window=window)


def _exact_if_possible(module: Any, layout: KVLayout) -> KVLayout:
    exact = replace(layout, exact=True, dtype=torch.float32)
    if _is_exact(module, exact):
        return exact
    _log.warning(
        "%s: kernels here sum in an order that depends on the batch; outputs may differ in rounding",
        type(module).__name__,
    )
    return layout


def _is_exact(module: Any, layout: KVLayout) -> bool:
    trial = Trial.of(module, min(_EXACT_CONTEXT, _longest(module) - PATH - 1))
    model = stepper(module, layout, 2 * (trial.context // PAGE_SIZE + 4) * PAGE_SIZE)
    return same_bits(model.step, model.pages, trial.tokens[: trial.context], trial.path, trial.vocab)


def _longest(module: Any) -> int:
    return int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or 2 * _EXACT_CONTEXT)
