"""Real models: what survives a preemption, who reuses which prefix, and that pauses free what is held.

`test_lossless` has preemptions and pauses with every strategy, `test_hybrids` with every kind of model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.torch.kv_cache import PAGE_SIZE
from draftwood_model_runner.sequence import Sequence, SequenceState
from tests.model_runner.beside import NAMES as MODEL_DRAFTS
from tests.model_runner.beside import assert_no_faults, create_beside, served_beside
from tests.model_runner.families import greedy, served, torch_factory
from tests.model_runner.sequences import engine_of, make_sequence, run

NODES = 24


def engine_for(runner: str = "torch", **options: Any) -> Engine:
    return engine_of(served("llama", runner), NODES, max_running=6, **options)


def answer(engine: Engine, prompt: tuple[int, ...], new_tokens: int, **options: Any) -> Sequence:
    sequence = make_sequence("r", prompt, StopParams(new_tokens), max_draft_nodes=NODES, **options)
    run(engine, sequence)
    return sequence


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
    tenants = ("a", "a", "b", "a\ud800", "a")  # UTF-8 has no bytes for one of these names
    answers = [answer(engine, prompt, 9, tenant=tenant) for tenant in tenants]
    assert [one.output for one in answers] == [greedy("llama", prompt, 9)] * len(tenants)
    assert [one.stats.cached_prompt_tokens for one in answers] == [0, 144, 0, 0, 144]


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
