"""Sampled answers where many tokens are equally probable: neither the draft, nor the clock, nor the runner chooses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import VOCAB, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.sequences import engine_of, make_sequence, run

PROMPT, NEW_TOKENS, EQUAL = (1, 2, 3, 1, 2), 6, 16
SAMPLING = (
    SamplingParams(temperature=2.0, top_p=0.6, seed=5),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=6),
    SamplingParams(temperature=3.0, top_p=0.4, presence_penalty=0.5, repetition_penalty=1.2, seed=7),
)


@functools.cache
def served(runner: str) -> LoadedModel:
    """Of each 16 tokens, one after the other, all have the same logits."""
    module = tiny("llama", num_hidden_layers=1).to(DEVICE)
    with torch.no_grad():
        module.lm_head.weight.copy_(module.lm_head.weight[::EQUAL].repeat_interleave(EQUAL, 0))
    return taken_over(module, exact=False, runner=runner)


Wanted = tuple[int | None, int]
"""For how many nodes of a draft there is time to find a mask, so that the device chooses, and nodes to draft."""


def written(runner: str, params: SamplingParams, wanted: list[Wanted], answer: list[int]) -> list[list[int]]:
    """What sequences write that run together; a strategy knows the `answer` if there is one."""
    sequences: list[Sequence] = []
    for known, nodes in wanted:
        options: dict[str, Any] = {
            "grammar": None if known is None else RandomGrammar(VOCAB, 0.6, known),
            "strategy": OracleStrategy({PROMPT: answer}, VOCAB, seed=nodes) if answer else None,
            "max_draft_nodes": nodes,
        }
        sequences.append(make_sequence(str(len(sequences)), PROMPT, StopParams(NEW_TOKENS), params, **options))
    run(engine_of(served(runner), 8, max_running=5), *sequences)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("params", SAMPLING)
def test_neither_the_draft_nor_the_clock_nor_the_runner_chooses(params: SamplingParams) -> None:
    for known in (0, None):
        [expected] = written("torch", params, [(known, 0)], [])
        wanted: list[Wanted] = [(None, 0), (None, 3), (None, 8)]
        if known is not None:
            wanted = [(0, 8), (2, 3), (2, 8), (1_000, 0), (1_000, 8)]
        assert written("cuda", params, wanted, expected) == [expected] * len(wanted)
