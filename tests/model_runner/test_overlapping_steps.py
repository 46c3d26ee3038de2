"""Steps of two halves in turn, one in flight while the host works on the other: no token changes, nothing leaks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import draftwood_strategies
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, ModelError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling import fair_queue as slot_limit
from draftwood_model_runner.sequence import Sequence
from recall_strategy import RecallStrategy
from tests.model_runner.families import VOCAB, greedy, served
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.overlapping import OverlappingRunner
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import batch_of, engine_of, make_sequence, run

NEW_TOKENS = 40
PROMPTS = tuple(tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 4 + 7 * i)) for i in range(6))


def overlapping(seed: int | None = None, **config: Any) -> tuple[Engine, OverlappingRunner]:
    """Steps have half of the sequences; with a seed, now and then all of them."""
    engine = engine_of(served("llama"), 8, max_running=4, prefill_chunk=16, **config)
    assert not engine._runner.is_asynchronous, "torch computes a step while it is called"
    runner, random = OverlappingRunner(engine._runner), np.random.default_rng(seed)
    patched: Any = engine
    patched._runner = runner

    def most(running: int) -> int | None:
        return None if seed is not None and random.random() < 0.2 else -(-running // 2)

    patched._microbatches.microbatch = most
    return engine, runner


def add_all(engine: Engine, strategy: Any, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> list[Sequence]:
    sequences = batch_of(prompts, StopParams(NEW_TOKENS), strategy=strategy, max_draft_nodes=8)
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def check_outputs(sequences: list[Sequence]) -> None:
    """Asserts that they are what transformers writes."""
    for sequence in sequences:
        assert sequence.output == greedy("llama", tuple(sequence.request.prompt.tolist()), NEW_TOKENS)


def oracle(seed: int) -> OracleStrategy:
    return OracleStrategy({prompt: greedy("llama", prompt, NEW_TOKENS) for prompt in PROMPTS}, VOCAB, seed)


@pytest.mark.parametrize("name", ["none", "trie", "recycling", "jacobi", "hybrid"])
def test_strategies(name: str) -> None:
    engine, runner = overlapping()
    sequences = add_all(engine, draftwood_strategies.create(name))
    run(engine)
    check_outputs(sequences)
    assert [sequence.stats.drafting_disabled_reason for sequence in sequences] == [""] * len(PROMPTS)
    assert all(step.waited for step in runner.begun)
    assert 0 < engine.counts.microbatches == engine.counts.steps


@pytest.mark.parametrize("seed", range(4))
def test_little_memory_pauses_and_whole_steps_between(seed: int) -> None:
    """What a sequence computed before it was preempted or paused is dropped."""
    engine, _ = overlapping(seed, kv_cache_tokens=264)
    sequences, random = add_all(engine, oracle(seed)), np.random.default_rng(seed)
    for _ in range(60):
        (engine.pause if random.random() < 0.4 else engine.resume)(sequences[random.integers(len(sequences))])
        engine.step()
        engine.check()
    for sequence in sequences:
        engine.resume(sequence)
    run(engine)
    check_outputs(sequences)
    assert sum(one.stats.accepted_tokens for one in sequences) > NEW_TOKENS
    assert sum(one.stats.pauses for one in sequences) > 3


def test_steps_that_read_prompts_tell_nothing_of_decoding() -> None:
    engine, _ = overlapping()
    observed: list[int] = []
    patched: Any = engine
    patched._microbatches.observe = lambda batch, seconds: observed.append(batch.size)
    add_all(engine, draftwood_strategies.create("none"), PROMPTS[3:5])
    run(engine)
    assert set(observed) == {1}
    assert engine.counts.steps > len(observed)


def test_cancelled_in_flight() -> None:
    engine, _ = overlapping()
    sequences = add_all(engine, oracle(1))
    while engine._in_flight is None or len(engine._in_flight.scheduled) < 2:
        engine.step()
    lost, *_ = engine._in_flight.sequences
    before = list(lost.output)
    engine.cancel(lost)
    engine.check()
    assert all(output.sequence is not lost for output in run(engine))
    assert lost.output == before
    check_outputs([sequence for sequence in sequences if sequence is not lost])


def test_another_run_of_a_sequence_in_flight() -> None:
    """It has its slot again before the step of its first run ends."""
    engine, _ = overlapping()
    sequences = add_all(engine, oracle(1), PROMPTS[:3])
    while engine._in_flight is None or not any(sequence.output for sequence in engine._in_flight.sequences):
        engine.step()
    lost = next(sequence for sequence in engine._in_flight.sequences if sequence.output)
    engine.pause(lost)
    engine.resume(lost)
    engine.step()
    assert lost.slot_generation == 2
    assert lost.committed == 0, "nothing was computed in the pages of its second run"
    run(engine)
    check_outputs(sequences)


def test_all_cancelled_in_flight() -> None:
    engine, _ = overlapping()
    for sequence in add_all(engine, oracle(1)):
        while engine._in_flight is None and engine.has_work:
            engine.step()
        engine.cancel(sequence)
    assert not engine.has_work
    sequences = add_all(engine, oracle(2), PROMPTS[:1])
    run(engine)
    check_outputs(sequences)


def test_a_sequence_that_the_host_chooses_for_is_not_left_in_flight() -> None:
    """The fake runner overwrites the logits of a step when another one begins."""
    engine, _ = overlapping()
    free = add_all(engine, oracle(3))
    bound = make_sequence("bound", PROMPTS[0], StopParams(NEW_TOKENS), grammar=RandomGrammar(VOCAB))
    run(engine, bound)
    check_outputs(free)
    again = make_sequence("alone", PROMPTS[0], StopParams(NEW_TOKENS), grammar=RandomGrammar(VOCAB))
    run(engine_of(served("llama"), 8), again)
    assert bound.output == again.output


def calls_of(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """By drafter, the calls of `propose` and `observe` that will be made, those for all drafters of a step included."""
    calls = dict[int, list[str]]()
    in_batches = hasattr(strategy, "propose_all")
    kind = type(strategy if in_batches else strategy.start(np.ones(3, np.int32)))

    def watch(call: str, name: str) -> None:
        given = getattr(kind, name)

        def watched(self: Any, *args: Any) -> Any:
            for drafter in args[0] if in_batches else [self]:
                calls.setdefault(id(drafter), []).append(call)
            return given(self, *args)

        watched.__name__ = name
        monkeypatch.setattr(kind, name, watched)

    watch("propose", next(name for name in ("propose_asking", "propose_all", "propose") if hasattr(kind, name)))
    watch("observe", "observe_all" if in_batches else "observe")
    return calls


@pytest.mark.parametrize("name", ["trie", "recycling", "jacobi", "hybrid", "recall"])
def test_a_draft_whose_step_was_not_computed_counts_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter is asked twice running then; `recall` is written as a third party would."""
    strategy: Any = RecallStrategy() if name == "recall" else draftwood_strategies.create(name)
    calls = calls_of(strategy, monkeypatch)
    engine, runner = overlapping()
    runner.begin_errors = [None] * 12 + [DeviceMemoryError("the device has no memory")]
    [sequence, *_] = sequences = add_all(engine, strategy, (PROMPTS[4],) * 2)
    run(engine)
    check_outputs(sequences)
    assert any(("propose", "propose") in itertools.pairwise(call) for call in calls.values())
    assert [one.stats.drafting_disabled_reason for one in sequences] == [""] * 2
    assert sequence.stats.draft_tokens > 0


def test_after_a_step_out_of_memory_more_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_limit, "_FIRST_PATIENCE", 3)
    engine, runner = overlapping()
    runner.begin_errors = [None] * 8 + [DeviceMemoryError("the device has no memory")]
    sequences = add_all(engine, oracle(4))
    running = []
    while engine.has_work:
        engine.step()
        engine.check()
        running.append(engine.running)
    check_outputs(sequences)
    assert sum(sequence.stats.preemptions for sequence in sequences) == 2
    failed = running.index(2)
    assert max(running[:failed]) == 4
    assert running[failed : failed + 6] == [2] * 6  # twice the patience
    assert 4 in running[failed:]


def test_an_error_ends_the_half_that_it_is_in() -> None:
    engine, runner = overlapping()
    runner.wait_errors = [None] * 9 + [RuntimeError("broken")]
    sequences = add_all(engine, oracle(5))
    failed = [output for output in run(engine) if output.finish is not None and output.finish.error is not None]
    assert 1 <= len(failed) <= 2
    assert all(isinstance(output.finish.error, ModelError) for output in failed if output.finish is not None)
    ended = {output.sequence for output in failed}
    check_outputs([sequence for sequence in sequences if sequence not in ended])


def test_a_lost_device_ends_the_engine() -> None:
    engine, runner = overlapping()
    runner.wait_errors = [None] * 5 + [DeviceLostError("lost")]
    add_all(engine, oracle(6))
    with pytest.raises(DeviceLostError, match="lost"):
        run(engine)


def test_closed_in_flight() -> None:
    engine, _ = overlapping()
    add_all(engine, oracle(7))
    while engine._in_flight is None:
        engine.step()
    engine.close()
    engine.check()
    assert not engine.has_work
