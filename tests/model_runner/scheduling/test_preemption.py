"""Real models with too little memory: preemption and reuse of prefixes change no token, and pauses free what is held.

`test_hybrids` has arrivals, pauses and cancellations at any time, with an oracle for drafts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.output import FinishReason
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE
from draftwood_model_runner.sequence import Sequence, SequenceState
from tests.model_runner.beside import NAMES as MODEL_DRAFTS
from tests.model_runner.beside import assert_no_faults, create_beside, served_beside
from tests.model_runner.families import VOCAB, greedy, served, torch_factory, with_runners
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sampling.test_token_sampler import expected
from tests.model_runner.sequences import engine_of, make_sequence, run

PENALIZED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=3)

CONTEXT, NODES = 256, 24
"""The random families' context, and a cap on drafts: with both, the least memory that an engine takes."""


def engine_for(family: str = "llama", runner: str = "torch", max_draft_nodes: int = NODES, **options: Any) -> Engine:
    return engine_of(served(family, runner), max_draft_nodes, **{"max_running": 6, **options})


def answer(engine: Engine, prompt: tuple[int, ...], new_tokens: int, **options: Any) -> Sequence:
    sequence = make_sequence("r", prompt, StopParams(new_tokens), max_draft_nodes=NODES, **options)
    run(engine, sequence)
    return sequence


def crowd(family: str) -> tuple[list[Sequence], list[list[int]]]:
    """Six sequences, the first of which drafts nothing and each further one four nodes more, and their answers."""
    prompts = [tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 5 + 9 * i)) for i in range(6)]
    answers = {prompt: greedy(family, prompt, 120) for prompt in prompts}
    oracle = OracleStrategy(answers, VOCAB, seed=1)
    sequences = [
        make_sequence(str(i), prompt, StopParams(120), strategy=oracle, max_draft_nodes=4 * i)
        for i, prompt in enumerate(prompts)
    ]
    return sequences, list(answers.values())


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("family", "runner"), with_runners(["llama", "gemma2", "qwen2-sliding", "gpt-neox"], ["gpt-neox", "qwen2-sliding"])
)
def test_preempted_sequences_write_what_they_would_have_written(family: str, runner: str, prefix_cache: bool) -> None:
    options = {"kv_cache_tokens": CONTEXT + NODES, "prefix_cache": prefix_cache, "prefill_chunk": 50}
    sequences, answers = crowd(family)
    run(engine_for(family, runner, **options), *sequences)
    assert [s.output for s in sequences] == answers
    assert all(s.stats.drafting_disabled_reason == "" for s in sequences)
    assert sum(s.stats.accepted_tokens for s in sequences) > 100
    assert sum(s.stats.preemptions > 0 for s in sequences) >= 2


@pytest.mark.system
@pytest.mark.parametrize("name", ["trie", *MODEL_DRAFTS])
def test_sampling_penalties_and_stop_strings_survive_a_preemption(name: str) -> None:
    model = served_beside("bundled", "openvino") if name in MODEL_DRAFTS else served("bundled")
    sampling = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, logprobs=2)
    prompts = [served("bundled").tokenizer.encode(f"question {i}: where is my order") for i in range(4)]
    stop = StopParams(220, ignore_eos=True, strings=("no such text",))

    def written(nodes: int = 8, **options: Any) -> tuple[int, list[list[int]], list[str], list[list[float]]]:
        """Preemptions, and of each sequence its output, text and log-probabilities."""
        engine = engine_of(model, 8, max_running=6, **options)
        strategy = create_beside(engine, name)
        sequences = [
            make_sequence(str(i), prompt, stop, replace(sampling, seed=i), strategy=strategy, max_draft_nodes=nodes)
            for i, prompt in enumerate(prompts)
        ]
        outputs = run(engine, *sequences)
        assert_no_faults(sequences)
        assert (sum(sequence.stats.draft_tokens for sequence in sequences) > 0) == (nodes > 0)
        own = [[output for output in outputs if output.sequence is sequence] for sequence in sequences]
        texts = ["".join("".join(output.texts) for output in one) for one in own]
        logprobs = [[entry.logprob for output in one for entry in output.logprobs] for one in own]
        return sum(s.stats.preemptions for s in sequences), [s.output for s in sequences], texts, logprobs

    plain, plenty, scarce = written(nodes=0), written(), written(kv_cache_tokens=530)
    assert plenty[0] == 0 < scarce[0]
    assert plain[1:3] == plenty[1:3] == scarce[1:3]
    for one, other in zip(plain[3] + plain[3], plenty[3] + scarce[3], strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_a_grammar_survives_a_preemption() -> None:
    model = served("bundled")
    prompt, grammar = model.tokenizer.encode("list numbers"), "(one two three four five six ){30}end"
    compiled = [model.grammars.compile(GrammarKind.REGEX, grammar) for _ in range(3)]
    sequences = [make_sequence("r", prompt, StopParams(400), max_draft_nodes=8, grammar=one) for one in compiled]
    run(engine_for("bundled", kv_cache_tokens=520, max_draft_nodes=8), *sequences)
    assert sum(s.stats.preemptions for s in sequences) > 0
    for sequence in sequences:
        assert model.tokenizer.decode(sequence.output).strip() == ("one two three four five six " * 30 + "end")


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral-sliding", "phi"])
@pytest.mark.parametrize("name", ["trie", "draft_model"])
def test_each_turn_of_a_chat_reuses_the_turns_before(family: str, name: str) -> None:
    engine = engine_of(served_beside(family), NODES)
    strategy = create_beside(engine, name)
    chat: tuple[int, ...] = (5, 3) * 12
    for turn in range(4):
        sequence = answer(engine, chat, 15, strategy=strategy, tenant="a")
        assert_no_faults([sequence])
        assert sequence.output == greedy(family, chat, 15)
        # All full pages but for the last token written, whose keys and values nobody needed, and the user's new words.
        assert sequence.stats.cached_prompt_tokens == (0 if turn == 0 else (len(chat) - 1 - 8) // PAGE_SIZE * PAGE_SIZE)
        chat = (*chat, *sequence.output, *range(turn, turn + 8))


def test_another_tenants_prompt_is_never_reused() -> None:
    engine = engine_for()
    prompt = (7, 2) * 75
    first, again = (answer(engine, prompt, 9, tenant="a") for _ in range(2))
    other = answer(engine, prompt, 9, tenant="b")
    assert first.output == again.output == other.output == greedy("llama", prompt, 9)
    assert [s.stats.cached_prompt_tokens for s in (first, again, other)] == [0, 144, 0]


@pytest.mark.parametrize("runner", ["torch", "openvino"])
def test_samples_of_one_prompt_share_its_prefill(runner: str) -> None:
    engine = engine_for(runner=runner, prefill_chunk=64, shared_prefill_chunk=64)
    prompt, shared = (4, 1, 1) * 50, {"torch": 144, "openvino": 128}[runner]
    samples = [make_sequence(str(i), prompt, StopParams(10), SamplingParams(temperature=1.0, seed=i)) for i in range(5)]
    run(engine, *samples)
    assert [s.stats.cached_prompt_tokens for s in samples] == [0, shared, shared, shared, shared]
    for i, sample in enumerate(samples):
        alone = make_sequence("r", prompt, StopParams(10), SamplingParams(temperature=1.0, seed=i))
        run(engine_for(runner=runner, prefix_cache=False), alone)
        assert sample.output == alone.output


def test_a_failed_step_leaves_no_prefix_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(prefill_chunk=20)
    prompt = (8, 2) * 20
    engine.add(make_sequence("r", prompt, StopParams(9)))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(torch_factory(engine.model).module, "forward", lambda **_: 1 / 0)
        run(engine)
    sequence = answer(engine, prompt, 9)
    assert sequence.stats.cached_prompt_tokens == 0
    assert sequence.output == greedy("llama", prompt, 9)


def test_a_deadline_ends_a_sequence_with_its_error() -> None:
    engine = engine_for(max_running=1)
    late = make_sequence("late", (1, 2), StopParams(9), deadline=1.0)
    timely = make_sequence("timely", (1, 2), StopParams(9), deadline=1e12)
    engine.add(late)
    engine.add(timely)
    outputs = engine.step()
    [ending] = [output for output in outputs if output.sequence is late]
    assert ending.finish is not None
    assert ending.finish.reason is FinishReason.ERROR
    assert type(ending.finish.error).__name__ == "DeadlineError"
    run(engine)
    assert timely.output == greedy("llama", (1, 2), 9)


@pytest.mark.parametrize(("family", "runner"), with_runners(["llama", "gemma2"], ["llama"]))
@pytest.mark.parametrize(
    ("sampling", "kv_cache_tokens", "prefix_cache"), [(SamplingParams(), 264, True), (PENALIZED, 464, False)]
)
@pytest.mark.parametrize("name", ["trie", "draft_model", "hybrid"])
def test_pauses_change_no_token(
    family: str, runner: str, name: str, sampling: SamplingParams, kv_cache_tokens: int, prefix_cache: bool
) -> None:
    options = {"prefill_chunk": 20, "kv_cache_tokens": kv_cache_tokens, "prefix_cache": prefix_cache}
    engine = engine_of(served_beside(family, runner), 8, max_running=2, **options)
    random = np.random.default_rng(kv_cache_tokens)
    strategy, stop = create_beside(engine, name), StopParams(60)
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
    assert [sequence.output for sequence in sequences] == [
        expected(family, prompt, sampling, stop) for prompt in prompts
    ]
    assert sum(sequence.stats.pauses for sequence in sequences) >= 3
    assert_no_faults(sequences)


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
    assert [other.state for other in others] == [SequenceState.FINISHED] * 2
    engine.cancel(paused[0])
    engine.check()
    engine.close()
    engine.check()
    assert {one.state for one in paused} == {SequenceState.FINISHED}
