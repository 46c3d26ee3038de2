"""Checks that a converted model computes what the module computes, over trees in a batch of two sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.runners.base import Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino.kv_pages import PAGE_SIZE
from draftwood_model_runner.runners.positions import plain_positions
from draftwood_model_runner.runners.probing import TOLERANCE, difference, path_with_wrong_siblings
from draftwood_strategies.draft import EMPTY_TREE, DraftTree, Int32Array

Float32Array = npt.NDArray[np.float32]

_PATH = 5
"""Tokens of the true path of a tree."""
_CONTEXTS = (PAGE_SIZE + 9, PAGE_SIZE - 2 * _PATH + 3)
"""Tokens of the two prompts: one is longer than a page, the tree of the other crosses the end of one."""
_PAGES = 4
"""Pages of each: more than they need."""
_KV_TOKENS = len(_CONTEXTS) * _PAGES * PAGE_SIZE

QUANTIZED_TOLERANCE = {"int8": 0.4, "int4": 0.4}
"""Largest `difference` that quantized weights explain: with int8 it is 0.02 to 0.13 on tiny random models and the
bundled one, 0.5 to 3.6 with scales or zero points of the next row or levels read as signed."""


@torch.inference_mode()
def probe(module: Any, make_runner: Callable[[int], Runner], max_context: int, weights: str = "as-is") -> None:
    """Compares logits along the true paths of two trees, each with a wrong sibling beside every node, with those of the
    module's plain forward pass over the plain sequences. With quantized weights, trees are compared with the converted
    model's own logits over the plain sequences, and these with the module's.

    Args:
        make_runner: a runner of the converted model, for a number of KV tokens.
        weights: "as-is", or what the converted model's are quantized to.

    Raises:
        UnsupportedRunnerError: they differ by more than rounding, or than quantized weights explain.
    """
    name, vocab = type(module).__name__, int(module.config.get_text_config().vocab_size)
    sequences = _sequences(vocab, max_context)
    try:
        runner = make_runner(_KV_TOKENS)
        logits = _tree_logits(runner, sequences, vocab)
        chains = _chain_logits(runner, sequences, vocab) if weights in QUANTIZED_TOLERANCE else None
    except Exception as error:
        raise UnsupportedRunnerError(f"OpenVINO: {name}: {type(error).__name__}: {error}") from error
    for i, tokens in enumerate(sequences):
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        expected = module(input_ids=ids, use_cache=False, **plain_positions(module, tokens.size)).logits[
            0, -_PATH - 1 :
        ]
        if chains is not None:
            tolerance = QUANTIZED_TOLERANCE[weights]
            _compare(name, chains[i], expected, tolerance, f"with {weights} weights", "quantization")
            expected = chains[i]
        _compare(name, logits[i], expected, TOLERANCE[module.dtype], "over a draft tree", "rounding")


def trial_logits(make_runner: Callable[[int], Runner], vocab: int, max_context: int) -> Float32Array:
    """The logits [sequence, node, vocab] that `probe` compares, of a converted model alone."""
    runner = make_runner(_KV_TOKENS)
    logits: Float32Array = _tree_logits(runner, _sequences(vocab, max_context), vocab).numpy()
    return logits


def _sequences(vocab: int, max_context: int) -> list[Int32Array]:
    random = np.random.default_rng(0)
    longest = max(max_context - _PATH, 3)
    return [random.integers(0, vocab, min(n, longest) + _PATH, np.int32) for n in _CONTEXTS]


def _compare(
    name: str, logits: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str, explained_by: str
) -> None:
    """Raises UnsupportedRunnerError if logits differ by more than `tolerance`."""
    differing = difference(logits, expected)
    if not differing <= tolerance:
        raise UnsupportedRunnerError(
            f"OpenVINO: {name}: logits {where} differ from the model's own by {differing:.1e} (at most"
            f" {tolerance:.0e} is {explained_by})"
        )


def _chain_logits(runner: Runner, sequences: list[Int32Array], vocab: int) -> torch.Tensor:
    """What `_tree_logits` returns, by one plain pass over each sequence."""
    tables = np.arange(runner.pages, dtype=np.int32).reshape(len(sequences), _PAGES)
    rows = [
        BatchRow(pages, 0, tokens, EMPTY_TREE, logits_from=tokens.size - 1 - _PATH)
        for pages, tokens in zip(tables, sequences, strict=True)
    ]
    logits = torch.from_numpy(runner.step(lay_out(rows), 0).logits)
    return logits.view(len(sequences), 1 + _PATH, vocab).clone()


def _tree_logits(runner: Runner, sequences: list[Int32Array], vocab: int) -> torch.Tensor:
    """Logits [sequence, 1 + path, vocab] after the last token of each prompt and along the true path of its tree. The
    token before, in the same step, needs none."""
    tables = np.random.default_rng(1).permutation(runner.pages).astype(np.int32).reshape(len(sequences), _PAGES)
    prefill, drafted, on_path = [], [], []
    for pages, tokens in zip(tables, sequences, strict=True):
        context = tokens.size - _PATH
        branches = runner.draft_limits(context - 1).branches
        path = tokens[context:]
        tree = path_with_wrong_siblings(path, vocab) if branches else DraftTree.of(path)
        on_path.append([0, *(range(1, 2 * _PATH, 2) if branches else range(1, _PATH + 1))])
        prefill.append(BatchRow(pages, 0, tokens[: context - 2], EMPTY_TREE, logits_from=context - 3))
        drafted.append(BatchRow(pages, context - 2, tokens[context - 2 : context], tree, logits_from=1))
    runner.step(lay_out(prefill), 0)
    logits = torch.from_numpy(runner.step(lay_out(drafted), 0).logits)
    of_row = torch.tensor_split(logits, [1 + len(drafted[0].tree)])
    return torch.stack([of_row[i][nodes] for i, nodes in enumerate(on_path)])
