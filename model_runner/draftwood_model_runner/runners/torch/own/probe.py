"""Checks whether a model can be computed with its own attention, and whether over trees or over chains only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.cache_argument import cache_argument
from draftwood_model_runner.runners.positions import follow_positions, plain_positions
from draftwood_model_runner.runners.probing import TOLERANCE, difference, shorter_context, small_copy
from draftwood_model_runner.runners.shrinking import thresholds
from draftwood_model_runner.runners.torch.kv_cache import KVCache, KVLayout
from draftwood_model_runner.runners.torch.own.cache import own_cache
from draftwood_model_runner.runners.torch.own.forward import own_forward
from draftwood_model_runner.runners.trials import PATH, Draft, Stepper, Trial

_CONTEXT, _LONG_CONTEXT = 13, 93
"""Tokens of the prompts of the model and of its small copy."""
_FORMS = ("by kind", "one", None)
"""Of `OwnCache.tree_masks`, best first."""


@torch.inference_mode()
def own_layout(module: Any, max_context: int) -> KVLayout:
    """The layout of a model that is computed with its own attention, over trees if it can.

    Logits over drafts must be those that the model computes with its own cache, token by token, as `generate` does:
    on the model itself, and on a small copy beyond its windows and other thresholds.

    Raises:
        UnsupportedModelError: they differ for chains as well; with the reason.
    """
    config = module.config.get_text_config(decoder=True)
    limits = thresholds(config, max_context)
    trials = [_Trial(module, _CONTEXT)]
    if limits:
        trials.append(_Trial(small_copy(module, limits), _LONG_CONTEXT))
    forms = _FORMS if getattr(config, "layer_types", None) else _FORMS[1:]
    differing: list[float] = []
    for form in forms:
        try:
            differing = [trial.difference(form) for trial in trials]
        except Exception as error:
            if form is None:
                raise UnsupportedModelError(_does_not_run(module, error)) from error
            continue
        if max(differing) <= TOLERANCE[module.dtype]:
            return trials[0].layout(form)
    advice = shorter_context(min(limits.values())) if limits and differing[0] <= TOLERANCE[module.dtype] else ""
    raise UnsupportedModelError(
        f"{type(module).__name__}: with its own cache it computes something else for several tokens at once than for"
        f" one after the other; logits differ by {max(differing):.1e} (at most {TOLERANCE[module.dtype]:.0e} is"
        f" rounding){advice}"
    )


class _Trial:
    """A prompt and what follows it, on one module.

    Raises:
        UnsupportedModelError: the module does not run, or keeps something else than keys and values.
    """

    def __init__(self, module: Any, context: int) -> None:
        self._module, self._trial = module, Trial.of(module, context)
        ids = self._trial.ids(module)
        try:
            module.set_attn_implementation("eager")
            follow_positions(module)
            self._own, shapes, dtype = own_cache(module, ids[:, :5])
            self._layout = KVLayout(shapes, dtype, module.device)
            self._expected = _generated(module, ids, context)
        except UnsupportedModelError:
            raise
        except Exception as error:
            raise UnsupportedModelError(_does_not_run(module, error)) from error

    def layout(self, form: str | None) -> KVLayout:
        """With these tree masks."""
        return replace(self._layout, own=replace(self._own, tree_masks=form))

    def difference(self, form: str | None) -> float:
        """Of the logits along a drafted path, in the tree that the form allows, from those of `generate`; also of a
        chain, since each form computes them."""
        drafts = [self._trial.chain(), *([] if form is None else [self._trial.tree()])]
        return max(self._difference(form, draft) for draft in drafts)

    def _difference(self, form: str | None, draft: Draft) -> float:
        layout = self.layout(form)
        own = layout.own
        assert own is not None
        kv = KVCache(layout, self._trial.context + 2 * PATH)
        model = Stepper(kv.pages, lambda batch: own_forward(self._module, batch, kv, own))
        found = difference(self._trial.drafted(model, draft), self._expected)
        return found if found == found else float("inf")


def _generated(module: Any, ids: torch.Tensor, context: int) -> torch.Tensor:
    """Logits [1 + path, vocab] as `generate` computes them: the prompt at once, then one token after the other."""
    name = str(cache_argument(type(module).forward))
    output = module(input_ids=ids[:, :context], use_cache=True, **plain_positions(module, context))
    logits = [output.logits[0, -1]]
    for at in range(context, ids.shape[1]):
        positions = plain_positions(module, 1, at)
        output = module(input_ids=ids[:, at : at + 1], use_cache=True, **{name: output[name]}, **positions)
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def _does_not_run(module: Any, error: Exception) -> str:
    return (
        f"{type(module).__name__} does not run with a cache of several tokens at once: {type(error).__name__}: {error}"
    )
