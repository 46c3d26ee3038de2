"""Checks that a converted model computes what the module computes, over draft trees and behind what was accepted."""

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
from draftwood_model_runner.runners.probing import TOLERANCE, difference
from draftwood_model_runner.runners.trials import PATH, Stepper, Trial
from draftwood_strategies.draft import EMPTY_TREE

Float32Array = npt.NDArray[np.float32]

_CONTEXTS = (PAGE_SIZE + 9, PAGE_SIZE - 2 * PATH + 3)
"""Tokens of the two prompts: one is longer than a page, the tree of the other crosses the end of one."""
_KV_TOKENS = 4 * PAGE_SIZE
"""More than each needs."""

QUANTIZED_TOLERANCE = {"int8": 0.4, "int4": 0.4}
"""Largest `difference` that quantized weights explain: with int8 it is 0.02 to 0.13 on tiny random models and the
bundled one, 0.5 to 3.6 with scales or zero points of the next row or levels read as signed."""


@torch.inference_mode()
def probe(module: Any, make_runner: Callable[[int], Runner], max_context: int, weights: str = "as-is") -> None:
    """Compares logits along drafted paths, see `Trial.continued`, with those that the module computes as in `generate`.
    With quantized weights, they are compared with the converted model's own logits over the plain sequences, and these
    with the module's.

    Args:
        make_runner: a runner of the converted model, for a number of KV tokens.
        weights: "as-is", or what the converted model's are quantized to.

    Raises:
        UnsupportedRunnerError: they differ by more than rounding, or than quantized weights explain.
    """
    name, vocab = type(module).__name__, int(module.config.get_text_config().vocab_size)
    for trial in _trials(vocab, max_context):
        try:
            runner = make_runner(_KV_TOKENS)
            logits = _drafted(runner, trial)
            plain = _plain(runner, trial) if weights in QUANTIZED_TOLERANCE else None
        except Exception as error:
            raise UnsupportedRunnerError(f"OpenVINO: {name}: {type(error).__name__}: {error}") from error
        expected = trial.generated(module)
        if plain is not None:
            tolerance = QUANTIZED_TOLERANCE[weights]
            _compare(name, plain, expected, tolerance, f"with {weights} weights", "quantization")
            expected = plain
        _compare(name, logits, expected, TOLERANCE[module.dtype], "over a draft tree", "rounding")


def trial_logits(make_runner: Callable[[int], Runner], vocab: int, max_context: int) -> Float32Array:
    """The logits [trial, 2 + PATH, vocab] that `probe` compares, of a converted model alone."""
    runner = make_runner(_KV_TOKENS)
    logits: Float32Array = torch.stack([_drafted(runner, trial) for trial in _trials(vocab, max_context)]).numpy()
    return logits


def _trials(vocab: int, max_context: int) -> list[Trial]:
    longest = max(max_context - PATH, 3)
    return [Trial.random(vocab, min(context, longest)) for context in _CONTEXTS]


def _compare(
    name: str, logits: torch.Tensor, expected: torch.Tensor, tolerance: float, where: str, explained_by: str
) -> None:
    """Raises UnsupportedRunnerError if logits differ by more than `tolerance`."""
    differing = difference(logits, expected)
    if differing > tolerance:
        raise UnsupportedRunnerError(
            f"OpenVINO: {name}: logits {where} differ from the model's own by {differing:.1e} (at most"
            f" {tolerance:.0e} is {explained_by})"
        )


def _drafted(runner: Runner, trial: Trial) -> torch.Tensor:
    model = Stepper(runner.pages, lambda batch: torch.from_numpy(runner.step(batch, 0).logits))
    draft = trial.tree() if runner.draft_limits(trial.context - 1).branches else trial.chain()
    return trial.continued(model, draft, PAGE_SIZE, lambda moves, _: runner.compact_kv(moves))


def _plain(runner: Runner, trial: Trial) -> torch.Tensor:
    """The same logits, by one pass over the sequence."""
    pages = np.arange(runner.pages, dtype=np.int32)
    row = BatchRow(pages, 0, trial.tokens, EMPTY_TREE, logits_from=trial.context - 1)
    logits = torch.from_numpy(runner.step(lay_out([row]), 0).logits)
    return torch.cat([logits, logits[-1:]])
