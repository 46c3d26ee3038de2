"""Sampling on every family of models: what transformers' `generate` writes with its own processors, drafted or not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import draftwood_strategies
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.output import TokenLogprobs
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies import Strategy
from tests.model_runner.families import FAMILIES, OPENVINO_FAMILIES, VOCAB, WINDOW, reference, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sampling.test_token_chooser import (
    PROMPT,
    engine_for,
    expected,
    few_examples,
    params,
    sequence,
    stops,
)

OTHERS = [name for name in FAMILIES if name != "llama"]
LONGER = PROMPT * 2
"""Longer than the window of those that have one."""


def write(engine: Engine, *batch: Sequence) -> dict[Sequence, list[TokenLogprobs]]:
    details: dict[Sequence, list[TokenLogprobs]] = {one: [] for one in batch}
    for one in batch:
        engine.add(one)
    while engine.has_work:
        for output in engine.step():
            details[output.sequence] += output.logprobs
    return details


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("family", "runner"), with_runners(OTHERS, ["llama"]))
@given(wanted=params, stop=stops, others=st.lists(params, min_size=7, max_size=7))
@few_examples
def test_every_setting_alone_in_a_batch_and_with_any_draft(
    family: str, runner: str, wanted: SamplingParams, stop: StopParams, others: list[SamplingParams]
) -> None:
    assert len(LONGER) > WINDOW
    answer = expected(family, LONGER, wanted, stop)
    oracle = OracleStrategy({LONGER: answer}, VOCAB, seed=1)
    engine, hybrid = engine_for(family, runner), draftwood_strategies.create("hybrid")
    drafting: list[Strategy | None] = [None, oracle, hybrid, hybrid]
    for strategy in drafting:
        one = sequence(LONGER, wanted, stop, strategy)
        write(engine, one)
        assert one.stats.drafting_disabled_reason == ""
        assert one.output == answer
    crowd = [sequence((*LONGER[:-1], i), other, stop, hybrid) for i, other in enumerate(others)]
    one = sequence(LONGER, wanted, stop, oracle)
    write(engine, *crowd[:3], one, *crowd[3:])
    assert one.output == answer
    engine.check()


@pytest.mark.parametrize(("family", "runner"), with_runners(OTHERS, OPENVINO_FAMILIES))
def test_log_probabilities_are_the_models_own(family: str, runner: str) -> None:
    wanted, stop = SamplingParams(temperature=1.1, top_p=0.9, seed=9, logprobs=4), StopParams(12)
    answer = expected(family, LONGER, wanted, stop)
    with torch.inference_mode():
        logits = reference(family)(input_ids=torch.tensor([[*LONGER, *answer]])).logits[0]
    law = torch.log_softmax(logits[len(LONGER) - 1 : -1].float(), -1)
    one = sequence(LONGER, wanted, stop, OracleStrategy({LONGER: answer}, VOCAB, seed=2))
    found = write(engine_for(family, runner), one)[one]
    assert one.output == answer
    assert one.stats.accepted_tokens > 0
    torch.testing.assert_close(
        torch.tensor([detail.logprob for detail in found]), law[range(len(answer)), answer], atol=1e-3, rtol=0
    )
    best = law.topk(4).values
    torch.testing.assert_close(torch.tensor([detail.top_logprobs for detail in found]), best, atol=1e-3, rtol=0)
