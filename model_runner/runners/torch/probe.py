"""Checks that draft trees can be verified on a model, by comparing their logits with the plain forward pass."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from model_runner.errors import UnsupportedModelError
from model_runner.runners.base import StepBatch
from model_runner.runners.batch import BatchRow, lay_out
from model_runner.runners.probing import TOLERANCE, difference, hidden_window, path_with_wrong_siblings
from model_runner.runners.torch.attention import ATTENTION_NAME, TorchBatch
from model_runner.runners.torch.kv_cache import PAGE_SIZE, KVCache, KVLayout
from model_runner.runners.torch.machine import bound_kernel_caches
from model_runner.runners.torch.packed_linear import linear_shapes, pack_linears
from model_runner.runners.torch.runner import forward
from strategies.draft import EMPTY_TREE, DraftTree, Int32Array, merged
from strategies.tree_index import NO_NODE

_log = logging.getLogger(__name__)
_CONTEXT, _PATH = 9, 5
"""Tokens of the prompt and of the true path."""
_EXACT_CONTEXT = 150
"""Tokens of the prompt in the trial of exact attention: it ends in the second block of `exact_attention`."""
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})


@torch.inference_mode()
def probe(module: Any, exact: bool) -> KVLayout:
    """Puts tree attention and packed linear layers into a model; returns the shape of its keys and values.

    A prompt and a small tree, whose true path has a wrong sibling beside every node, go through tree attention. The
    logits along the true path must be those of the unmodified model over the plain sequence.

    Args:
        exact: choose exact attention if its logits are bit-identical with and without drafts on this machine.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    if odd := set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(sorted(odd))}: a draft tree can only be verified where every layer"
            " attends to all earlier tokens or to the last few"
        )
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, _CONTEXT + _PATH, np.int32)
    bound_kernel_caches(linear_shapes(module))
    try:
        module.set_attn_implementation("eager")
        plain = module(input_ids=_ids(tokens, module), use_cache=True)
        layout = _layout(name, plain.past_key_values, module)
        pack_linears(module)
        module.set_attn_implementation(ATTENTION_NAME)
        if exact and module.device.type == "cpu":
            layout = replace(layout, exact=True, dtype=torch.float32)
            if not _is_exact(module, layout, tokens):
                _log.warning(
                    "%s: kernels here sum in an order that depends on the batch; outputs may differ in rounding", name
                )
                layout = replace(layout, exact=False, dtype=module.dtype)
        logits, windows = _tree_logits(module, layout, tokens)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run with tree attention: {type(error).__name__}: {error}"
        ) from error
    _check_windows(name, config, layout, windows)
    differing, tolerance = difference(logits, plain.logits[0, _CONTEXT - 1 :]), TOLERANCE[module.dtype]
    if not differing <= tolerance:
        raise UnsupportedModelError(
            f"{name}: logits over a draft tree differ from the model's own by {differing:.1e} (at most"
            f" {tolerance:.0e} is rounding), so its attention is not what tree attention computes"
        )
    return layout


def _ids(tokens: Int32Array, module: Any) -> torch.Tensor:
    return torch.from_numpy(tokens.astype(np.int64)).to(module.device)[None]


def _layout(name: str, cache: Any, module: Any) -> KVLayout:
    """Read off the cache that the model itself filled."""
    layers = getattr(cache, "layers", None)
    if not layers or any(getattr(layer, "keys", None) is None for layer in layers):
        raise UnsupportedModelError(f"{name} keeps a state other than keys and values for every layer")
    shapes = {(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{name} has keys and values of different shapes by layer: {sorted(shapes)}")
    kv_heads, key_dim, value_dim = shapes.pop()
    return KVLayout(len(layers), kv_heads, key_dim, value_dim, layers[0].keys.dtype, module.device)


class _WatchedBatch(TorchBatch):
    """A batch that records the window that the attention of each layer asks for."""

    def __init__(self, batch: StepBatch, kv: KVCache) -> None:
        super().__init__(batch, kv)
        self.windows: list[int | None] = []

    def mask(self, row: int, window: int | None) -> torch.Tensor | None:
        self.windows.append(window)
        return super().mask(row, window)


def _tree_logits(module: Any, layout: KVLayout, tokens: Int32Array) -> tuple[torch.Tensor, list[int | None]]:
    """Logits [1 + path, vocab] along the true path of a tree, its context committed before; and each layer's window."""
    kv = KVCache(layout, _CONTEXT + 2 * _PATH)
    pages = np.arange(kv.pages, dtype=np.int32)
    prefill = BatchRow(pages, 0, tokens[: _CONTEXT - 1], EMPTY_TREE, logits_from=_CONTEXT - 2)
    forward(module, lay_out([prefill]), kv)
    tree = path_with_wrong_siblings(tokens[_CONTEXT:], module.config.get_text_config().vocab_size)
    drafted = BatchRow(pages, _CONTEXT - 1, tokens[_CONTEXT - 1 : _CONTEXT], tree, logits_from=0)
    batch = _WatchedBatch(lay_out([drafted]), kv)
    logits: torch.Tensor = module(**batch.inputs()).logits[0]
    return logits[[0, *range(1, 2 * _PATH, 2)]], batch.windows


def _is_exact(module: Any, layout: KVLayout, tokens: Int32Array) -> bool:
    """Whether the logits of nodes of a draft tree, far from their rows in plain decoding and in pages that are no
    neighbours, have the same bits."""
    vocab, path = module.config.get_text_config().vocab_size, tokens[_CONTEXT:]
    context = np.resize(tokens[:_CONTEXT], min(_EXACT_CONTEXT, _longest(module) - _PATH - 1)).astype(np.int32)
    n = context.shape[0]
    kv = KVCache(layout, 2 * (n // PAGE_SIZE + 4) * PAGE_SIZE)
    neighbours, scattered = np.arange(kv.pages, dtype=np.int32).reshape(2, -1)
    scattered = scattered[::-1].copy()
    both = [BatchRow(pages, 0, context[:-1], EMPTY_TREE, logits_from=n - 2) for pages in (neighbours, scattered)]
    forward(module, lay_out(both), kv)
    crowd = DraftTree.of([*range(min(40, vocab))], [NO_NODE] * min(40, vocab))
    tree = merged([crowd, path_with_wrong_siblings(path, vocab)])
    drafted = forward(module, lay_out([BatchRow(scattered, n - 1, context[-1:], tree, logits_from=0)]), kv)
    rows = [0]
    for token in path.tolist():
        children = (tree.parents == rows[-1] - 1) & (tree.tokens == token)
        rows.append(1 + int(np.flatnonzero(children)[0]))
    plain = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for at, token in enumerate([int(context[-1]), *path.tolist()]):
        one = BatchRow(neighbours, n - 1 + at, np.array([token], np.int32), EMPTY_TREE, logits_from=0)
        plain.append(forward(module, lay_out([one]), kv))
    torch.set_num_threads(threads)
    return torch.equal(torch.cat(plain), drafted[rows])


def _longest(module: Any) -> int:
    return int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or 2 * _EXACT_CONTEXT)


def _check_windows(name: str, config: Any, layout: KVLayout, windows: list[int | None]) -> None:
    if len(windows) != layout.layers:
        raise UnsupportedModelError(
            f"{name} called attention {len(windows)} times for {layout.layers} layers with keys and values"
        )
    if reason := hidden_window(config, windows):
        raise UnsupportedModelError(f"{name} {reason}")
