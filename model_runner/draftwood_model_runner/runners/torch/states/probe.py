"""Checks that drafts can be verified on a model with recurrent layers, and how its mixers take several tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import attention_shapes
from draftwood_model_runner.runners.probing import (
    TOLERANCE,
    difference,
    does_not_run,
    past_thresholds,
)
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.states.finding import find_mixers
from draftwood_model_runner.runners.states.mixers import Mixer
from draftwood_model_runner.runners.torch.attention import BATCH
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from draftwood_model_runner.runners.torch.own.cache import own_cache
from draftwood_model_runner.runners.torch.packed_linear import noted_calls, pack_linears
from draftwood_model_runner.runners.torch.runner import forward
from draftwood_model_runner.runners.trials import PATH, Draft, Stepper, Trial

_log = logging.getLogger(__name__)
_TREE_ATTENTION = "tree attention"
_OWN_FORMS = ("by kind", "one", None)
"""Of `OwnCache.tree_masks`, best first, for models whose attention is in code of their own."""
_CONTEXT = 6 * PAGE_SIZE - 3
"""Tokens of the prompt, more than linear attention computes in one chunk."""


def stateful_layout(module: Any, max_context: int) -> KVLayout | None:
    """Makes a model with recurrent layers ready for drafts; None for a model without.

    A prompt in two steps, a draft tree, and a step after some of it was accepted must give the logits that the
    unmodified model computes as in `generate`. If a tree does not and a chain does, the layout is for chains. If its
    attention is in code of its own, it keeps that.

    Args:
        max_context: as for `torch.probe.probe`.

    Raises:
        UnsupportedModelError: they differ for chains as well, with the reason.
    """
    mixers = _mixers(module)
    if not mixers:
        return None
    refusals: list[UnsupportedModelError] = []
    for form in (_TREE_ATTENTION, *_OWN_FORMS):
        try:
            past_thresholds(module, max_context, partial(_tried, form=form))
            layout = _tried(module, mixers, form)
        except UnsupportedModelError as error:
            refusals.append(error)
            continue
        if refusals:
            _log.warning(
                "%s: computed one sequence after the other, with its own attention. %s",
                type(module).__name__,
                refusals[0],
            )
        return layout
    raise refusals[0]


def _mixers(module: Any) -> tuple[Mixer, ...]:
    module.set_attn_implementation("eager")
    try:
        return tuple(find_mixers(module))
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error


def _layout(module: Any, mixers: tuple[Mixer, ...], form: str | None) -> KVLayout:
    if form == _TREE_ATTENTION:
        shapes, _, dtype = attention_shapes(module, CONTEXT, every_layer=False)
        return KVLayout(shapes, dtype, module.device, mixers=mixers)
    module.set_attn_implementation("eager")
    own, shapes, dtype = own_cache(module, torch.zeros(1, 5, dtype=torch.long, device=module.device), stateful=True)
    return KVLayout(shapes, dtype, module.device, own=replace(own, tree_masks=form), mixers=mixers)


def _tried(module: Any, mixers: tuple[Mixer, ...] | None = None, form: str | None = _TREE_ATTENTION) -> KVLayout:
    """The layout with which a module computes what it should.

    Args:
        mixers: None to find them.
        form: of attention.
    """
    name, trial = type(module).__name__, Trial.of(module, _CONTEXT)
    drafts = [(True, trial.tree()), (False, trial.chain())]
    differing: list[float] = [math.inf]
    try:
        layout = _layout(module, _mixers(module) if mixers is None else mixers, form)
        plain = _plain(module, trial)
        if layout.own is None:
            BATCH.install(module)
        else:
            module.set_attn_implementation("eager")
        for branches, draft in drafts[1:] if form is None else drafts:
            for _ in _ways(layout.mixers):
                kv = KVCache(layout, _CONTEXT + 2 * PATH)
                differing.append(_difference(module, kv, trial, draft, plain))
                if differing[-1] <= TOLERANCE[module.dtype] and kv.states is not None:
                    return replace(layout, branches=branches, state_bytes=kv.states.state_bytes)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(does_not_run(name, error)) from error
    if reason := _least_time_step(layout.mixers):
        raise UnsupportedModelError(f"{name}: {reason}")
    raise UnsupportedModelError(
        f"{name}: logits over a draft differ from the model's own by {min(differing):.1e} (at most"
        f" {TOLERANCE[module.dtype]:.0e} is rounding), so its recurrent layers keep something beside the states in its"
        " cache, or its attention computes something of its own"
    )


def _ways(mixers: tuple[Mixer, ...]) -> Iterator[None]:
    """Sets how mixers take several tokens, one way after the other: the fastest first."""
    on_cpu = all(tensor.device.type == "cpu" for mixer in mixers for tensor in mixer.part.parameters())
    scanning = on_cpu and any(mixer.can_scan for mixer in mixers)
    limited = _least_time_step(mixers) is not None
    for scans in (True, False) if scanning and not limited else (scanning,):
        for by_ones in (False, True):
            for mixer in mixers:
                mixer.scans, mixer.by_ones = scans and mixer.can_scan, by_ones
            if scans or not limited:
                yield


def _least_time_step(mixers: tuple[Mixer, ...]) -> str | None:
    """Why what transformers computes depends on how many tokens it is given at once, as in Zamba 2 and Nemotron H."""
    limits = (getattr(mixer.part, "time_step_limit", None) for mixer in mixers)
    least = max((float(limit[0]) for limit in limits if limit), default=0.0)
    if least == 0.0:
        return None
    return (
        f"transformers raises time steps of its state-space layers to {least:g} where it is given several tokens, and"
        " does not for one token, which is computed alike on CPUs only"
    )


def _plain(module: Any, trial: Trial) -> torch.Tensor:
    """`Trial.generated` of the unmodified model. Puts packed linear layers into it."""
    module.set_attn_implementation("eager")
    with noted_calls(module) as called:
        logits = trial.generated(module)
    pack_linears(module, called)
    return logits


def _difference(module: Any, kv: KVCache, trial: Trial, draft: Draft, plain: torch.Tensor) -> float:
    """Of the logits along the path of a draft from the plain ones; infinite if the mixers cannot be computed so."""
    scans = any(mixer.scans for mixer in kv.layout.mixers)
    try:
        return difference(_drafted(module, kv, trial, draft), plain)
    except (TypeError, ValueError, AttributeError):
        if scans:
            return math.inf
        raise


def _drafted(module: Any, kv: KVCache, trial: Trial, draft: Draft) -> torch.Tensor:
    """`Trial.continued` of the model as it is run."""
    model = Stepper(kv.pages, lambda batch: forward(module, batch, kv))
    return trial.continued(model, draft, PAGE_SIZE, lambda moves, _: kv.move(moves))
