"""Sampling: what transformers' own processors and our noise choose, on every family of models, whatever is drafted and
whoever shares the batch; and the law of what is drawn."""

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

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_model_runner.sampling.token_sampler import TokenSampler, exact_top_k
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy, create, strategy_names
from tests.model_runner.beside import assert_no_faults, create_beside, served_beside
from tests.model_runner.families import (
    FAMILIES,
    OPENVINO_FAMILIES,
    VOCAB,
    WINDOW,
    expected,
    reference,
    served,
    with_runners,
)
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import GREEDY, engine_of, make_sequence, run

NEW_TOKENS = 16
END = 7
PROMPT = (1, 2, 3, 4, 1, 2, 3, 4, 1, 2) * 2
"""Longer than the window of those that have one."""
assert len(PROMPT) > WINDOW

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


def sequence(
    prompt: tuple[int, ...], params: SamplingParams, stop: StopParams, strategy: Strategy | None = None, nodes: int = 24
) -> Sequence:
    return make_sequence("r", prompt, stop, params, strategy=strategy, max_draft_nodes=nodes)


def engine_for(family: str, runner: str = "torch") -> Engine:
    return engine_of(served(family, runner), 24)


@pytest.mark.parametrize(("family", "runner"), with_runners(FAMILIES, ["llama", "bundled"]))
@given(wanted=params, stop=stops, others=st.lists(params, min_size=7, max_size=7))
@few_examples
def test_every_setting_alone_in_a_batch_and_with_any_draft(
    family: str, runner: str, wanted: SamplingParams, stop: StopParams, others: list[SamplingParams]
) -> None:
    answer = expected(family, PROMPT, wanted, stop)
    oracle = OracleStrategy({PROMPT: answer}, VOCAB, seed=1)
    engine, hybrid = engine_for(family, runner), create("hybrid")
    others_draft = [create(name) for name in strategy_names() if family == "llama"]
    drafting: list[Strategy | None] = [None, oracle, hybrid, hybrid, *others_draft, *others_draft]
    for strategy in drafting:
        one = sequence(PROMPT, wanted, stop, strategy)
        run(engine, one)
        assert one.stats.drafting_disabled_reason == ""
        assert one.output == answer
    beside = engine_of(served_beside(family, runner), 24)
    for name in (*beside.model_drafts, "hybrid"):
        one = sequence(PROMPT, wanted, stop, create_beside(beside, name))
        run(beside, one)
        assert_no_faults([one])
        assert one.output == answer
    crowd = [sequence((*PROMPT[:-1], i), other, stop, hybrid) for i, other in enumerate(others)]
    one = sequence(PROMPT, wanted, stop, oracle)
    run(engine, *crowd[:3], one, *crowd[3:])
    assert one.output == answer
    engine.check()


@pytest.mark.parametrize(("family", "runner"), with_runners(FAMILIES, OPENVINO_FAMILIES))
@pytest.mark.parametrize(
    "wanted",
    [
        SamplingParams(logprobs=4),
        SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.4, seed=9, logprobs=4),
    ],
    ids=["greedy", "sampled"],
)
def test_log_probabilities_are_the_models_own(family: str, runner: str, wanted: SamplingParams) -> None:
    """Before penalties, temperature and truncation; of drafted tokens as of others, behind another row."""
    stop = StopParams(12)
    answer = expected(family, PROMPT, wanted, stop)
    with torch.inference_mode():
        logits = reference(family)(input_ids=torch.tensor([[*PROMPT, *answer]])).logits[0]
    law = torch.log_softmax(logits[len(PROMPT) - 1 : -1].float(), -1)
    best = law.topk(4)
    for strategy in (None, OracleStrategy({PROMPT: answer}, VOCAB, seed=2)):
        other, one = sequence((5, 6), wanted, StopParams(20)), sequence(PROMPT, wanted, stop, strategy)
        outputs = [output for output in run(engine_for(family, runner), other, one) if output.sequence is one]
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        assert one.output == answer
        assert strategy is None or one.stats.accepted_tokens > 0
        found = [detail for output in outputs for detail in output.logprobs]
        chosen, top = [one.logprob for one in found], [one.top_logprobs for one in found]
        torch.testing.assert_close(torch.tensor(chosen), law[range(len(answer)), answer], atol=1e-3, rtol=0)
        torch.testing.assert_close(torch.tensor(top), best.values, atol=1e-3, rtol=0)
        assert [one.top_token_ids for one in found] == best.indices.tolist()


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
    law = np.array([*chances.values()]) * draws
    assert chi_squared_is_plausible(found, law)
    assert not chi_squared_is_plausible(found, np.roll(law, 1))


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
    plain = sequence(PROMPT, GREEDY, StopParams(9), None)
    assert TokenSampler(plain, frozenset(), VOCAB, Constraints(suppressed=(5,))).exact_top_k is None
    plain.grammar = RandomGrammar(VOCAB)
    assert TokenSampler(plain, frozenset(), VOCAB).exact_top_k is None
