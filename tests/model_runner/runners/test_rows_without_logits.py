"""A step may ask for the logits of any of its tokens, and of none: every runner computes it, and what comes after it is
the same as if each token had been computed alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino.factory import OpenVinoRunnerFactory
from draftwood_model_runner.runners.openvino.graph import output_head as cutting
from draftwood_model_runner.runners.openvino.output_head import OutputHead
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.draft import Int32Array
from tests.model_runner.families import VOCAB, as_prompt, taken_over, tiny
from tests.model_runner.sequences import GREEDY, make_sequence

LONGEST = 24
KV_TOKENS = 256
Piece = tuple[int, int]
"""Tokens of a sequence in a step, and from which of them on logits are wanted; their number for none."""


def module() -> Any:
    return tiny("llama", num_hidden_layers=1)


@functools.cache
def runner_of(name: str) -> Runner:
    kind, _, screened = name.partition(" ")
    with pytest.MonkeyPatch.context() as patched:
        if screened:
            trial = OutputHead._trial
            patched.setattr(cutting, "_LEAST_ELEMENTS", 1)
            patched.setattr(OutputHead, "_trial", lambda head, rough: trial(head, rough) or True)
        factory = taken_over(module(), runner=kind).factory
        runner = factory.runner(KV_TOKENS, threads=1)
    if isinstance(factory, OpenVinoRunnerFactory):
        assert (runner._head is not None) is bool(screened)  # type: ignore[attr-defined]
    return runner


@functools.cache
def expected(tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits after each token, as transformers computes them."""
    with torch.inference_mode():
        logits: torch.Tensor = module()(torch.tensor([tokens])).logits[0]
    return logits


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """How a sequence is divided among steps."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, LONGEST // 4))
        found.append((size, draw(st.one_of(st.just(size), st.integers(0, size)))))
    return found


def steps(sequences: list[list[Piece]]) -> Iterator[list[tuple[int, int, Piece]]]:
    """Of each step, the sequences that it computes, with the tokens before it."""
    for step in range(max(map(len, sequences))):
        yield [
            (number, sum(size for size, _ in of_one[:step]), of_one[step])
            for number, of_one in enumerate(sequences)
            if step < len(of_one)
        ]


several = st.lists(pieces(), min_size=1, max_size=3)
few_examples = settings(max_examples=8, phases=[Phase.explicit, Phase.reuse, Phase.generate])


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("runner", ["torch", "openvino", "openvino screened"])
@few_examples
@given(sequences=several, greedy=st.booleans())
def test_any_rows_may_have_logits(runner: str, top_k: int, sequences: list[list[Piece]], greedy: bool) -> None:
    check(runner, top_k, sequences, greedy)


@pytest.mark.parametrize("runner", ["cuda"])
@settings(few_examples, max_examples=3)  # interpreted, a step takes seconds
@given(sequences=several, greedy=st.booleans())
def test_any_rows_may_have_logits_on_a_gpu(runner: str, sequences: list[list[Piece]], greedy: bool) -> None:
    check(runner, 3, sequences, greedy)
    check(runner, 0, [[(1, 1), (2, 2)], [(2, 2), (1, 0)]], greedy)


def check(runner: str, top_k: int, sequences: list[list[Piece]], greedy: bool) -> None:
    made = runner_of(runner)
    prompts = [tuple((7 * i * i + 3 * number) % VOCAB for i in range(LONGEST)) for number in range(len(sequences))]
    for computed in steps(sequences):
        rows, wanted = [], []
        for number, context, (size, first) in computed:
            chain = as_prompt(prompts[number][context : context + size])
            rows.append(BatchRow(pages_of(made, number), context, chain, EMPTY_TREE, first))
            wanted.append(expected(prompts[number])[context + first : context + size])
        batch = lay_out(rows)
        logits, tokens, top = made.step(batch, top_k)
        right = torch.cat(wanted)
        assert logits.shape == (batch.logit_rows.size, VOCAB)
        np.testing.assert_allclose(np.asarray(torch.as_tensor(logits).cpu()), right.numpy(), atol=2e-3, rtol=1e-3)
        assert tokens.tolist() == right.argmax(1).tolist()
        if top_k:
            assert top is not None
            assert top.shape[0] == right.shape[0]
            assert top.shape[1] >= top_k
        if not right.shape[0]:
            begun = made.begin(batch, top_k, [sampler() if greedy else None for _ in rows])
            feedback, seconds = begun.wait()
            assert feedback.tokens.size == 0
            assert seconds >= 0
            assert begun.verify([]) == []


def pages_of(runner: Runner, number: int) -> Int32Array:
    """The pages of a sequence of `LONGEST` tokens."""
    each = -(-LONGEST // runner.page_size)
    return np.arange(number * each, (number + 1) * each, dtype=np.int32)


def sampler() -> TokenSampler:
    return TokenSampler(make_sequence("r", [1], StopParams(4), GREEDY), frozenset(), VOCAB)
