"""Which token the model writes after each node of a verified tree."""

from __future__ import annotations

from collections.abc import Callable

import torch

from model_runner.errors import InvalidValueError
from model_runner.sequence import SamplingParams, Sequence
from strategies.draft import ROOT, DraftTree, Int32Array


def require_supported(params: SamplingParams) -> None:
    """Only greedy decoding is served so far.

    Raises:
        InvalidValueError: a setting would change the choice.
    """
    greedy = SamplingParams()
    for name in ("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if getattr(params, name) != getattr(greedy, name):
            allowed = f"this version decodes greedily; leave it unset or {getattr(greedy, name):g}"
            raise InvalidValueError(f"sampling.{name}", getattr(params, name), allowed)


def chooser(
    sequence: Sequence,
    tree: DraftTree,
    logits: torch.Tensor,
    predictions: Int32Array,
    eos_token_ids: frozenset[int],
) -> Callable[[int], int]:
    """The model's choice after each node of `tree`, as plain decoding makes it.

    Args:
        logits: [1 + n, vocab]; row 0 belongs to the root, row i + 1 to node i.
        predictions: int32[1 + n], the rows' largest logits' tokens.

    Returns:
        node -> token, `ROOT` (-1) for the root.
    """
    choices = predictions.tolist()
    ends = sequence.stop.token_ids if sequence.stop.ignore_eos else sequence.stop.token_ids | eos_token_ids
    first_free = sequence.stop.min_tokens - len(sequence.output)
    if first_free <= 0 or not ends:
        return lambda node: choices[node + 1]
    banned = torch.tensor(sorted(ends), device=logits.device)

    def choose(node: int) -> int:
        written = 0 if node == ROOT else int(tree.depths[node]) + 1
        token: int = choices[node + 1]
        if written < first_free and token in ends:
            token = int(logits[node + 1].index_fill(0, banned, float("-inf")).argmax())
        return token

    return choose
