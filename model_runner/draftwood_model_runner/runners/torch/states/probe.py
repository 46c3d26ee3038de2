"""Checks that drafts can be verified on a model with recurrent layers, and how its mixers take several tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.attention_shapes import attention_shapes
from draftwood_model_runner.runners.base import KVCompaction
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.probing import TOLERANCE, difference, does_not_run, past_thresholds
from draftwood_model_runner.runners.shrinking import CONTEXT
from draftwood_model_runner.runners.torch.attention import ATTENTION_NAME
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from draftwood_model_runner.runners.torch.packed_linear import noted_calls, pack_linears
from draftwood_model_runner.runners.torch.runner import forward
from draftwood_model_runner.runners.torch.states.mixers import find_mixers
from draftwood_model_runner.runners.trials import PATH, Draft, Stepper, Trial
from draftwood_strategies.draft import EMPTY_TREE

_CONTEXT = 6 * PAGE_SIZE - 3
"""Tokens of the prompt, more than linear attention computes in one chunk."""


def stateful_layout(module: Any, max_context: int) -> KVLayout | None:
    """Makes a model with recurrent layers ready for drafts; None for a model without.

    A prompt in two steps, a draft tree, and a step after some of it was accepted must give the logits of the unmodified
    model over the plain sequence. If a tree does not and a chain does, the layout is for chains.

    Args:
        max_context: as for `torch.probe.probe`.

    Raises:
        UnsupportedModelError: they differ for chains as well, with the reason.
    """
    layout = _layout(module, max_context)
    if not layout.mixers:
        return None
    if reason := _least_time_step(layout):
        raise UnsupportedModelError(f"{type(module).__name__}: {reason}")
    past_thresholds(module, max_context, lambda copied: _tried(copied, _layout(copied, CONTEXT)))
    return _tried(module, layout)


def _layout(module: Any, max_context: int) -> KVLayout:
    name = type(module).__name__
    module.set_attn_implementation("eager")
    try:
        mixers = tuple(find_mixers(module))
    except Exception as error:
        raise UnsupportedModelError(does_not_run(name, error)) from error
    shapes, _, dtype = attention_shapes(module, max_context, every_layer=False)
    return KVLayout(shapes, dtype, module.device, mixers=mixers)


def _least_time_step(layout: KVLayout) -> str | None:
    """Why what transformers computes depends on how many tokens it is given at once, as in Zamba 2 and Nemotron H."""
    limits = (getattr(mixer.part, "time_step_limit", None) for mixer in layout.mixers)
    least = max((float(limit[0]) for limit in limits if limit), default=0.0)
    if least == 0.0:
        return None
    return (
        f"transformers raises time steps of its state-space layers to {least:g} where it is given several tokens, and"
        " does not for one token, so that what it writes depends on how prompts and drafts are cut into steps"
    )


def _tried(module: Any, layout: KVLayout) -> KVLayout:
    """The layout with which a module computes what it should."""
    name, trial = type(module).__name__, Trial.of(module, _CONTEXT)
    differing: list[float] = []
    try:
        plain = _plain(module, trial)
        for branches, draft in ((True, trial.tree()), (False, trial.chain())):
            for by_ones in (False, True):
                for mixer in layout.mixers:
                    mixer.by_ones = by_ones
                differing.append(difference(_drafted(module, layout, trial, draft), plain))
                if differing[-1] <= TOLERANCE[module.dtype]:
                    return replace(layout, branches=branches)
    except Exception as error:
        raise UnsupportedModelError(does_not_run(name, error)) from error
    raise UnsupportedModelError(
        f"{name}: logits over a draft differ from the model's own by {min(differing):.1e} (at most"
        f" {TOLERANCE[module.dtype]:.0e} is rounding), so its recurrent layers keep something beside the states in its"
        " cache, or its attention computes something of its own"
    )


def _plain(module: Any, trial: Trial) -> torch.Tensor:
    """Logits [2 + path, vocab] of the unmodified model, from the last token of the prompt on, the last of them twice;
    puts tree attention and packed linear layers into it."""
    module.set_attn_implementation("eager")
    with noted_calls(module) as called:
        logits = trial.plain(module)
    pack_linears(module, called)
    module.set_attn_implementation(ATTENTION_NAME)
    return torch.cat([logits, logits[-1:]])


def _drafted(module: Any, layout: KVLayout, trial: Trial, draft: Draft) -> torch.Tensor:
    """The same logits along the path of a draft; the last once more from a step of its own, with the path before
    accepted."""
    kv = KVCache(layout, _CONTEXT + 2 * PATH)
    model = Stepper(kv.pages, lambda batch: forward(module, batch, kv))
    logits = trial.drafted(model, draft).clone()
    pages = trial.pages(model)
    slots = lay_out([trial.drafted_row(pages, draft)]).slot_mapping(PAGE_SIZE)[2:].astype(np.int32)
    accepted = [*draft.nodes[:-1]]
    kv.move(KVCompaction(slots[accepted], slots[: len(accepted)], np.array([0, len(accepted)], np.int32)))
    last = BatchRow(pages, _CONTEXT + PATH - 1, trial.path[-1:], EMPTY_TREE, logits_from=0)
    return torch.cat([logits, model.step(lay_out([last]))[:1]])
