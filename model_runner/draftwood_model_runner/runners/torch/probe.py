"""Checks that drafts can be verified on a model, by comparing their logits with those of the model's own decoding."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.model_calls import follow_positions
from draftwood_model_runner.runners.recurrent_layers import RecurrentLayer, find_recurrent_layers
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.torch.attention import BATCH
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from draftwood_model_runner.runners.torch.latents import keep_expanded, keep_latents
from draftwood_model_runner.runners.torch.model_cache import find_model_cache
from draftwood_model_runner.runners.torch.packed_linear import (
    bound_kernel_caches,
    linear_shapes,
    noted_calls,
    pack_linears,
)
from draftwood_model_runner.runners.torch.runner import forward
from draftwood_model_runner.runners.torch.states import least_time_step, ways_to_call
from draftwood_model_runner.runners.trials import (
    PATH,
    Stepper,
    Trial,
    attention_calls,
    attention_window,
    difference,
    different,
    does_not_run,
    tolerance_of,
    try_beyond_thresholds,
    unsupported_layers,
)

_log = logging.getLogger(__name__)
_TREE_ATTENTION = "tree attention"
_FORMS = (_TREE_ATTENTION, "by kind", "one", None)
"""How a model attends, best first: by our function, or by its own with these `ModelCache.tree_masks`."""
_CONTEXT = PAGE_SIZE - 3
"""Tokens of the prompt. The path behind it crosses the end of a page."""
_LONG_CONTEXT = 6 * PAGE_SIZE - 3
"""Tokens of the prompt of a small copy, far beyond the thresholds of `shrinking`, and of a model with recurrent layers:
more than linear attention computes in one chunk."""
_EXACT_CONTEXT = 150
"""Tokens of the prompt in the trial of exact attention: it ends in the second block of `exact_attention`."""


@torch.inference_mode()
def probe(module: Any, exact: bool, max_context: int) -> KVLayout:
    """Makes a model ready for drafts; returns the shape of its keys and values.

    It gets packed linear layers and tree attention. One that computes something else then, as it attends in code of its
    own, keeps its own attention over a cache of ours, over trees or else over chains, if that computes the same; see
    `model_cache`.

    A prompt in two steps, a draft, and a step after some of it was accepted must give the logits that the unmodified
    model computes as in `generate`. A model with windows or other thresholds is tried beyond them as well, on a small
    copy.

    Args:
        exact: choose exact attention if its logits are bit-identical with and without drafts on this machine.
        max_context: positions that the model will be run on at most.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, config = type(module).__name__, module.config.get_text_config(decoder=True)
    bound_kernel_caches(linear_shapes(module))
    recurrent, refusals = False, list[UnsupportedModelError]()
    if reason := unsupported_layers(config, max_context):
        try:
            recurrent = bool(_recurrent_layers(module))
        except UnsupportedModelError as error:
            reason = str(error)
        if not recurrent:
            refusals.append(UnsupportedModelError(f"{name}: {reason}"))
    if recurrent and exact:
        _log.warning("%s: recurrent layers have no exact mode; outputs may differ in rounding", name)
    for form in _FORMS[len(refusals) :]:
        try:
            try_beyond_thresholds(module, max_context, partial(_tried, form=form, recurrent=recurrent))
            layout = _tried(module, form, recurrent, max_context, exact)
        except UnsupportedModelError as error:
            refusals.append(error)
            continue
        if layout.model_cache is not None:
            _log.warning(
                "%s: computed one sequence after the other, with its own attention; outputs may differ in rounding. %s",
                name,
                refusals[0],
            )
        return layout
    first, last = refusals[0], refusals[-1]
    raise type(first)(str(first) if str(last) == str(first) else f"{first}; {last}") from last


def _tried(module: Any, form: str | None, recurrent: bool, max_context: int = CONTEXT, exact: bool = False) -> KVLayout:
    """The layout with which a model computes what it should, attending in a form.

    Args:
        recurrent: it has recurrent layers.
        max_context, exact: as for `probe`; by default those of a small copy.
    """
    name, tolerance = type(module).__name__, tolerance_of(module)
    trial = Trial.of(module, _LONG_CONTEXT if recurrent or max_context == CONTEXT else _CONTEXT)
    smallest, failed = math.inf, None
    try:
        layout = _layout(module, form, _recurrent_layers(module) if recurrent else (), max_context)
        module.set_attn_implementation("eager")
        follow_positions(module)
        with noted_calls(module) as called:
            expected = trial.generated(module)
        pack_linears(module, called)
        if layout.model_cache is None:
            BATCH.install(module)
        for candidate in _candidates(module, layout, form, exact):
            model = KVCache(candidate, trial.context + 2 * PATH)
            try:
                differing = _differing(module, model, trial, expected)
            except Exception as error:
                failed = failed or error
                continue
            if differing <= tolerance:
                return candidate if model.states is None else replace(candidate, state_bytes=model.states.state_bytes)
            smallest = min(smallest, differing)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(does_not_run(name, error)) from error
    if reason := least_time_step(layout.recurrent_layers):
        raise UnsupportedModelError(f"{name}: {reason}")
    if failed is not None and smallest == math.inf:
        raise UnsupportedModelError(does_not_run(name, failed)) from failed
    raise UnsupportedModelError(different(module, smallest))


def _recurrent_layers(module: Any) -> tuple[RecurrentLayer, ...]:
    module.set_attn_implementation("eager")
    try:
        return tuple(find_recurrent_layers(module))
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error


def _layout(module: Any, form: str | None, recurrent_layers: tuple[RecurrentLayer, ...], max_context: int) -> KVLayout:
    if form == _TREE_ATTENTION:
        calls = attention_calls(module, max_context, every_layer=not recurrent_layers)
        window = None if recurrent_layers else attention_window(calls, max_context)
        dtype = calls[0].dtype if calls else module.dtype
        return KVLayout(
            tuple(call.shape for call in calls), dtype, module.device, window=window, recurrent_layers=recurrent_layers
        )
    module.set_attn_implementation("eager")
    ids = torch.arange(5, device=module.device)[None]
    model_cache, shapes, dtype = find_model_cache(module, ids, stateful=bool(recurrent_layers))
    return KVLayout(
        shapes,
        dtype,
        module.device,
        model_cache=replace(model_cache, tree_masks=form),
        recurrent_layers=recurrent_layers,
    )


def _candidates(module: Any, layout: KVLayout, form: str | None, exact: bool) -> Iterator[KVLayout]:
    """Layouts to try, the best first; the model is prepared for each when it is asked for."""
    if layout.recurrent_layers:
        for branches in (True, False) if form is not None else (False,):
            for _ in ways_to_call(layout.recurrent_layers):
                yield replace(layout, branches=branches)
        return
    if layout.model_cache is not None:
        yield replace(layout, branches=form is not None)
        return
    if exact and module.device.type == "cpu":
        in_order = replace(layout, exact=True, dtype=torch.float32)
        if _is_exact(module, in_order):
            yield in_order
            return
        _log.warning(
            "%s: kernels here sum in an order that depends on the batch; outputs may differ in rounding",
            type(module).__name__,
        )
    try:
        kept = keep_latents(module)
    except ValueError as error:
        _log.warning("%s: keeps expanded keys and values: %s", type(module).__name__, error)
    else:
        if kept:
            yield replace(layout, shapes=tuple(kept.get(layer, shape) for layer, shape in enumerate(layout.shapes)))
            keep_expanded(module)
            _log.warning("%s: keeps expanded keys and values, since latents do not do", type(module).__name__)
    yield layout


def _differing(module: Any, kv: KVCache, trial: Trial, expected: torch.Tensor) -> float:
    """How much logits along the path of a draft differ from those of `Trial.generated`."""
    model, layout = Stepper(kv.pages, lambda batch: forward(module, batch, kv)), kv.layout
    drafts = [trial.tree()] if layout.branches else [trial.chain()]
    if layout.model_cache is not None and layout.branches:
        drafts.append(trial.chain())  # for which it makes its masks itself
    logits = [trial.continued(model, draft, PAGE_SIZE, lambda moves, _: kv.move(moves)) for draft in drafts]
    return max(difference(drafted, expected) for drafted in logits)


def _is_exact(module: Any, layout: KVLayout) -> bool:
    longest = getattr(module.config.get_text_config(), "max_position_embeddings", None) or 2 * _EXACT_CONTEXT
    trial = Trial.of(module, min(_EXACT_CONTEXT, int(longest) - PATH - 1))
    kv = KVCache(layout, 2 * (trial.context // PAGE_SIZE + 4) * PAGE_SIZE)
    return trial.same_bits(Stepper(kv.pages, lambda batch: forward(module, batch, kv)))
