"""A trial of draft trees: the logits of a model that a runner took over, against those of the model itself.

Every runner tries each model before it serves it, and a small copy beyond windows and other thresholds. What differs
between runners is how they take a model over, and how they compute a step of it (`Stepper`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import KVCompaction, KVShape, StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.model_calls import AttentionHook, cache_argument_of, plain_positions
from draftwood_model_runner.runners.shrinking import shrunken, thresholds
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, merged
from draftwood_strategies.tree_index import NO_NODE

_TOKENS = 5

_OPTIONS = ("scaling", "sliding_window", "softcap", "s_aux")
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest `difference` that is rounding, by the dtype of the model: tiny random models
show 2e-6 in float32 and 4e-2 in bfloat16, and a wrong mask far more."""
_FOUR_BITS = 3e-3
"""The tolerance for bitsandbytes' layers of 4 bits, whose kernel for single tokens differs by 1.7e-3."""
_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})
PATH = 5
"""Tokens of the true path of a tree."""


class AttentionCall(NamedTuple):
    """What a layer calls attention with.

    Attributes:
        layer: its number; None if it has none.
        dtype: of keys and values.
        group: heads that share a key.
        options: those of `scaling`, `sliding_window`, `softcap` and `s_aux` that it passes.
    """

    layer: int | None
    shape: KVShape
    dtype: torch.dtype
    group: int
    options: dict[str, Any]


def _noted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Zeros [1, T, head, value_dim] in place of attention, see `tree_attention`: only the shapes matter."""
    layer: Any = getattr(module, "layer_idx", None)
    shape = KVShape(key.shape[1], key.shape[3], value.shape[3])
    options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    _CALLS.get().append(AttentionCall(layer, shape, key.dtype, query.shape[1] // key.shape[1], options))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def attention_window(calls: SequenceOf[AttentionCall], max_context: int) -> int | None:
    """The last tokens that any token attends to at most, its own included, whichever the layer; None for all.

    Args:
        max_context: positions that the model will be run on at most.
    """
    widest = max((call.options.get("sliding_window", max_context) for call in calls), default=max_context)
    return int(widest) if widest < max_context else None


_CALLS = AttentionHook[list[AttentionCall]]("draftwood_noted", _noted_attention)
"""Its step is where calls are noted."""


def attention_calls(module: Any, max_context: int, every_layer: bool = True) -> list[AttentionCall]:
    """What layers call attention with, in their order.

    Read off the calls of attention: what a model keeps in a cache of its own may be something smaller.

    Args:
        every_layer: each layer has to call it; otherwise some or none, in any order.

    Raises:
        UnsupportedModelError: they do not call it as a model does on which draft trees can be verified.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    calls = _calls_of(module)
    if every_layer and (reason := too_few_calls(len(calls), config)):
        raise UnsupportedModelError(f"{name} {reason}")
    if every_layer and [call.layer for call in calls] != list(range(len(calls))):
        raise UnsupportedModelError(f"{name} does not number its layers from 0 on: {[call.layer for call in calls]}")
    windows = [call.options.get("sliding_window") for call in calls]
    if every_layer and (reason := hidden_window(config, windows, max_context)):
        raise UnsupportedModelError(f"{name} {reason}")
    return calls


@torch.no_grad()
def _calls_of(module: Any) -> list[AttentionCall]:
    """The calls of attention in a forward pass.

    Raises:
        UnsupportedModelError: the model does not run.
    """
    calls: list[AttentionCall] = []
    try:
        _CALLS.install(module)
        with _CALLS.during(calls):
            module(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device=module.device), use_cache=False)
    except Exception as error:
        raise UnsupportedModelError(does_not_run(type(module).__name__, error)) from error
    return calls


def tolerance_of(module: Any) -> float:
    """The largest `difference` that is rounding in a model."""
    four_bits = getattr(getattr(module.config, "quantization_config", None), "load_in_4bit", False)
    return max(TOLERANCE[module.dtype], _FOUR_BITS if four_bits else 0.0)


def path_with_wrong_siblings(path: Int32Array, vocab: int) -> DraftTree:
    """A tree with the path at nodes 0, 2, 4, ... and a sibling with another token beside each."""
    tokens = np.stack([path, (path + 1) % vocab], 1).reshape(-1)
    parents = np.repeat(np.arange(-2, 2 * len(path) - 2, 2, dtype=np.int32), 2)
    parents[:2] = -1
    return DraftTree.of(tokens, parents)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two arrays of logits, relative to the largest logit that was expected; infinite if one
    is no number."""
    expected = expected.float()
    largest = (logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return float(largest.nan_to_num(nan=math.inf))


def hidden_window(config: Any, windows: SequenceOf[int | None], max_context: int) -> str | None:
    """Why a model's sliding window cannot be seen to, if one of its layers hides it from its attention function.

    Args:
        windows: what each layer passes.
        max_context: positions that the model will be run on at most.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(windows)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        if kind == "sliding_attention" and window != config.sliding_window and config.sliding_window < max_context:
            return (
                f"hides the sliding window of layer {layer} from its attention function: {window} was passed, the"
                f" config says {config.sliding_window}{shorter_context(config.sliding_window)}"
            )
    return None


def shorter_context(tokens: int) -> str:
    """What a user can do about a mechanism that only matters beyond some tokens."""
    return f"; up to {tokens} tokens it makes no difference: set max_context to {tokens} or less"


def unsupported_layers(config: Any, max_context: int) -> str | None:
    """Why draft trees cannot be verified, if a model has layers that do not attend to all or the last few tokens."""
    # RecurrentGemma's name before transformers 5.23 is the second.
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    chunk: int = getattr(config, "attention_chunk_size", None) or 0
    if chunk >= max_context:
        kinds.discard("chunked_attention")
    odd = kinds - _PLAIN_LAYERS
    if not odd:
        return None
    advice = shorter_context(chunk) if chunk and odd == {"chunked_attention"} else ""
    return (
        f"layers of type {', '.join(sorted(odd))} are not supported: a draft tree can only be verified where every"
        f" layer attends to all earlier tokens or to the last few{advice}"
    )


def does_not_run(name: str, error: Exception) -> str:
    """What a trial that raised says of a model."""
    return f"{name} does not run with tree attention: {type(error).__name__}: {error}"


def too_few_calls(calls: int, config: Any) -> str | None:
    """Why draft trees cannot be verified, if not every layer calls attention by transformers' interface."""
    layers = int(getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", None) or 0)
    if calls == layers:
        return None
    if calls == 0:
        return (
            "computes attention in code of its own, as models with ALiBi or relative positions do, or has none; the"
            " mask of a draft tree can only be put where a model calls transformers' attention interface"
        )
    return (
        f"calls transformers' attention interface {calls} times for {layers} layers: those that share keys and values,"
        " keep a state or attend in code of their own are not supported"
    )


def try_beyond_thresholds(module: Any, max_context: int, trial: Callable[[Any], object]) -> None:
    """Tries the architecture of a model beyond its windows, chunks and other thresholds, on a small copy.

    Args:
        max_context: positions that the model will be run on at most. Thresholds beyond it do not matter.
        trial: runs a copy; raises UnsupportedModelError if it computes something else than transformers.

    Raises:
        UnsupportedModelError: the trial failed, or there can be no copy.
    """
    limits = thresholds(module.config.get_text_config(decoder=True), max_context)
    if not limits:
        return
    name, named = type(module).__name__, ", ".join(f"{key} = {value}" for key, value in limits.items())
    advice = shorter_context(min(limits.values()))
    try:
        copied = shrunken(module)
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: what it computes beyond {named} cannot be tried, as there is no small copy of it"
            f" ({type(error).__name__}: {error}){advice}"
        ) from error
    try:
        trial(copied.to(module.device))
    except UnsupportedModelError as error:
        raise type(error)(
            f"{name}: beyond {named} its layers compute something that drafts cannot be verified with, such as a window"
            f" that is in its own mask only{advice} (in a small copy: {error})"
        ) from error


class Stepper(NamedTuple):
    """A model that a runner took over, with KV memory of its own.

    Attributes:
        pages: of its KV memory.
        step: one forward pass; returns logits [R, vocab].
    """

    pages: int
    step: Callable[[StepBatch], torch.Tensor]


class Draft(NamedTuple):
    """A draft tree, and the path in it that a trial compares.

    Attributes:
        nodes: of the path.
    """

    tree: DraftTree
    nodes: SequenceOf[int]

    @property
    def rows(self) -> list[int]:
        """Rows of logits of the path, the token that the tree hangs from before it."""
        return [0, *(1 + node for node in self.nodes)]


class Trial(NamedTuple):
    """A sequence of random tokens, the same each time: a prompt, and a path of `PATH` tokens that is drafted.

    Attributes:
        tokens: int32[context + PATH].
        vocab: tokens that the model knows.
    """

    tokens: Int32Array
    vocab: int

    @classmethod
    def of(cls, module: Any, context: int, seed: int = 0) -> Trial:
        """For a model, as `random`."""
        return cls.random(int(module.config.get_text_config(decoder=True).vocab_size), context, seed)

    @classmethod
    def random(cls, vocab: int, context: int, seed: int = 0) -> Trial:
        """A trial with a prompt of `context` tokens, at least 3."""
        return cls(np.random.default_rng(seed).integers(0, vocab, context + PATH, np.int32), vocab)

    @property
    def context(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.size - PATH

    @property
    def path(self) -> Int32Array:
        """int32[PATH], what follows the prompt."""
        return self.tokens[self.context :]

    def ids(self, module: Any) -> torch.Tensor:
        """int64[1, context + PATH], on the device of the model."""
        return torch.from_numpy(self.tokens.astype(np.int64)).to(module.device)[None]

    def tree(self) -> Draft:
        """The path with a wrong sibling beside every node."""
        return Draft(path_with_wrong_siblings(self.path, self.vocab), range(0, 2 * PATH, 2))

    def chain(self) -> Draft:
        """The path alone."""
        return Draft(DraftTree.of(self.path), range(PATH))

    def drafted(self, model: Stepper, draft: Draft) -> torch.Tensor:
        """Logits [1 + PATH, vocab] from the last token of the prompt on, along the path of a draft. The
        token before that one is in the same batch row and needs no logits.

        The context is committed before in two steps, in pages that are no neighbours.
        """
        pages, half = self.pages(model), self.context // 2
        for start, end in ((0, half), (half, self.context - 2)):
            row = BatchRow(pages, start, self.tokens[start:end], EMPTY_TREE, logits_from=end - start - 1)
            model.step(lay_out([row]))
        return model.step(lay_out([self.drafted_row(pages, draft)]))[draft.rows]

    def generated(self, module: Any) -> torch.Tensor:
        """Logits [2 + PATH, vocab] computed as by `generate`, the prompt at once, then one token after the other with
        the cache that the model returned: from the last token of the prompt on, the last of them twice."""
        name, ids = cache_argument_of(module.__class__), self.ids(module)
        prompt = {"input_ids": ids[:, : self.context], "use_cache": True, **plain_positions(module, self.context)}
        output = module(**prompt)
        if (cache := output.get(name)) is None:  # the model returns none, as RecurrentGemma
            from transformers import DynamicCache  # imports what most loading does without

            cache = DynamicCache(config=module.config.get_text_config())
            output = module(**prompt, **{name: cache})
        logits = [output.logits[0, -1:]]
        for at in range(self.context, ids.shape[1]):
            token = {"input_ids": ids[:, at : at + 1], "use_cache": True, **plain_positions(module, 1, at)}
            logits.append(module(**token, **{name: cache}).logits[0, -1:])
        return torch.cat([*logits, logits[-1]])

    def continued(
        self, model: Stepper, draft: Draft, page_size: int, accept: Callable[[KVCompaction, list[int]], None]
    ) -> torch.Tensor:
        """The same logits, along the path of a draft; the last once more from a step of its own, with the path before
        it accepted.

        Args:
            accept: called with the moves that accept nodes, and the nodes.
        """
        logits = self.drafted(model, draft).clone()
        pages, nodes = self.pages(model), [*draft.nodes[:-1]]
        slots = lay_out([self.drafted_row(pages, draft)]).slot_mapping(page_size)[2:].astype(np.int32)
        accept(KVCompaction(slots[nodes], slots[: len(nodes)], np.array([0, len(nodes)], np.int32)), nodes)
        last = BatchRow(
            pages, self.context + PATH - 1, self.path[-1:], EMPTY_TREE, logits_from=0, prompt_len=self.context
        )
        return torch.cat([logits, model.step(lay_out([last]))[:1]])

    def same_bits(self, model: Stepper) -> bool:
        """Whether logits have the same bits with and without drafts, in other batches and for other chunks of a prompt.

        Nodes of a draft tree, far from their rows in plain decoding and in pages that are no neighbours, after a prompt
        that was read in two steps, are compared with plain decoding on one thread.

        Args:
            model: its KV memory holds the context and the tree twice.
        """
        context, n, half = self.tokens[: self.context], self.context, self.context // 2
        neighbours, scattered = np.arange(model.pages // 2 * 2, dtype=np.int32).reshape(2, -1)
        scattered = scattered[::-1].copy()
        model.step(lay_out([BatchRow(scattered, 0, context[:half], EMPTY_TREE, logits_from=half - 1)]))
        whole = BatchRow(neighbours, 0, context[:-1], EMPTY_TREE, logits_from=n - 2)
        rest = BatchRow(scattered, half, context[half:-1], EMPTY_TREE, logits_from=n - 2 - half)
        model.step(lay_out([whole, rest]))
        crowd = DraftTree.of([*range(min(40, self.vocab))], [NO_NODE] * min(40, self.vocab))
        tree = merged([crowd, path_with_wrong_siblings(self.path, self.vocab)])
        drafted = model.step(lay_out([BatchRow(scattered, n - 1, context[-1:], tree, logits_from=0)]))
        rows = [0]
        for token in self.path.tolist():
            children = (tree.parents == rows[-1] - 1) & (tree.tokens == token)
            rows.append(1 + int(np.flatnonzero(children)[0]))
        drafted, plain = drafted[rows].clone(), []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        for at in range(n - 1, n + PATH):
            row = BatchRow(neighbours, at, self.tokens[at : at + 1], EMPTY_TREE, logits_from=0)
            plain.append(model.step(lay_out([row])).clone())
        torch.set_num_threads(threads)
        return torch.equal(torch.cat(plain), drafted)

    def pages(self, model: Stepper) -> Int32Array:
        """int32[pages], the page table of the sequence: no two of its pages are neighbours in this order."""
        return np.arange(model.pages, dtype=np.int32)[::-1].copy()

    def drafted_row(self, pages: Int32Array, draft: Draft) -> BatchRow:
        """The last two tokens of the prompt, and the draft."""
        tokens = self.tokens[self.context - 2 : self.context]
        return BatchRow(pages, self.context - 2, tokens, draft.tree, logits_from=1)


def require_same(module: Any, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raises UnsupportedModelError if logits over a draft differ from those of a model by more than rounding."""
    differing = difference(logits, expected)
    if differing > tolerance_of(module):
        raise UnsupportedModelError(different(module, differing))


def different(module: Any, differing: float) -> str:
    """Why a model is refused whose logits over a draft differ by so much."""
    return (
        f"{type(module).__name__}: logits over a draft differ from the model's own by {differing:.1e} (at most"
        f" {tolerance_of(module):.0e} is rounding), so it computes something that depends on the other tokens of a"
        " step, has positions of its own, or keeps something of earlier tokens beside its cache"
    )
