"""Real models with too little memory: preemption, reuse of prefixes and late arrivals change no token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import draftwood_strategies
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.output import FinishReason
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE
from draftwood_model_runner.sequence import Sequence, SequenceState
from tests.model_runner.families import VOCAB, as_prompt, greedy, served, torch_factory, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import make_sequence

CONTEXT, NODES = 256, 24
"""The random families' context, and a cap on drafts: with both, the least memory that an engine takes."""


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def engine_of(family: str = "llama", runner: str = "torch", **options: Any) -> Engine:
    defaults = {"max_draft_nodes": NODES, "adaptive_budget": False, "max_running": 6}
    return Engine(served(family, runner), EngineConfig(**{**defaults, **options}))


def finish(engine: Engine) -> None:
    for _ in range(10_000):
        if not engine.has_work:
            break
        engine.step()
        engine.check()
    assert not engine.has_work


def answer(engine: Engine, prompt: tuple[int, ...], new_tokens: int, **options: Any) -> Sequence:
    sequence = make_sequence("r", as_prompt(prompt), StopParams(new_tokens), max_draft_nodes=NODES, **options)
    engine.add(sequence)
    finish(engine)
    return sequence


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("family", "runner"),
    with_runners(["llama", "gemma2", "qwen2-sliding", "gpt-neox"], ["gpt-neox", "qwen2-sliding"]),
)
def test_preempted_sequences_write_what_they_would_have_written(family: str, runner: str, prefix_cache: bool) -> None:
    prompts = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 5 + 9 * i)) for i in range(6)]
    answers = {prompt: greedy(family, prompt, 120) for prompt in prompts}
    kv_cache_tokens = CONTEXT + NODES
    engine = engine_of(family, runner, kv_cache_tokens=kv_cache_tokens, prefix_cache=prefix_cache, prefill_chunk=50)
    oracle = OracleStrategy(answers, VOCAB, seed=1)
    sequences = [
        make_sequence(str(i), as_prompt(prompt), StopParams(120), strategy=oracle, max_draft_nodes=4 * i)
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    finish(engine)
    assert [s.output for s in sequences] == list(answers.values())
    assert all(s.stats.drafting_disabled_reason == "" for s in sequences)
    assert sum(s.stats.accepted_tokens for s in sequences) > 100
    assert sum(s.stats.preemptions > 0 for s in sequences) >= 2


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding"])
def test_preempted_sequences_whose_prefill_others_skip_steps_for(family: str) -> None:
    """What a preempted sequence had written is read again in small chunks, and others write nothing meanwhile."""
    prompts = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 5 + 9 * i)) for i in range(6)]
    answers = {prompt: greedy(family, prompt, 120) for prompt in prompts}
    engine = engine_of(family, kv_cache_tokens=CONTEXT + NODES, prefill_chunk=8, shared_prefill_chunk=8)
    oracle = OracleStrategy(answers, VOCAB, seed=1)
    sequences = [
        make_sequence(str(i), as_prompt(prompt), StopParams(120), strategy=oracle, max_draft_nodes=NODES)
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    silent = 0
    while engine.has_work:
        writers = [one for one in sequences if one.output and one.committed == one.length - 1]
        wrote = [output.sequence for output in engine.step()]
        engine.check()
        silent += sum(one.state is SequenceState.RUNNING and one not in wrote for one in writers)
    assert [s.output for s in sequences] == list(answers.values())
    assert silent > 6
    assert sum(s.stats.preemptions > 0 for s in sequences) >= 2


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(data=st.data())
@settings(max_examples=50)
def test_arrivals_and_cancellations_at_many_times(data: st.DataObject) -> None:
    check_arrivals_and_cancellations("llama", "torch", data)


@pytest.mark.parametrize(("family", "runner"), with_runners(["llama", "gemma2"], ["llama"]))
@given(data=st.data())
@settings(max_examples=2, derandomize=True)
def test_arrivals_and_cancellations_at_any_time(family: str, runner: str, data: st.DataObject) -> None:
    check_arrivals_and_cancellations(family, runner, data)


def check_arrivals_and_cancellations(family: str, runner: str, data: st.DataObject) -> None:
    kv_cache_tokens = CONTEXT + NODES + data.draw(st.integers(0, 200))
    engine = engine_of(family, runner, kv_cache_tokens=kv_cache_tokens, prefill_chunk=40)
    strategy = draftwood_strategies.create("trie")
    added: list[Sequence] = []
    cancelled: set[Sequence] = set()
    for i in range(12):
        # Few beginnings, so that many prompts share a prefix with an earlier one.
        first, rest = data.draw(st.tuples(st.integers(1, 3), st.lists(st.integers(0, 9), min_size=1, max_size=30)))
        prompt, stop = as_prompt([first] * 33 + rest), StopParams(data.draw(st.integers(1, 90)))
        tenant, priority = data.draw(st.sampled_from("ab")), data.draw(st.integers(-1, 1))
        added.append(
            make_sequence(
                str(i), prompt, stop, strategy=strategy, max_draft_nodes=NODES, tenant=tenant, priority=priority
            )
        )
        engine.add(added[-1])
        for _ in range(data.draw(st.integers(0, 12))):
            engine.step()
            engine.check()
        if data.draw(st.integers(0, 3)) == 0:
            cancelled.add(added[data.draw(st.integers(0, i))])
            for sequence in cancelled:
                engine.cancel(sequence)
            engine.check()
    finish(engine)
    for sequence in added:
        expected = greedy(family, tuple(sequence.request.prompt.tolist()), sequence.request.stop.max_tokens)
        if sequence in cancelled:
            assert sequence.output == expected[: len(sequence.output)]
        else:
            assert sequence.output == expected


@pytest.mark.system
def test_sampling_penalties_and_stop_strings_survive_a_preemption() -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2)

    def outputs(**options: Any) -> tuple[list[Sequence], dict[Sequence, tuple[str, list[float]]]]:
        engine = engine_of("bundled", max_draft_nodes=8, **options)
        prompts = [served("bundled").tokenizer.encode(f"question {i}: where is my order") for i in range(4)]
        sequences = [
            make_sequence(
                str(i),
                prompt,
                StopParams(220, ignore_eos=True, strings=("no such text",)),
                SamplingParams(**{**_fields(sampling), "seed": i}),
                strategy=draftwood_strategies.create("trie"),
                max_draft_nodes=8,
            )
            for i, prompt in enumerate(prompts)
        ]
        written: dict[Sequence, tuple[str, list[float]]] = {s: ("", []) for s in sequences}
        for sequence in sequences:
            engine.add(sequence)
        while engine.has_work:
            for output in engine.step():
                text, logprobs = written[output.sequence]
                written[output.sequence] = (
                    text + "".join(output.texts),
                    logprobs + [entry.logprob for entry in output.logprobs],
                )
            engine.check()
        return sequences, written

    plenty, free = outputs()
    scarce, short = outputs(kv_cache_tokens=530)
    assert sum(s.stats.preemptions for s in plenty) == 0
    assert sum(s.stats.preemptions for s in scarce) > 0
    assert [s.output for s in scarce] == [s.output for s in plenty]
    for a, b in zip(plenty, scarce, strict=True):
        assert free[a][0] == short[b][0]
        assert free[a][1] == pytest.approx(short[b][1], abs=1e-3)


def _fields(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in SamplingParams.__slots__}


def test_a_grammar_survives_a_preemption() -> None:
    model = served("bundled")
    engine = engine_of("bundled", kv_cache_tokens=520, max_draft_nodes=8)
    prompt = model.tokenizer.encode("list numbers")
    sequences = [
        make_sequence(
            str(i),
            prompt,
            StopParams(400),
            max_draft_nodes=8,
            grammar=model.grammars.compile(GrammarKind.REGEX, "(one two three four five six ){30}end"),
        )
        for i in range(3)
    ]
    for sequence in sequences:
        engine.add(sequence)
    finish(engine)
    assert sum(s.stats.preemptions for s in sequences) > 0
    for sequence in sequences:
        assert model.tokenizer.decode(sequence.output).strip() == ("one two three four five six " * 30 + "end")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding", "phi"])
def test_each_turn_of_a_chat_reuses_the_turns_before(family: str) -> None:
    engine = engine_of(family)
    strategy = draftwood_strategies.create("trie")
    chat: tuple[int, ...] = (5, 3) * 12
    for turn in range(4):
        sequence = answer(engine, chat, 15, strategy=strategy, tenant="a")
        assert sequence.output == greedy(family, chat, 15)
        # All full pages but for the last token written, whose keys and values nobody needed, and the user's new words.
        assert sequence.stats.cached_prompt_tokens == (0 if turn == 0 else (len(chat) - 1 - 8) // PAGE_SIZE * PAGE_SIZE)
        chat = (*chat, *sequence.output, *range(turn, turn + 8))


def test_another_tenants_prompt_is_never_reused() -> None:
    engine = engine_of()
    prompt = (7, 2) * 75
    first, again = (answer(engine, prompt, 9, tenant="a") for _ in range(2))
    other = answer(engine, prompt, 9, tenant="b")
    assert first.output == again.output == other.output == greedy("llama", prompt, 9)
    assert [s.stats.cached_prompt_tokens for s in (first, again, other)] == [0, 144, 0]


def test_without_the_prefix_cache_nothing_is_reused() -> None:
    engine = engine_of(prefix_cache=False)
    for _ in range(2):
        assert answer(engine, (7, 2) * 40, 9).stats.cached_prompt_tokens == 0


def test_prefixes_are_right_after_eviction() -> None:
    engine = engine_of(kv_cache_tokens=CONTEXT + NODES)
    reused = 0
    for round_ in range(3):
        for first in (1, 2, 3, 3):
            prompt = (first, 6) * 30 + (round_,)
            sequence = answer(engine, prompt, 9)
            assert sequence.output == greedy("llama", prompt, 9)
            reused += sequence.stats.cached_prompt_tokens > 0
    assert 0 < reused < 12


@pytest.mark.parametrize("runner", ["torch", "openvino"])
def test_samples_of_one_prompt_share_its_prefill(runner: str) -> None:
    engine = engine_of(runner=runner, prefill_chunk=64, shared_prefill_chunk=64)
    prompt, shared = as_prompt((4, 1, 1) * 50), {"torch": 144, "openvino": 128}[runner]
    samples = [make_sequence(str(i), prompt, StopParams(10), SamplingParams(temperature=1.0, seed=i)) for i in range(5)]
    for sample in samples:
        engine.add(sample)
    finish(engine)
    assert [s.stats.cached_prompt_tokens for s in samples] == [0, shared, shared, shared, shared]
    for i, sample in enumerate(samples):
        alone = make_sequence("r", prompt, StopParams(10), SamplingParams(temperature=1.0, seed=i))
        engine = engine_of(runner=runner, prefix_cache=False)
        engine.add(alone)
        finish(engine)
        assert sample.output == alone.output


def test_a_long_prompt_is_read_beside_those_who_write() -> None:
    engine = engine_of(prefill_chunk=100, shared_prefill_chunk=16)
    writer = make_sequence("writer", as_prompt((1, 2)), StopParams(60))
    engine.add(writer)
    engine.step()
    reader = make_sequence("reader", as_prompt((3, 4) * 100), StopParams(2))
    engine.add(reader)
    steps = 0
    while not reader.output:
        assert writer in [output.sequence for output in engine.step()]
        steps += 1
    assert steps == -(-200 // 16)
    finish(engine)


def test_a_failed_step_leaves_no_prefix_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(prefill_chunk=20)
    prompt = (8, 2) * 20
    engine.add(make_sequence("r", as_prompt(prompt), StopParams(9)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch_factory(engine.model).module, "forward", lambda **_: 1 / 0)
        finish(engine)
    sequence = answer(engine, prompt, 9)
    assert sequence.stats.cached_prompt_tokens == 0
    assert sequence.output == greedy("llama", prompt, 9)


def test_a_deadline_ends_a_sequence_with_its_error() -> None:
    engine = engine_of(max_running=1)
    late = make_sequence("late", as_prompt((1, 2)), StopParams(9), deadline=1.0)
    timely = make_sequence("timely", as_prompt((1, 2)), StopParams(9), deadline=1e12)
    engine.add(late)
    engine.add(timely)
    outputs = engine.step()
    [ending] = [output for output in outputs if output.sequence is late]
    assert ending.finish is not None
    assert ending.finish.reason is FinishReason.ERROR
    assert type(ending.finish.error).__name__ == "DeadlineError"
    engine.check()
    finish(engine)
    assert timely.output == greedy("llama", (1, 2), 9)
