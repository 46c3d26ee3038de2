"""A model's generation config holds as in transformers' own `generate`, with and without drafts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from draftwood_model_runner.errors import UnsupportedModelError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling.generation_defaults import (
    Constraints,
    GenerationDefaults,
    eos_token_ids,
    generation_defaults,
)
from tests.model_runner.families import VOCAB, generate, greedy, taken_over, tiny
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import batch_of, engine_of, run

PROMPTS = [(3, 1, 4, 1, 5), (2,) * 9, (1, 2, 3, 1, 2, 3, 1, 2)]
NEW_TOKENS = 40


def model_with(**fields: Any) -> tuple[Any, LoadedModel]:
    """The tiny Llama with such a generation config: as transformers runs it, and as Draftwood does."""
    plain, ours = tiny("llama"), tiny("llama")
    for module in (plain, ours):
        for name, value in fields.items():
            setattr(module.generation_config, name, value)
    return plain, taken_over(ours)


# Tokens that the tiny Llama likes to write, so that each rule changes what it writes.
LIKED = sorted(set(greedy("llama", PROMPTS[0], NEW_TOKENS)))


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 1},
        {"bad_words_ids": [LIKED[:1], LIKED[1:3], [LIKED[3], LIKED[4]]]},
        {"suppress_tokens": LIKED[:4]},
        {"begin_suppress_tokens": greedy("llama", PROMPTS[0], 1)},
        {"forced_eos_token_id": 17},
        {"min_new_tokens": 30, "eos_token_id": LIKED[:8]},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3, "suppress_tokens": LIKED[:2], "forced_eos_token_id": 9},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_answers_are_those_of_generate(fields: dict[str, Any]) -> None:
    module, model = model_with(**fields)
    answers = {prompt: generate(module, prompt, NEW_TOKENS) for prompt in PROMPTS}
    assert any(answers[prompt] != greedy("llama", prompt, NEW_TOKENS) for prompt in PROMPTS)
    defaults = model.defaults
    stop = StopParams(NEW_TOKENS, min_tokens=defaults.min_tokens)
    for strategy in (None, OracleStrategy(answers, VOCAB, seed=1)):
        sequences = batch_of(PROMPTS, stop, defaults.sampling, strategy=strategy, max_draft_nodes=16)
        outputs = run(engine_of(model, 16), *sequences)
        assert all(output.finish is None or output.finish.error is None for output in outputs)
        assert [sequence.output for sequence in sequences] == list(answers.values())
        assert strategy is None or sum(sequence.stats.accepted_tokens for sequence in sequences) > 20


def test_every_field_has_its_place() -> None:
    config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05, min_new_tokens=2,
        max_new_tokens=300, no_repeat_ngram_size=3, bad_words_ids=[[1, 2], [3]], suppress_tokens=[4],
        begin_suppress_tokens=[5, 6], forced_eos_token_id=7,
    )  # fmt: skip
    assert generation_defaults("m", config) == GenerationDefaults(
        sampling=SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.05, repetition_penalty=1.05),
        min_tokens=2,
        max_tokens=300,
        constraints=Constraints(3, ((1, 2), (3,)), (4,), (5, 6), (7,)),
    )
    assert generation_defaults("m", config, "greedy") == generation_defaults("m", None) == GenerationDefaults()


def test_tokens_outside_of_the_vocabulary_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = GenerationConfig(
        bad_words_ids=[[1, 2], [3, 99]],
        suppress_tokens=[-1, 4, None],
        begin_suppress_tokens=[50],
        forced_eos_token_id=51,
    )
    constraints = generation_defaults("m", config, vocab_size=50).constraints
    assert constraints == Constraints(bad_words=((1, 2),), suppressed=(4,))
    assert "suppress_tokens of the model's config: left out -1, None, as its vocabulary is [0, 49]" in caplog.text


def test_a_config_that_says_nothing_is_greedy_and_one_that_only_samples_is_as_in_generate() -> None:
    assert generation_defaults("m", GenerationConfig()) == GenerationDefaults()
    assert generation_defaults("m", GenerationConfig(temperature=0.7)) == GenerationDefaults()
    sampled = generation_defaults("m", GenerationConfig(do_sample=True)).sampling
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (1.0, 50, 1.0)
    assert not generation_defaults("m", GenerationConfig()).constraints


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_beams", 4), ("typical_p", 0.9), ("sequence_bias", [[[3], 1.0]]), ("encoder_repetition_penalty", 1.2),
     ("exponential_decay_length_penalty", (5, 1.2)), ("guidance_scale", 1.5), ("stop_strings", ["x"])],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tiny: its generation config sets {field} to .*greedy"):
        generation_defaults("tiny", GenerationConfig(**{field: value}))
    assert generation_defaults("tiny", GenerationConfig(**{field: value}), "greedy") == GenerationDefaults()


def test_an_answer_ends_where_generate_ends_it() -> None:
    """The generation config alone decides, also where the model's own config names other tokens."""
    module, model = model_with(eos_token_id=[5, 9])
    assert model.eos_token_ids == frozenset({5, 9})
    module.config.eos_token_id, module.generation_config.eos_token_id = 4, None
    assert eos_token_ids(module) == frozenset()
    text_config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=4, vocab_size=5))
    assert eos_token_ids(SimpleNamespace(generation_config=None, config=text_config)) == frozenset({4})
