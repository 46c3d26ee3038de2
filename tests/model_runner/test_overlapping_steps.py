"""Steps in flight while the host works on others: two halves in turn, or begun ahead and drafted for by the device.

No token changes, nothing leaks. `test_lossless` has halves with every strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DeviceLostError, DeviceMemoryError, ModelError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.model_calls import setting
from draftwood_model_runner.scheduling import fair_queue as slot_limit
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies import create
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.draft_device import DraftDevice
from draftwood_strategies.device.launching import LAUNCHER, Launch
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.draft_engine import guard
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepTimeCurve
from recall_strategy import RecallStrategy
from tests.model_runner.families import VOCAB, greedy, served
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.overlapping import OverlappingRunner, overlap_ahead, overlap_halves
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import batch_of, engine_of, make_sequence, run
from tests.strategies.fakes import Clock

NEW_TOKENS, RUNNING = 40, 4
PROMPTS = tuple(tuple(int(t) for t in np.random.default_rng(i).integers(0, 9, 4 + 7 * i)) for i in range(6))
SIZES = DeviceSizes(rows=RUNNING, row_tokens=256, tenants=2, tenant_tokens=4096, nodes=8, contexts=1 << 12)
Begin: TypeAlias = Callable[[Engine], OverlappingRunner]
BOTH_WAYS = pytest.mark.parametrize("begin", [overlap_halves, overlap_ahead])


def engine_for(**config: Any) -> Engine:
    return engine_of(served("llama"), 8, max_running=RUNNING, prefill_chunk=16, **config)


def halves() -> tuple[Engine, OverlappingRunner]:
    engine = engine_for()
    return engine, overlap_halves(engine)


def ahead(**config: Any) -> tuple[Engine, OverlappingRunner]:
    engine = engine_for(**config)
    return engine, overlap_ahead(engine)


def added(engine: Engine, strategy: Any, prompts: tuple[tuple[int, ...], ...] = PROMPTS) -> list[Sequence]:
    sequences = batch_of(prompts, StopParams(NEW_TOKENS), strategy=strategy, strategy_name="trie", max_draft_nodes=8)
    for sequence in sequences:
        engine.add(sequence)
    return sequences


def oracle(seed: int) -> OracleStrategy:
    return OracleStrategy({prompt: greedy("llama", prompt, NEW_TOKENS) for prompt in PROMPTS}, VOCAB, seed)


def check_outputs(sequences: list[Sequence]) -> None:
    """Asserts that they are what transformers writes."""
    for sequence in sequences:
        assert sequence.output == greedy("llama", tuple(sequence.request.prompt.tolist()), NEW_TOKENS)


@BOTH_WAYS
def test_without_drafts(begin: Begin) -> None:
    engine = engine_for()
    runner = begin(engine)
    sequences = added(engine, None)
    run(engine)
    check_outputs(sequences)
    assert all(step.waited for step in runner.begun)
    assert engine.counts.steps_ahead + engine.counts.microbatches > NEW_TOKENS


@BOTH_WAYS
def test_a_sequence_that_the_host_chooses_for_is_not_left_in_flight(begin: Begin) -> None:
    """The fake runner overwrites the logits of a step when another one begins."""
    engine = engine_for()
    begin(engine)
    free = added(engine, None, PROMPTS[:2])
    bound, again = (
        make_sequence(name, PROMPTS[0], StopParams(NEW_TOKENS + 10), grammar=RandomGrammar(VOCAB))
        for name in ("bound", "alone")
    )
    run(engine, bound)
    check_outputs(free)
    run(engine_for(), again)
    assert bound.output == again.output


@BOTH_WAYS
def test_an_error_ends_the_sequences_in_flight(begin: Begin) -> None:
    engine = engine_for()
    runner = begin(engine)
    runner.wait_errors = [None] * 9 + [RuntimeError("broken")]
    sequences = added(engine, None, PROMPTS[:RUNNING])
    finishes = [(output.sequence, output.finish) for output in run(engine) if output.finish is not None]
    failed = {sequence: finish for sequence, finish in finishes if finish.error is not None}
    assert len(failed) == RUNNING if begin is overlap_ahead else 1 <= len(failed) <= RUNNING // 2
    assert all(isinstance(finish.error, ModelError) for finish in failed.values())
    check_outputs([sequence for sequence in sequences if sequence not in failed])
    after = added(engine, None, PROMPTS[:1])
    run(engine)
    check_outputs(after)


@BOTH_WAYS
def test_a_lost_device_ends_the_engine(begin: Begin) -> None:
    engine = engine_for()
    begin(engine).wait_errors = [None] * 5 + [DeviceLostError("lost")]
    added(engine, None)
    with pytest.raises(DeviceLostError, match="lost"):
        run(engine)


@BOTH_WAYS
def test_closed_in_flight(begin: Begin) -> None:
    engine = engine_for()
    begin(engine)
    added(engine, None)
    while engine._in_flight is None:
        engine.step()
    engine.close()
    engine.check()
    assert not engine.has_work


def test_steps_that_read_prompts_tell_nothing_of_decoding() -> None:
    engine, _ = halves()
    observed: list[int] = []
    patched: Any = engine
    patched._microbatches.observe = lambda batch, seconds: observed.append(batch.size)
    added(engine, None, PROMPTS[3:5])
    run(engine)
    assert set(observed) == {1}
    assert engine.counts.steps > len(observed)


def test_cancelled_in_flight() -> None:
    engine, _ = halves()
    sequences = added(engine, oracle(1))
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
    engine, _ = halves()
    sequences = added(engine, oracle(1), PROMPTS[:3])
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


@pytest.mark.parametrize("name", ["trie", "recycling", "jacobi", "hybrid", "recall"])
def test_a_draft_whose_step_was_not_computed_counts_for_nothing(name: str) -> None:
    """A drafter is asked twice running then; `recall` is written as a third party would."""
    engine, runner = halves()
    runner.begin_errors = [None] * 12 + [DeviceMemoryError("the device has no memory")]
    sequences = added(engine, RecallStrategy() if name == "recall" else create(name), (PROMPTS[4],) * 2)
    run(engine)
    check_outputs(sequences)
    assert runner.begin_errors == []
    assert [one.stats.drafting_disabled_reason for one in sequences] == [""] * 2
    assert sequences[0].stats.draft_tokens > 0


def test_after_a_step_out_of_memory_more_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_limit, "_FIRST_PATIENCE", 3)
    engine, runner = halves()
    runner.begin_errors = [None] * 8 + [DeviceMemoryError("the device has no memory")]
    sequences = added(engine, oracle(4))
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


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftDevice]:
    """One whose kernels are run by NumPy, which takes no time on the clock that drafts must pay by."""
    monkeypatch.setattr(guard, "time", Clock())
    with drafts_on_device(SIZES, "cpu") as device:
        assert device is not None
        yield device


@pytest.mark.parametrize("name", ["trie", "recycling", "hybrid"])
def test_what_the_device_drafts_and_learns(name: str, device: DraftDevice) -> None:
    """The same tokens and memory as from steps that wait for the host, and drafts that are as good."""
    found, accepted = [], []
    for begins_ahead in (False, True):
        strategy = create(name)
        assert isinstance(strategy, DeviceStrategy)
        for _ in range(2):
            engine = ahead()[0] if begins_ahead else engine_for()
            sequences = added(engine, strategy, PROMPTS[:RUNNING])
            run(engine)
            check_outputs(sequences)
            assert bool(engine.counts.steps_ahead) is begins_ahead
        learned = [run_[:NEW_TOKENS].tolist() for run_ in strategy.sequences()]
        found.append((sorted(learned), strategy.written))
        accepted.append(sum(one.stats.accepted_tokens for one in sequences))
        assert all(one.stats.proposed_tokens >= one.stats.draft_tokens > 0 for one in sequences)
    assert found[0] == found[1]
    assert accepted[1] >= 0.95 * accepted[0] > RUNNING * NEW_TOKENS // 2


def drafts_of_steps(engine: Engine, runner: OverlappingRunner, most_tokens: float) -> list[int | None]:
    """Room for drafts in the steps that will begin ahead, None without drafts, if 64 tokens take as long as so many."""
    patched: Any = engine
    patched._policy.drafts._times = MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: most_tokens}))
    follow, rooms = runner.follow, list[int | None]()

    def noted(earlier: Any, following: Any, batch: StepBatch, samplers: Any) -> Any:
        rooms.append(None if following.draft is None else int(batch.size) - 1)
        return follow(earlier, following, batch, samplers)

    patched._following.follow = noted
    return rooms


@pytest.mark.parametrize(("most_tokens", "least_room", "most_room"), [(1.01, 6, 8), (64.0, 1, 3)])
def test_drafts_have_room_for_what_is_worth_its_time(
    most_tokens: float, least_room: int, most_room: int, device: DraftDevice
) -> None:
    """Where 64 tokens take as long as one, for all; where each takes as long as a step, for the surest nodes."""
    strategy = create("trie")
    for _ in range(2):
        engine, runner = ahead()
        found = drafts_of_steps(engine, runner, most_tokens)
        sequences = added(engine, strategy, PROMPTS[4:5])
        run(engine)
        check_outputs(sequences)
    rooms = [room for room in found if room is not None]
    assert len(rooms) > 3
    assert least_room <= sum(rooms[1:]) / len(rooms[1:]) <= most_room


def test_drafts_that_bring_nothing_pause_and_steps_still_begin_ahead(device: DraftDevice) -> None:
    """Each node takes as long as a step, and the prompt shows nothing of the answer."""
    engine, runner = ahead()
    rooms = drafts_of_steps(engine, runner, most_tokens=64.0)
    sequences = added(engine, create("trie"), PROMPTS[3:4])
    run(engine)
    check_outputs(sequences)
    assert {room is None for room in rooms} == {True, False}
    assert engine.counts.steps_ahead > engine.counts.steps // 2


def test_a_step_whose_drafts_the_host_makes_does_not_begin_ahead(device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = added(engine, create("jacobi"))
    run(engine)
    check_outputs(sequences)
    assert sum(one.stats.draft_tokens for one in sequences)
    assert engine.counts.steps_ahead < engine.counts.steps // 2


@pytest.mark.parametrize("seed", [0, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_little_memory_arrivals_pauses_and_ends(seed: int, device: DraftDevice) -> None:
    """What a sequence computed before it was preempted, paused or cancelled is dropped."""
    engine, _ = ahead(kv_cache_tokens=264 if seed % 2 else None)
    random, strategies = np.random.default_rng(seed), [create("trie"), create(["trie", "hybrid"][seed % 2]), None]
    waiting = [
        make_sequence(str(i), PROMPTS[i % 6], StopParams(NEW_TOKENS), strategy=strategies[i % 3], max_draft_nodes=i % 9)
        for i in range(14)
    ]
    joined, cancelled = list[Sequence](), set[Sequence]()
    while waiting or engine.has_work:
        if waiting and random.random() < 0.3:
            joined.append(waiting.pop())
            engine.add(joined[-1])
        if joined and random.random() < 0.3:
            one = joined[random.integers(len(joined))]
            (engine.pause if random.random() < 0.5 else engine.resume)(one)
        if joined and random.random() < 0.03:
            cancelled.add(joined[random.integers(len(joined))])
            engine.cancel([*cancelled][-1])
        engine.step()
        engine.check()
        if not waiting and random.random() < 0.5:
            for one in joined:
                engine.resume(one)
    for one in joined:
        engine.resume(one)
    run(engine)
    check_outputs([one for one in joined if one.state is SequenceState.FINISHED and one not in cancelled])
    assert engine.counts.steps_ahead > 10
    assert not any(one.in_flight for one in joined)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_answers(tokens: int, device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = batch_of(PROMPTS, StopParams(tokens), strategy=create("trie"), max_draft_nodes=8)
    run(engine, *sequences)
    assert [one.output for one in sequences] == [greedy("llama", prompt, tokens) for prompt in PROMPTS]


def test_another_strategy_in_the_middle(device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = added(engine, create("trie"), PROMPTS[:2])
    while not engine.counts.steps_ahead:
        engine.step()
    for one, strategy in zip(sequences, (create("trie"), None), strict=True):
        one.strategy = strategy
    run(engine)
    check_outputs(sequences)


def test_what_comes_from_outside_is_learned_while_steps_begin_ahead(device: DraftDevice) -> None:
    engine, _ = ahead()
    strategy = create("trie")
    assert isinstance(strategy, DeviceStrategy)
    sequences = added(engine, strategy, PROMPTS[:1])
    while not engine.counts.steps_ahead:
        engine.step()
    recorded = np.arange(1, 60, dtype=np.int32)
    strategy.learn(recorded)
    engine.step()
    engine.step()
    assert not strategy._to_import
    run(engine)
    check_outputs(sequences)
    assert any(learned.tolist() == recorded.tolist() for learned in strategy.sequences())


def test_a_step_that_cannot_begin_ahead_begins_later(device: DraftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = ahead()
    follow, fails = runner.follow, iter([True, False, True, True] * 10)

    def failing(*arguments: Any) -> Any:
        if next(fails, False):
            raise DeviceMemoryError("the device has no memory")
        return follow(*arguments)

    monkeypatch.setattr(runner, "follow", failing)
    sequences = added(engine, create("trie"), PROMPTS[:RUNNING])
    run(engine)
    check_outputs(sequences)
    assert engine.counts.steps_ahead


@pytest.mark.parametrize(("name", "kernel"), [("trie", "draft"), ("trie", "learn"), ("hybrid", "mix")])
def test_after_another_error_no_step_begins_ahead(
    name: str, kernel: str, device: DraftDevice, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = ahead()

    def failing(launched: Launch) -> None:
        if launched.kernel == kernel and engine.counts.steps_ahead:
            raise RuntimeError("the kernel is broken")
        launched.run()

    with setting(LAUNCHER, failing):
        sequences = added(engine, create(name), PROMPTS[:RUNNING])
        run(engine)
    check_outputs(sequences)
    assert engine.counts.steps_ahead == 1
    assert sum("no step begins ahead" in record.message for record in caplog.records) == 1
    assert all("the kernel is broken" in one.stats.drafting_disabled_reason for one in sequences)
