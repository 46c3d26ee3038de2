"""Sampling: what transformers' own processors and our noise choose, whatever is drafted, whoever shares the batch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling.draws import gumbel_noise
from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_model_runner.sampling.token_sampler import TokenSampler, exact_top_k
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create, strategy_names
from tests.model_runner.beside import create_beside, served_beside
from tests.model_runner.families import VOCAB, generate, reference, served
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import GREEDY, engine_of, make_sequence, run

NEW_TOKENS = 16
END = 7
PROMPT = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2)

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05, 0.3]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (9, -100.0)), ((END, 6.0),)]),
    seed=st.integers(0, 2**64 - 1),
)
stops = st.builds(
    StopParams, max_tokens=st.just(NEW_TOKENS), min_tokens=st.sampled_from([0, 5]), token_ids=st.just(frozenset({END}))
)
few_examples = settings(
    max_examples=4, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors]
)


class Penalties(LogitsProcessor):
    """Presence and frequency penalties, which transformers lacks: over the new tokens only."""

    def __init__(self, params: SamplingParams, prompt_length: int) -> None:
        self._params, self._prompt_length = params, prompt_length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token in input_ids[0, self._prompt_length :].tolist():
            scores[0, token] -= self._params.frequency_penalty
        for token in set(input_ids[0, self._prompt_length :].tolist()):
            scores[0, token] -= self._params.presence_penalty
        return scores


class Noise(LogitsProcessor):
    """Turns the greedy choice of `generate` into a sample."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = gumbel_noise(scores.shape[1], self._seed, input_ids.shape[1])
        return scores.double() + torch.from_numpy(noise)


def expected(family: str, prompt: tuple[int, ...], params: SamplingParams, stop: StopParams) -> list[int]:
    return written_by(reference(family), prompt, params, stop)


def written_by(module: Any, prompt: tuple[int, ...], params: SamplingParams, stop: StopParams) -> list[int]:
    """What transformers' `generate` writes with its own processors, and the noise last."""
    processors: list[Any] = [Penalties(params, len(prompt))]
    if params.repetition_penalty != 1.0:
        processors.insert(0, RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]))
    own = module.generation_config.eos_token_id
    ends = sorted(stop.token_ids | ({own} if isinstance(own, int) else {*(own or ())}))
    if stop.token_ids:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), stop.min_tokens, ends))
    if params.temperature:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1.0:
            processors.append(TopPLogitsWarper(params.top_p))
        if params.min_p:
            processors.append(MinPLogitsWarper(params.min_p))
        processors.append(Noise(params.seed))
    options: dict[str, Any] = {"logits_processor": LogitsProcessorList(processors)}
    if stop.token_ids:
        options["eos_token_id"] = ends
    return generate(module, prompt, stop.max_tokens, **options)


def sequence(
    prompt: tuple[int, ...], params: SamplingParams, stop: StopParams, strategy: Strategy | None, nodes: int = 24
) -> Sequence:
    return make_sequence("r", prompt, stop, params, strategy=strategy, max_draft_nodes=nodes)


def engine_for(family: str, runner: str = "torch") -> Engine:
    return engine_of(served(family, runner), 24)


STRATEGIES = [
    pytest.param(name, marks=() if name in ("hybrid", "oracle", "draft_model") else pytest.mark.slow)
    for name in (*strategy_names(), "oracle", "draft_model")
]
"""Those that draft the most, the others only among the slow tests."""


@pytest.mark.parametrize("name", STRATEGIES)
@given(wanted=params, stop=stops)
@few_examples
def test_the_output_is_the_same_when_steps_are_skipped(name: str, wanted: SamplingParams, stop: StopParams) -> None:
    answer = expected("llama", PROMPT, wanted, stop)
    model = served_beside("llama") if name == "draft_model" else served("llama")
    engine = engine_of(model, 24, prefill_chunk=6, shared_prefill_chunk=6)
    strategy = OracleStrategy({PROMPT: answer}, VOCAB, seed=1) if name == "oracle" else create_beside(engine, name)
    writer = sequence(PROMPT, wanted, stop, strategy)
    engine.add(writer)
    while not writer.output:
        engine.step()
    engine.add(sequence(PROMPT * 8, wanted, StopParams(1), None))
    wrote = []
    while engine.has_work:
        wrote.append(any(output.sequence is writer for output in engine.step()))
    assert writer.output == answer
    assert wrote[:4] == [False, False, False, True] or name == "none" or len(answer) == 1


@given(wanted=st.lists(params, min_size=7, max_size=7))
@few_examples
def test_the_output_is_the_same_when_several_threads_choose(wanted: list[SamplingParams]) -> None:
    """As with a large vocabulary."""
    stop = StopParams(NEW_TOKENS, token_ids=frozenset({END}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood_model_runner.sampling.verification.LEAST_NUMBERS", 1)
        engine, strategy = engine_of(served("llama"), 24, threads=3), create("trie")
        crowd = [sequence((*PROMPT, i), one, stop, strategy) for i, one in enumerate(wanted)]
        run(engine, *crowd)
    for i, one in enumerate(crowd):
        assert one.output == expected("llama", (*PROMPT, i), wanted[i], stop)


def test_samples_that_were_drafted_follow_the_models_distribution() -> None:
    """Three tokens, where the draft holds the most probable ones: the last is chosen at a drafted node."""
    wanted, draws = SamplingParams(temperature=0.7, top_k=3), 1500
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for start, chance in chances.items():
            tokens, law = top_law((*PROMPT, *start), wanted)
            longer |= {(*start, token): chance * float(p) for token, p in zip(tokens, law, strict=True)}
        chances = longer
    likeliest = max(chances, key=lambda text: chances[text])
    draft = OracleStrategy({PROMPT: [*likeliest]}, VOCAB, seed=4)
    # All prompts at once, for nobody drafts while one waits.
    engine = engine_of(served("llama"), 8, max_running=64, prefill_chunk=1024, shared_prefill_chunk=1024)
    sequences = [sequence(PROMPT, replace(wanted, seed=seed), StopParams(3), draft, nodes=8) for seed in range(draws)]
    for one in sequences:
        engine.add(one)
    while engine.has_work:  # without the checks of `run`, which look at all that wait
        engine.step()
    assert sum(one.stats.accepted_tokens for one in sequences) > 0.1 * draws
    counts = Counter(tuple(one.output) for one in sequences)
    assert counts.keys() <= chances.keys()
    found = np.array([counts[text] for text in chances], float)
    assert chi_squared_is_plausible(found, np.array([*chances.values()]) * draws)


def top_law(prompt: tuple[int, ...], params: SamplingParams) -> tuple[list[int], np.ndarray[Any, Any]]:
    """The next token's `top_k` values and their probabilities, by transformers' own model."""
    with torch.inference_mode():
        logits = reference("llama")(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    top = logits.topk(params.top_k)
    return top.indices.tolist(), torch.softmax(top.values / params.temperature, 0).numpy()


def chi_squared_is_plausible(counts: np.ndarray[Any, Any], law: np.ndarray[Any, Any]) -> bool:
    """Whether the counts are likelier than one in ten thousand (Wilson and Hilferty's cube-root approximation)."""
    common = law >= 5
    counts, law = np.append(counts[common], counts[~common].sum()), np.append(law[common], law[~common].sum())
    counts, law = counts[law > 0], law[law > 0]
    statistic, freedom = float(((counts - law) ** 2 / law).sum()), len(law) - 1
    spread = 2 / (9 * freedom)
    deviation: float = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return deviation < 3.72


def test_the_plausibility_check_can_fail() -> None:
    law = np.full(10, 100.0)
    assert chi_squared_is_plausible(law + np.tile([8.0, -8.0], 5), law)
    assert not chi_squared_is_plausible(law + np.tile([30.0, -30.0], 5), law)


def test_noise_is_a_fixed_function_of_seed_and_position() -> None:
    """Written down once: a seed must write the same text after an upgrade."""
    assert gumbel_noise(3, seed=42, position=7).tolist() == pytest.approx([0.8400811, 2.1012643, 0.5258192], abs=1e-6)
    assert (gumbel_noise(64, 1, 2) != gumbel_noise(64, 2, 1)).all()
    assert (gumbel_noise(64, 2**64 - 1, 2) != gumbel_noise(64, 2**64 - 2, 2)).all()
    assert (gumbel_noise(100, 5, 9)[:50] == gumbel_noise(50, 5, 9)).all()


def test_noise_is_standard_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(4096, seed, 0) for seed in range(50)])
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    assert np.isfinite(noise).all()


@pytest.mark.parametrize(
    ("sampling", "stop", "needed"),
    [
        (GREEDY, StopParams(9), 1),
        (SamplingParams(temperature=0.5, top_k=20, top_p=0.9, min_p=0.1), StopParams(9), 20),
        (SamplingParams(temperature=0.5, top_p=0.9), StopParams(9), None),
        (SamplingParams(frequency_penalty=0.5), StopParams(9), None),
        (SamplingParams(repetition_penalty=1.1), StopParams(9), None),
        (SamplingParams(logit_bias=((3, 1.0),)), StopParams(9), None),
        (SamplingParams(logprobs=0), StopParams(9), None),
        (GREEDY, StopParams(9, min_tokens=4, token_ids=frozenset({3})), None),
    ],
)
def test_how_many_of_the_greatest_logits_decide(sampling: SamplingParams, stop: StopParams, needed: int | None) -> None:
    greedy, sampler = (
        TokenSampler(sequence(PROMPT, *wanted, None), frozenset(), VOCAB)
        for wanted in ((GREEDY, StopParams(9)), (sampling, stop))
    )
    assert sampler.exact_top_k == exact_top_k([greedy, None, sampler]) == needed
    for _ in range(stop.min_tokens):
        sampler.accept(END)
    assert not stop.min_tokens or sampler.exact_top_k == 1


def test_a_grammar_and_the_models_constraints_may_need_all_logits() -> None:
    bound = make_sequence("r", PROMPT, StopParams(9), grammar=RandomGrammar(VOCAB))
    assert TokenSampler(bound, frozenset(), VOCAB).exact_top_k is None
    plain, constraints = sequence(PROMPT, GREEDY, StopParams(9), None), Constraints(suppressed=(5,))
    assert TokenSampler(plain, frozenset(), VOCAB, constraints).exact_top_k is None
