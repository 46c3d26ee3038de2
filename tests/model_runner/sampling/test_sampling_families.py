"""Sampling on every family of models: what transformers' `generate` writes with its own processors, drafted or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_strategies import Strategy, create, strategy_names
from tests.model_runner.beside import assert_no_faults, create_beside, served_beside
from tests.model_runner.families import FAMILIES, OPENVINO_FAMILIES, VOCAB, WINDOW, reference, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sampling import test_token_sampler as sampler
from tests.model_runner.sampling.test_token_sampler import PROMPT, engine_for, expected, few_examples, sequence
from tests.model_runner.sequences import engine_of, run

LONGER = PROMPT * 2
"""Longer than the window of those that have one."""


@pytest.mark.parametrize(("family", "runner"), with_runners(FAMILIES, ["llama", "bundled"]))
@given(wanted=sampler.params, stop=sampler.stops, others=st.lists(sampler.params, min_size=7, max_size=7))
@few_examples
def test_every_setting_alone_in_a_batch_and_with_any_draft(
    family: str, runner: str, wanted: SamplingParams, stop: StopParams, others: list[SamplingParams]
) -> None:
    assert len(LONGER) > WINDOW
    answer = expected(family, LONGER, wanted, stop)
    oracle = OracleStrategy({LONGER: answer}, VOCAB, seed=1)
    engine, hybrid = engine_for(family, runner), create("hybrid")
    others_draft = [create(name) for name in strategy_names() if family == "llama"]
    drafting: list[Strategy | None] = [None, oracle, hybrid, hybrid, *others_draft, *others_draft]
    for strategy in drafting:
        one = sequence(LONGER, wanted, stop, strategy)
        run(engine, one)
        assert one.stats.drafting_disabled_reason == ""
        assert one.output == answer
    beside = engine_of(served_beside(family, runner), 24)
    for name in (*beside.model_drafts, "hybrid"):
        one = sequence(LONGER, wanted, stop, create_beside(beside, name))
        run(beside, one)
        assert_no_faults([one])
        assert one.output == answer
    crowd = [sequence((*LONGER[:-1], i), other, stop, hybrid) for i, other in enumerate(others)]
    one = sequence(LONGER, wanted, stop, oracle)
    run(engine, *crowd[:3], one, *crowd[3:])
    assert one.output == answer
    engine.check()


@pytest.mark.parametrize(("family", "runner"), with_runners(FAMILIES, OPENVINO_FAMILIES))
def test_log_probabilities_are_the_models_own(family: str, runner: str) -> None:
    """Before penalties, temperature and truncation; of drafted tokens as of others."""
    wanted = SamplingParams(temperature=1.1, top_p=0.9, repetition_penalty=1.4, seed=9, logprobs=4)
    stop = StopParams(12)
    answer = expected(family, LONGER, wanted, stop)
    with torch.inference_mode():
        logits = reference(family)(input_ids=torch.tensor([[*LONGER, *answer]])).logits[0]
    law = torch.log_softmax(logits[len(LONGER) - 1 : -1].float(), -1)
    best = law.topk(4)
    for strategy in (None, OracleStrategy({LONGER: answer}, VOCAB, seed=2)):
        one = sequence(LONGER, wanted, stop, strategy)
        outputs = run(engine_for(family, runner), one)
        assert all(len(output.logprobs) == len(output.token_ids) for output in outputs)
        assert one.output == answer
        assert strategy is None or one.stats.accepted_tokens > 0
        found = [detail for output in outputs for detail in output.logprobs]
        chosen, top = [one.logprob for one in found], [one.top_logprobs for one in found]
        torch.testing.assert_close(torch.tensor(chosen), law[range(len(answer)), answer], atol=1e-3, rtol=0)
        torch.testing.assert_close(torch.tensor(top), best.values, atol=1e-3, rtol=0)
        assert [one.top_token_ids for one in found] == best.indices.tolist()
