"""Checks whether a model can be computed with its own attention, and whether over trees or over chains only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.positions import follow_positions, plain_positions
from draftwood_model_runner.runners.probing import (
    TOLERANCE,
    difference,
    path_with_wrong_siblings,
    shorter_context,
    small_copy,
)
from draftwood_model_runner.runners.shrinking import thresholds
from draftwood_model_runner.runners.torch.kv_cache import KVCache, KVLayout
from draftwood_model_runner.runners.torch.own.cache import own_cache
from draftwood_model_runner.runners.torch.own.forward import own_forward
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, Int32Array

_PATH = 5
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
        self._module = module
        self._vocab = int(module.config.get_text_config(decoder=True).vocab_size)
        self._tokens = np.random.default_rng(0).integers(0, self._vocab, context + _PATH, np.int32)
        self._context = context
        try:
            module.set_attn_implementation("eager")
            follow_positions(module)
            self._own, shapes, dtype = own_cache(module, _ids(self._tokens[:5], module))
            self._layout = KVLayout(shapes, dtype, module.device)
            self._expected = _generated(module, self._tokens, context)
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
        path = self._tokens[self._context :]
        trees: list[tuple[DraftTree, list[int]]] = [(DraftTree.of(path), [*range(_PATH + 1)])]
        if form is not None:
            trees.append((path_with_wrong_siblings(path, self._vocab), [0, *range(1, 2 * _PATH, 2)]))
        return max(self._difference(form, tree, rows) for tree, rows in trees)

    def _difference(self, form: str | None, tree: DraftTree, rows: list[int]) -> float:
        layout = self.layout(form)
        assert layout.own is not None
        context, half = self._context, self._context // 2
        kv = KVCache(layout, context + 2 * _PATH)
        pages = np.arange(kv.pages, dtype=np.int32)[::-1].copy()
        for start, end in ((0, half), (half, context - 2)):
            chain = BatchRow(pages, start, self._tokens[start:end], EMPTY_TREE, end - start - 1)
            own_forward(self._module, lay_out([chain]), kv, layout.own)
        drafted = BatchRow(pages, context - 2, self._tokens[context - 2 : context], tree, logits_from=1)
        logits = own_forward(self._module, lay_out([drafted]), kv, layout.own)
        found = difference(logits[rows], self._expected)
        return found if found == found else float("inf")


def _generated(module: Any, tokens: Int32Array, context: int) -> torch.Tensor:
    """Logits [1 + path, vocab] as `generate` computes them: the prompt at once, then one token after the other."""
    ids = _ids(tokens, module)
    output = module(input_ids=ids[:, :context], use_cache=True, **plain_positions(module, context))
    logits = [output.logits[0, -1]]
    for at in range(context, tokens.size):
        output = module(
            input_ids=ids[:, at : at + 1],
            past_key_values=output.past_key_values,
            use_cache=True,
            **plain_positions(module, 1, at),
        )
        logits.append(output.logits[0, -1])
    return torch.stack(logits)


def _ids(tokens: Int32Array, module: Any) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(module.device)[None]


def _does_not_run(module: Any, error: Exception) -> str:
    return (
        f"{type(module).__name__} does not run with a cache of several tokens at once: {type(error).__name__}: {error}"
    )
