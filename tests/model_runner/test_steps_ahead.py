"""Steps that begin while the one before is in flight, and are drafted for by the device: no token changes, nothing
leaks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DeviceMemoryError, ModelError
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.model_calls import setting
from draftwood_model_runner.sequence import Sequence, SequenceState
from draftwood_strategies import create
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.draft_device import DraftDevice
from draftwood_strategies.device.launching import LAUNCHER, Launch
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.draft_engine import guard
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepTimeCurve
from tests.model_runner.families import VOCAB, greedy, served
from tests.model_runner.overlapping import OverlappingRunner
from tests.model_runner.random_grammar import RandomGrammar
from tests.model_runner.sequences import batch_of, engine_of, make_sequence, run
from tests.model_runner.test_overlapping_steps import NEW_TOKENS, PROMPTS, check_outputs
from tests.strategies.fakes import Clock

RUNNING = 4
SIZES = DeviceSizes(rows=RUNNING, row_tokens=256, tenants=2, tenant_tokens=4096, nodes=8, contexts=1 << 12)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftDevice]:
    """One whose kernels are run by NumPy, which takes no time on the clock that drafts must pay by."""
    monkeypatch.setattr(guard, "time", Clock())
    with drafts_on_device(SIZES, "cpu") as device:
        assert device is not None
        yield device


def ahead(**config: Any) -> tuple[Engine, OverlappingRunner]:
    engine = engine_of(served("llama"), 8, max_running=RUNNING, prefill_chunk=16, **config)
    runner = OverlappingRunner(engine._runner)
    patched: Any = engine
    patched._runner = patched._following = runner
    return engine, runner


def sequences_of(
    strategy: Any, prompts: tuple[tuple[int, ...], ...] = PROMPTS, tokens: int = NEW_TOKENS
) -> list[Sequence]:
    return batch_of(prompts, StopParams(tokens), strategy=strategy, strategy_name="trie", max_draft_nodes=8)


def test_without_drafts() -> None:
    engine, runner = ahead()
    sequences = sequences_of(None)
    run(engine, *sequences)
    check_outputs(sequences)
    assert engine.counts.steps_ahead > NEW_TOKENS
    assert all(step.waited for step in runner.begun)


@pytest.mark.system
@pytest.mark.parametrize("name", ["trie", "recycling", "hybrid"])
def test_what_the_device_drafts_and_learns(name: str, device: DraftDevice) -> None:
    """The same tokens and memory as from steps that wait for the host, and drafts that are as good."""
    found, accepted = [], []
    for begins_ahead in (False, True):
        strategy = create(name)
        assert isinstance(strategy, DeviceStrategy)
        for _ in range(2):
            engine = (
                ahead()[0] if begins_ahead else engine_of(served("llama"), 8, max_running=RUNNING, prefill_chunk=16)
            )
            sequences = sequences_of(strategy, PROMPTS[:RUNNING])
            run(engine, *sequences)
            check_outputs(sequences)
            assert bool(engine.counts.steps_ahead) is begins_ahead
        learned = [run_[:NEW_TOKENS].tolist() for run_ in strategy.sequences()]
        found.append((sorted(learned), strategy.written))
        accepted.append(sum(one.stats.accepted_tokens for one in sequences))
        assert all(one.stats.proposed_tokens >= one.stats.draft_tokens > 0 for one in sequences)
    assert found[0] == found[1]
    assert accepted[1] >= 0.95 * accepted[0] > RUNNING * NEW_TOKENS // 2


@pytest.mark.parametrize(("most_tokens", "least_room", "most_room"), [(1.01, 6, 8), (64.0, 1, 3)])
def test_drafts_have_room_for_what_is_worth_its_time(
    most_tokens: float, least_room: int, most_room: int, device: DraftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 64 tokens take as long as one, for all; where each takes as long as a step, for the surest nodes."""
    strategy, rooms = create("trie"), list[int]()
    for _ in range(2):
        engine, runner = ahead()
        monkeypatch.setattr(
            engine._policy.drafts, "_times", MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: most_tokens}))
        )
        follow, rooms = runner.follow, list[int]()

        def noted(earlier: Any, following: Any, batch: StepBatch, samplers: Any) -> Any:
            if following.draft is not None:
                rooms.append(int(batch.size) - 1)  # noqa: B023
            return follow(earlier, following, batch, samplers)  # noqa: B023

        monkeypatch.setattr(runner, "follow", noted)
        [one] = sequences_of(strategy, PROMPTS[4:5])
        run(engine, one)
        check_outputs([one])
    assert len(rooms) > 3
    assert least_room <= sum(rooms[1:]) / len(rooms[1:]) <= most_room


@pytest.mark.system
@pytest.mark.parametrize("name", ["jacobi"])
def test_a_step_whose_drafts_the_host_makes_does_not_begin_ahead(name: str, device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = sequences_of(create(name))
    run(engine, *sequences)
    check_outputs(sequences)
    assert sum(one.stats.draft_tokens for one in sequences)
    assert engine.counts.steps_ahead < engine.counts.steps // 2


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed in (1, 2) else pytest.mark.system) for seed in range(4)]
)
def test_little_memory_arrivals_pauses_and_ends(seed: int, device: DraftDevice) -> None:
    """What a sequence computed before it was preempted, paused or cancelled is dropped."""
    engine, _ = ahead(kv_cache_tokens=264 if seed % 2 else None)
    random, strategies = np.random.default_rng(seed), [create("trie"), create(["trie", "hybrid"][seed % 2]), None]
    waiting = [
        make_sequence(str(i), PROMPTS[i % 6], StopParams(NEW_TOKENS), strategy=strategies[i % 3], max_draft_nodes=i % 9)
        for i in range(14)
    ]
    added, cancelled = list[Sequence](), set[Sequence]()
    while waiting or engine.has_work:
        if waiting and random.random() < 0.3:
            added.append(waiting.pop())
            engine.add(added[-1])
        if added and random.random() < 0.3:
            one = added[random.integers(len(added))]
            (engine.pause if random.random() < 0.5 else engine.resume)(one)
        if added and random.random() < 0.03:
            cancelled.add(added[random.integers(len(added))])
            engine.cancel([*cancelled][-1])
        engine.step()
        engine.check()
        if not waiting and random.random() < 0.5:
            for one in added:
                engine.resume(one)
    for one in added:
        engine.resume(one)
    run(engine)
    check_outputs([one for one in added if one.state is SequenceState.FINISHED and one not in cancelled])
    assert engine.counts.steps_ahead > 10
    assert not any(one.in_flight for one in added)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_short_answers(tokens: int, device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = sequences_of(create("trie"), tokens=tokens)
    run(engine, *sequences)
    for one in sequences:
        assert one.output == greedy("llama", tuple(one.request.prompt.tolist()), NEW_TOKENS)[:tokens]


def test_a_grammar_waits_for_the_host() -> None:
    engine, _ = ahead()
    free = sequences_of(None, PROMPTS[:2])
    bound = make_sequence("bound", PROMPTS[0], StopParams(NEW_TOKENS + 10), grammar=RandomGrammar(VOCAB))
    run(engine, *free, bound)
    check_outputs(free)
    again = make_sequence("alone", PROMPTS[0], StopParams(NEW_TOKENS + 10), grammar=RandomGrammar(VOCAB))
    run(engine_of(served("llama"), 8), again)
    assert bound.output == again.output


def test_another_strategy_in_the_middle(device: DraftDevice) -> None:
    engine, _ = ahead()
    sequences = sequences_of(create("trie"), PROMPTS[:2])
    for one in sequences:
        engine.add(one)
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
    [one] = sequences_of(strategy, PROMPTS[:1])
    engine.add(one)
    while not engine.counts.steps_ahead:
        engine.step()
    recorded = np.arange(1, 60, dtype=np.int32)
    strategy.learn(recorded)
    engine.step()
    engine.step()
    assert not strategy._to_import
    run(engine)
    check_outputs([one])
    assert any(learned.tolist() == recorded.tolist() for learned in strategy.sequences())


@pytest.mark.system
def test_a_step_that_cannot_begin_ahead_begins_later(device: DraftDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = ahead()
    follow, fails = runner.follow, iter([True, False, True, True] * 10)

    def failing(*arguments: Any) -> Any:
        if next(fails, False):
            raise DeviceMemoryError("the device has no memory")
        return follow(*arguments)

    monkeypatch.setattr(runner, "follow", failing)
    sequences = sequences_of(create("trie"), PROMPTS[:RUNNING])
    run(engine, *sequences)
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
        sequences = sequences_of(create(name), PROMPTS[:RUNNING])
        run(engine, *sequences)
    check_outputs(sequences)
    assert engine.counts.steps_ahead == 1
    assert sum("no step begins ahead" in record.message for record in caplog.records) == 1
    assert all("the kernel is broken" in one.stats.drafting_disabled_reason for one in sequences)


def test_an_error_ends_the_sequences_in_flight() -> None:
    engine, runner = ahead()
    runner.wait_errors = [None] * 9 + [RuntimeError("broken")]
    sequences = sequences_of(None, PROMPTS[:RUNNING])
    failed = [output for output in run(engine, *sequences) if output.finish is not None and output.finish.error]
    assert len(failed) == RUNNING
    assert all(isinstance(output.finish.error, ModelError) for output in failed if output.finish is not None)
    after = sequences_of(None, PROMPTS[:1])
    run(engine, *after)
    check_outputs(after)


def test_drafts_that_bring_nothing_pause_and_steps_still_begin_ahead(
    device: DraftDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node takes as long as a step, and the prompt shows nothing of the answer."""
    engine, runner = ahead()
    monkeypatch.setattr(engine._policy.drafts, "_times", MeasuredStepTimes(StepTimeCurve({1: 1.0, 64: 64.0})))
    follow, drafted = runner.follow, list[bool]()

    def noted(earlier: Any, following: Any, batch: StepBatch, samplers: Any) -> Any:
        drafted.append(following.draft is not None)
        return follow(earlier, following, batch, samplers)

    monkeypatch.setattr(runner, "follow", noted)
    [one] = sequences_of(create("trie"), PROMPTS[3:4])
    run(engine, one)
    check_outputs([one])
    assert True in drafted
    assert False in drafted
    assert engine.counts.steps_ahead > engine.counts.steps // 2


def test_closed_in_flight() -> None:
    engine, _ = ahead()
    for one in sequences_of(None):
        engine.add(one)
    while not engine.counts.steps_ahead:
        engine.step()
    engine.close()
    engine.check()
    assert not engine.has_work
