"""Sequences that are paused and resumed at any time write what transformers' own `generate` writes."""

from __future__ import annotations

import numpy as np
import pytest

import draftwood_strategies
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sequence import SequenceState
from tests.model_runner.families import served, with_runners
from tests.model_runner.sampling.test_token_sampler import expected
from tests.model_runner.sequences import engine_of, make_sequence, run

NEW_TOKENS = 60
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=3)


@pytest.mark.parametrize(("family", "runner"), with_runners(["llama", "gemma2"], ["llama"]))
@pytest.mark.parametrize(
    ("sampling", "kv_cache_tokens", "prefix_cache"), [(SamplingParams(), 264, True), (SAMPLED, 464, False)]
)
def test_pauses_change_no_token(
    family: str, runner: str, sampling: SamplingParams, kv_cache_tokens: int, prefix_cache: bool
) -> None:
    options = {"prefill_chunk": 20, "kv_cache_tokens": kv_cache_tokens, "prefix_cache": prefix_cache}
    engine = engine_of(served(family, runner), 8, max_running=2, **options)
    random = np.random.default_rng(kv_cache_tokens)
    strategy, stop = draftwood_strategies.create("trie"), StopParams(NEW_TOKENS)
    prompts = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 5 + 15 * i)) for i in range(4)]
    sequences = [
        make_sequence(str(i), prompt, stop, sampling, strategy=strategy, max_draft_nodes=8, tenant="ab"[i % 2])
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    for _ in range(30):
        (engine.pause if random.random() < 0.5 else engine.resume)(sequences[random.integers(4)])
        for _ in range(random.integers(1, 5)):
            engine.step()
            engine.check()
    for sequence in sequences:
        engine.resume(sequence)
    run(engine)
    assert [one.output for one in sequences] == [expected(family, prompt, sampling, stop) for prompt in prompts]
    assert sum(one.stats.pauses for one in sequences) >= 3


def test_paused_sequences_leave_slots_memory_and_shares_to_others() -> None:
    engine = engine_of(served("llama"), 0, max_running=2, kv_cache_tokens=256)
    stop = StopParams(100)
    paused = [make_sequence(str(i), [i + 1] * 100, stop, tenant="a") for i in range(20)]
    for sequence in paused:
        engine.add(sequence)
        while not sequence.output:
            engine.step()
        engine.pause(sequence)
        engine.pause(sequence)
        engine.check()
    assert not engine.has_work
    others = [make_sequence("r", [9] * 50, StopParams(3), tenant="b") for _ in range(2)]
    for sequence in others:
        engine.add(sequence)
    for _ in range(4):
        engine.step()
        engine.check()
    assert [one.state for one in others] == [SequenceState.FINISHED] * 2
    engine.cancel(paused[0])
    engine.check()
    engine.close()
    engine.check()
    assert {one.state for one in paused} == {SequenceState.FINISHED}
