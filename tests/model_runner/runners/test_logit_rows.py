"""Logits of any rows of a step, of none, and of models whose forward cannot select rows.

Every runner computes such steps, and what comes after is the same as if each token had been computed alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from draftwood_model_runner.errors import UnsupportedModelError, UnsupportedRunnerError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import Runner
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.openvino import output_head as cutting
from draftwood_model_runner.runners.openvino.factory import OpenVinoRunnerFactory
from draftwood_model_runner.runners.openvino.output_head import OutputHead
from draftwood_model_runner.runners.shrinking import randomized
from draftwood_model_runner.sampling.token_sampler import TokenSampler
from draftwood_strategies import EMPTY_TREE
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.families import VOCAB, as_prompt, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import GREEDY, batch_of, engine_of, make_sequence, run
from tests.model_runner.small_models import TINY, small_model

RUNNERS = ("torch", "openvino", "cuda")
NEW_TOKENS = 8
PROMPTS: tuple[tuple[int, ...], ...] = ((1, 2, 3, 1, 2), (4,), tuple(range(10, 50)))


@functools.cache
def plainly(prompt: tuple[int, ...]) -> list[int]:
    """Greedy decoding with Whisper's decoder as transformers runs it."""
    module, tokens = small_model("whisper"), list(prompt)
    with torch.inference_mode():
        for _ in range(NEW_TOKENS):
            tokens.append(int(module(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.timeout(300)  # kernels for GPUs are interpreted
@pytest.mark.parametrize("runner", RUNNERS)
def test_the_decoder_of_whisper_writes_what_transformers_computes(runner: str) -> None:
    model = taken_over(small_model("whisper"), runner=runner, max_context=128, defaults="greedy")
    strategy = OracleStrategy({prompt: plainly(prompt) for prompt in PROMPTS}, 128, seed=1)
    sequences = batch_of(PROMPTS, StopParams(NEW_TOKENS), strategy=strategy, max_draft_nodes=12)
    run(engine_of(model, 12, max_running=3, prefill_chunk=16), *sequences)
    assert [sequence.output for sequence in sequences] == [plainly(prompt) for prompt in PROMPTS]
    assert sum(sequence.stats.accepted_tokens for sequence in sequences) > 0


def musicgen() -> Any:
    """The decoder alone, which transformers' table of models does not have."""
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 128}
    config = tf.MusicgenDecoderConfig(vocab_size=VOCAB, num_codebooks=1, pad_token_id=0, bos_token_id=1, **sizes)
    return randomized(tf.MusicgenForCausalLM(config).float().eval())


@pytest.mark.parametrize(
    ("runner", "family", "reason"),
    [
        ("openvino", "musicgen", "positions of its own|rows of logits"),
        ("openvino", "trocr", "code of its own"),
        *[(runner, "prophetnet", "code of its own") for runner in RUNNERS],
        *[(runner, "xlstm", "code of its own") for runner in RUNNERS],
    ],
)
def test_others_without_the_parameter_are_refused(runner: str, family: str, reason: str) -> None:
    with pytest.raises((UnsupportedModelError, UnsupportedRunnerError), match=reason):
        taken_over(musicgen() if family == "musicgen" else small_model(family), runner=runner)


class _KeepsAllRows(tf.LlamaForCausalLM):
    """Takes the parameter, and gives all rows."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
        return super().forward(*args, **options)


class _KeepsFirstRows(tf.LlamaForCausalLM):
    """Takes the parameter, and gives the rows of other tokens."""

    def forward(self, *args: Any, logits_to_keep: Any = 0, **options: Any) -> Any:
        kept = logits_to_keep if isinstance(logits_to_keep, int) else torch.arange(logits_to_keep.shape[0])
        return super().forward(*args, logits_to_keep=kept, **options)


@pytest.mark.parametrize("model_class", [_KeepsAllRows, _KeepsFirstRows])
@pytest.mark.parametrize("runner", ["torch", "cuda"])
def test_a_model_that_gives_other_rows_is_refused(runner: str, model_class: Any) -> None:
    torch.manual_seed(0)
    module = randomized(model_class(tf.LlamaConfig(**TINY)).eval())
    refused = UnsupportedModelError, UnsupportedRunnerError
    with pytest.raises(refused, match=r"rows of logits|differ from the model's"):
        taken_over(module, max_context=128, runner=runner)


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
    actual = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(1, LONGEST // 4))
        actual.append((size, draw(st.one_of(st.just(size), st.integers(0, size)))))
    return actual


def steps(sequences: list[list[Piece]]) -> Iterator[list[tuple[int, int, Piece]]]:
    """Of each step, the sequences that it computes, with the tokens before it."""
    for step in range(max(map(len, sequences))):
        yield [
            (number, sum(size for size, _ in of_one[:step]), of_one[step])
            for number, of_one in enumerate(sequences)
            if step < len(of_one)
        ]


@pytest.mark.parametrize("runner", ["torch", "openvino", "openvino screened", "cuda"])
@settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # interpreted, a step takes seconds
@example(sequences=[[(1, 1), (2, 2)], [(2, 2), (1, 0)]], top_k=0, greedy=True)
@given(sequences=st.lists(pieces(), min_size=1, max_size=3), top_k=st.sampled_from([0, 3]), greedy=st.booleans())
def test_any_rows_may_have_logits(runner: str, sequences: list[list[Piece]], top_k: int, greedy: bool) -> None:
    made = runner_of(runner)
    prompts = [tuple((7 * i * i + 3 * number) % VOCAB for i in range(LONGEST)) for number in range(len(sequences))]
    for computed in steps(sequences):
        rows, wanted = [], []
        for number, context, (size, first) in computed:
            chain = as_prompt(prompts[number][context : context + size])
            rows.append(BatchRow(pages_of(made, number), context, chain, EMPTY_TREE, first))
            wanted.append(expected(prompts[number])[context + first : context + size])
        batch = lay_out(rows)
        logits, tokens, top, _ = made.step(batch, top_k)
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
