"""The tokens that a step writes: chosen on the device, with the paths of draft trees that they accept."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from model_runner.runners.choices import BY_SCORES, Choices, RuleArrays
from model_runner.runners.cuda.device.launching import launch
from model_runner.runners.cuda.kernels.choosing import adjust_scores, choose_tokens
from model_runner.runners.cuda.kernels.kv import move_kv
from model_runner.runners.cuda.kernels.walking import accept_paths
from model_runner.runners.cuda.kv_cache import PAGE_SIZE, KVPages
from model_runner.runners.cuda.steps.attention import power_of_2
from model_runner.runners.cuda.steps.step_arrays import StepArrays

_BLOCK = 1024
_ENTRIES = 128


def choose_and_keep(
    logits: torch.Tensor, chosen: torch.Tensor, arrays: StepArrays, choices: Choices, kv: KVPages
) -> None:
    """Chooses the tokens after the rows of logits, and keeps what is accepted; the host does not wait.

    Args:
        logits: [R, vocab].
        chosen: int32[R], the most probable token after each row, in and out.
    """
    batch_rows = choices.kinds.size
    begins = arrays.buffer.host["logit_begins"][: batch_rows + 1]
    if choices.rules:
        _choose(logits, chosen, arrays, choices)
    most = int((begins[1:] - begins[:-1]).max())
    if most <= 1:
        return
    moves = torch.empty((int(begins[-1]), 2), dtype=torch.int64, device=logits.device)
    counts = torch.empty(batch_rows, dtype=torch.int32, device=logits.device)
    launch(
        accept_paths,
        (batch_rows,),
        *(chosen, arrays.tokens, arrays.parents, arrays.slots, arrays.logit_rows, arrays.logit_begins, arrays.kinds),
        *(moves, counts, chosen.stride(0)),
        NODES=max(16, power_of_2(most)),
    )
    move(kv, moves, arrays.logit_begins, counts)


def move(kv: KVPages, moves: torch.Tensor, begins: torch.Tensor, counts: torch.Tensor) -> None:
    """Moves entries in every layer.

    Args:
        moves: int64[m, 2], source and target slots.
        begins: int32[n or more], the first move of each sequence.
        counts: int32[n], how many moves it has.
    """
    for shape, memory in kv.by_shape.items():
        width = shape.key_dim + shape.value_dim
        launch(
            move_kv,
            (memory.shape[0], shape.kv_heads, counts.shape[0]),
            *(memory, moves, begins, counts, memory.stride(0)),
            KV_HEADS=shape.kv_heads,
            WIDTH=width,
            BLOCK=power_of_2(width),
            PAGE_SIZE=PAGE_SIZE,
        )


def _choose(logits: torch.Tensor, chosen: torch.Tensor, arrays: StepArrays, choices: Choices) -> None:
    rows, vocab = logits.shape[0], logits.shape[1]
    begins = arrays.buffer.host["logit_begins"]
    sequences = torch.full((rows,), -1, dtype=torch.int32)
    by_scores = (choices.kinds == BY_SCORES).nonzero()[0].tolist()
    for sequence, row in enumerate(by_scores):
        sequences[begins[row] : begins[row + 1]] = sequence
    first, last = int(begins[by_scores[0]]), int(begins[by_scores[-1] + 1])
    sequences = sequences[first:last].to(logits.device, non_blocking=True)
    rules = RuleArrays.of(choices.rules)

    def sent(values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(logits.device, non_blocking=True)

    nodes = arrays.logit_rows[first:last]
    scores = torch.empty((last - first, vocab), dtype=torch.float32, device=logits.device)
    launch(
        adjust_scores,
        (last - first,),
        *(logits[first:last], scores, sequences, nodes, arrays.parents, arrays.tokens, arrays.positions),
        *(sent(values) for values in (rules.unlocked_at, rules.penalties, rules.begins)),
        *(sent(values) for values in (rules.tokens, rules.counts, rules.biases, rules.flags)),
        *(vocab, logits.stride(0)),
        BLOCK=_BLOCK,
        ENTRIES=_ENTRIES,
    )
    launch(
        choose_tokens,
        (last - first,),
        *(scores, chosen[first:last], sequences, nodes, arrays.positions),
        *(sent(values) for values in (rules.temperatures, rules.top_ks, rules.top_ps, rules.min_ps, rules.seeds)),
        *(vocab, chosen.stride(0)),
        BLOCK=_BLOCK,
    )
