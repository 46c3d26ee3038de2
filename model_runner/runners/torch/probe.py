"""Whether trees can be verified on a model: asks the model itself, by comparing it with its own plain forward."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from model_runner.errors import UnsupportedModelError
from model_runner.runners.torch.attention import ATTENTION_NAME, Segment, StepBatch, chain_then_tree
from model_runner.runners.torch.kv_cache import KVLayout, Slab
from model_runner.runners.torch.linear.fused_linear import of_one_input, watch
from model_runner.runners.torch.linear.packing import pack_linears
from strategies.draft import ROOT, DraftTree, Int32Array, merged

_log = logging.getLogger(__name__)
_CONTEXT = 9
_EXACT_CONTEXT = 150
_PATH = 5
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.inference_mode()
def probe(module: Any, exact: bool) -> KVLayout:
    """Puts tree attention and packed linear layers into a model; returns the shape of its keys and values.

    A prompt and a small tree, whose true path has a wrong sibling beside every node, go through tree attention; the
    logits must be those of the model as it came, over the plain sequence.

    Args:
        exact: where the machine allows it, a token's logits must be the same bits with and without drafts.

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
    try:
        module.set_attn_implementation("eager")
        with watch(module) as calls:
            plain = module(input_ids=_ids(tokens, module), use_cache=True)
        layout = _layout(name, plain.past_key_values, module)
        groups = of_one_input(calls)
        calls.clear()
        pack_linears(module, groups)
        module.set_attn_implementation(ATTENTION_NAME)
        if exact and module.device.type == "cpu":
            layout = replace(layout, exact=True, dtype=torch.float32)
            if not _is_exact(module, layout, tokens):
                _log.warning("%s: this machine's kernels depend on the batch; outputs may differ in rounding", name)
                layout = replace(layout, exact=False, dtype=module.dtype)
        logits, windows = _tree_logits(module, layout, tokens)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run with tree attention: {type(error).__name__}: {error}"
        ) from error
    _check_windows(name, config, layout, windows)
    expected = plain.logits[0, _CONTEXT - 1 :].float()
    difference = float((logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))
    if not difference <= _TOLERANCE[module.dtype]:
        raise UnsupportedModelError(
            f"{name}: logits over a draft tree differ from the model's own by {difference:.1e} (at most"
            f" {_TOLERANCE[module.dtype]:.0e} is rounding), so its attention is not what tree attention computes"
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


@dataclass(eq=False, slots=True)
class _WatchedSegment(Segment):
    """A segment that notes the window that each layer's attention asks for."""

    windows: list[int | None] = field(default_factory=list)

    def mask(self, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        self.windows.append(window)
        return Segment.mask(self, window, dtype, device)


def _tree_logits(module: Any, layout: KVLayout, tokens: Int32Array) -> tuple[torch.Tensor, list[int | None]]:
    """Logits [1 + path, vocab] along a tree's true path, its context committed before; and each layer's window."""
    slab = Slab.empty(layout, _CONTEXT + 2 * _PATH)
    prefill, depths = tokens[: _CONTEXT - 1], np.arange(_CONTEXT - 1, dtype=np.int32)
    _forward(module, layout, Segment(slab, 0, prefill, depths - 1, depths, logit_rows=_CONTEXT - 2))
    tree = _path_with_wrong_siblings(tokens[_CONTEXT:], module.config.get_text_config().vocab_size)
    segment = _WatchedSegment(slab, _CONTEXT - 1, *chain_then_tree(tokens[_CONTEXT - 1 : _CONTEXT], tree), logit_rows=0)
    logits = _forward(module, layout, segment)
    return logits[[0, *range(1, 2 * _PATH, 2)]], segment.windows


def _is_exact(module: Any, layout: KVLayout, tokens: Int32Array) -> bool:
    """Whether logits in a draft tree far from the path's plain places are the bits of plain decoding."""
    vocab, path = module.config.get_text_config().vocab_size, tokens[_CONTEXT:]
    context = np.resize(tokens[:_CONTEXT], min(_EXACT_CONTEXT, _longest(module) - _PATH - 1)).astype(np.int32)
    n = context.shape[0]
    slab = Slab.empty(layout, n + 64)
    depths = np.arange(n - 1, dtype=np.int32)
    _forward(module, layout, Segment(slab, 0, context[:-1], depths - 1, depths, logit_rows=n - 2))
    crowd = DraftTree.of([*range(min(40, vocab))], [ROOT] * min(40, vocab))
    tree = merged([crowd, _path_with_wrong_siblings(path, vocab)])
    drafted = _forward(module, layout, Segment(slab, n - 1, *chain_then_tree(context[-1:], tree), logit_rows=0))
    rows = [0]
    for token in path.tolist():
        children = (tree.parents == rows[-1] - 1) & (tree.tokens == token)
        rows.append(1 + int(np.flatnonzero(children)[0]))
    zero, plain = np.zeros(1, np.int32), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for at, token in enumerate([int(context[-1]), *path.tolist()]):
        one = Segment(slab, n - 1 + at, np.array([token], np.int32), zero - 1, zero, logit_rows=0)
        plain.append(_forward(module, layout, one))
    torch.set_num_threads(threads)
    return torch.equal(torch.cat(plain), drafted[rows])


def _longest(module: Any) -> int:
    return int(getattr(module.config.get_text_config(), "max_position_embeddings", None) or 2 * _EXACT_CONTEXT)


def _forward(module: Any, layout: KVLayout, segment: Segment) -> torch.Tensor:
    logits: torch.Tensor = module(**StepBatch([segment], layout).inputs()).logits[0]
    return logits


def _path_with_wrong_siblings(path: Int32Array, vocab: int) -> DraftTree:
    """Nodes 0, 2, 4, ... carry the path; beside each stands a sibling with another token."""
    tokens = np.stack([path, (path + 1) % vocab], 1).reshape(-1)
    parents = np.repeat(np.arange(-2, 2 * len(path) - 2, 2, dtype=np.int32), 2)
    parents[:2] = -1
    return DraftTree.of(tokens, parents)


def _check_windows(name: str, config: Any, layout: KVLayout, windows: list[int | None]) -> None:
    if len(windows) != layout.layers:
        raise UnsupportedModelError(
            f"{name} called attention {len(windows)} times for {layout.layers} layers with keys and values"
        )
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "sliding_attention" and window != config.sliding_window:
            raise UnsupportedModelError(
                f"{name} hides the sliding window of layer {layer} from its attention function: {window} was passed,"
                f" the config says {config.sliding_window}"
            )
