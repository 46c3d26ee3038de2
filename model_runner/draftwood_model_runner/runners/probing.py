"""What the trials of all runners share: a tree to compare logits over, how much they may differ, and why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cache_argument import cache_argument
from draftwood_model_runner.runners.positions import plain_positions
from draftwood_model_runner.runners.shrinking import THRESHOLD, shrunken, thresholds
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, Int32Array, merged
from draftwood_strategies.tree_index import NO_NODE

TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Largest `difference` that is rounding, by the dtype of the model: tiny random models
show 2e-6 in float32 and 4e-2 in bfloat16, and a wrong mask far more."""

_PLAIN_LAYERS = frozenset({"full_attention", "sliding_attention"})


def path_with_wrong_siblings(path: Int32Array, vocab: int) -> DraftTree:
    """A tree with the path at nodes 0, 2, 4, ... and a sibling with another token beside each."""
    tokens = np.stack([path, (path + 1) % vocab], 1).reshape(-1)
    parents = np.repeat(np.arange(-2, 2 * len(path) - 2, 2, dtype=np.int32), 2)
    parents[:2] = -1
    return DraftTree.of(tokens, parents)


def same_bits(
    step: Callable[[StepBatch], torch.Tensor], pages: int, context: Int32Array, path: Int32Array, vocab: int
) -> bool:
    """Whether logits have the same bits with and without drafts, in other batches and for other chunks of a prompt.

    Nodes of a draft tree, far from their rows in plain decoding and in pages that are no neighbours, after a prompt
    that was read in two steps, are compared with plain decoding on one thread.

    Args:
        step: one forward pass; returns logits [R, vocab].
        pages: of KV memory, for the context and the tree twice.
        path: what follows the context.
    """
    n, half = context.size, context.size // 2
    neighbours, scattered = np.arange(pages // 2 * 2, dtype=np.int32).reshape(2, -1)
    scattered = scattered[::-1].copy()
    step(lay_out([BatchRow(scattered, 0, context[:half], EMPTY_TREE, logits_from=half - 1)]))
    whole = BatchRow(neighbours, 0, context[:-1], EMPTY_TREE, logits_from=n - 2)
    rest = BatchRow(scattered, half, context[half:-1], EMPTY_TREE, logits_from=n - 2 - half)
    step(lay_out([whole, rest]))
    crowd = DraftTree.of([*range(min(40, vocab))], [NO_NODE] * min(40, vocab))
    tree = merged([crowd, path_with_wrong_siblings(path, vocab)])
    drafted = step(lay_out([BatchRow(scattered, n - 1, context[-1:], tree, logits_from=0)]))
    rows = [0]
    for token in path.tolist():
        children = (tree.parents == rows[-1] - 1) & (tree.tokens == token)
        rows.append(1 + int(np.flatnonzero(children)[0]))
    drafted, plain = drafted[rows].clone(), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for at, token in enumerate([int(context[-1]), *path.tolist()]):
        one = BatchRow(neighbours, n - 1 + at, np.array([token], np.int32), EMPTY_TREE, logits_from=0)
        plain.append(step(lay_out([one])).clone())
    torch.set_num_threads(threads)
    return torch.equal(torch.cat(plain), drafted)


def difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two arrays of logits, relative to the largest logit that was expected."""
    expected = expected.float()
    return float((logits.float() - expected).abs().max() / expected.abs().max().clamp(min=1.0))


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


def other_layers(config: Any, max_context: int) -> str | None:
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


def past_thresholds(module: Any, max_context: int, trial: Callable[[Any], object]) -> None:
    """Tries the architecture of a model beyond its windows, chunks and other thresholds, on a small copy.

    Args:
        max_context: positions that the model will be run on at most. Thresholds beyond it do not matter.
        trial: runs a copy; raises UnsupportedModelError if it computes something else than transformers.

    Raises:
        UnsupportedModelError: the trial failed, or there can be no copy.
    """
    name, config = type(module).__name__, module.config.get_text_config()
    limits = thresholds(config, max_context)
    if not limits:
        return
    named = _named(limits)
    copied = small_copy(module, limits)
    if not _cache_agrees(copied):
        raise UnsupportedModelError(
            f"{name}: beyond {named} transformers itself computes something else with a KV cache than without"
            f"{shorter_context(min(limits.values()))}"
        )
    try:
        trial(copied.to(module.device))
    except UnsupportedModelError as error:
        refusal = type(error)
        raise refusal(
            f"{name}: beyond {named} its layers compute something that draft trees cannot be verified with, such as a"
            f" window that is in its own mask only{shorter_context(min(limits.values()))} (in a small copy: {error})"
        ) from error


def small_copy(module: Any, limits: dict[str, int]) -> Any:
    """A model of the same architecture, see `shrinking`, for trials beyond these thresholds.

    Raises:
        UnsupportedModelError: there can be none.
    """
    try:
        return shrunken(module)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(module).__name__}: what it computes beyond {_named(limits)} cannot be tried, as there is no small"
            f" copy of it ({type(error).__name__}: {error}){shorter_context(min(limits.values()))}"
        ) from error


def _named(limits: dict[str, int]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in limits.items())


@torch.inference_mode()
def _cache_agrees(module: Any) -> bool:
    """Whether a small copy computes the same for tokens one after the other, as `generate` does, and all at once."""
    vocab = int(module.config.get_text_config().vocab_size)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, vocab, (1, 3 * THRESHOLD)))
    expected = module(input_ids=ids, use_cache=False).logits[0]
    generated = generated_logits(module, ids, 2 * THRESHOLD)
    return all(
        difference(logits[0, -1], expected[at]) <= TOLERANCE[torch.float32]
        for at, logits in enumerate(generated, 2 * THRESHOLD - 1)
    )


def generated_logits(module: Any, ids: torch.Tensor, prompt: int) -> Iterator[torch.Tensor]:
    """Logits [1, n, vocab] as `generate` computes them: of the first `prompt` tokens of ids, int64[1, N], at once, and
    of each further one with the cache that the model returned."""
    name = cache_argument(type(module).forward) or "past_key_values"
    output = module(input_ids=ids[:, :prompt], use_cache=True, **plain_positions(module, prompt))
    if (cache := output.get(name)) is None:  # the model returns none, as RecurrentGemma
        cache = DynamicCache(config=module.config.get_text_config())
        output = module(input_ids=ids[:, :prompt], use_cache=True, **{name: cache}, **plain_positions(module, prompt))
    yield output.logits
    for at in range(prompt, ids.shape[1]):
        positions = plain_positions(module, 1, at)
        yield module(input_ids=ids[:, at : at + 1], use_cache=True, **{name: cache}, **positions).logits
