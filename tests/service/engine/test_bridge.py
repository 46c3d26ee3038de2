"""The bridge to an engine on a thread, and its streams, without gRPC."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from draftwood_memory.memory import Memory, StrategyUse
from draftwood_model_runner.errors import EngineStoppedError, InvalidValueError
from draftwood_model_runner.output import Finish, FinishReason, StepOutput
from draftwood_model_runner.request import Format, GrammarKind, Request, StopParams
from draftwood_model_runner.sequence import Grammar
from draftwood_service.engine.admission import Admission
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.link import Add, framed
from draftwood_service.engine.loaded import LoadedEngine
from draftwood_service.engine.stream import MAX_PART_TOKENS, Output, Sample, Stream
from draftwood_service.errors import QueueFullError, ReaderStalledError, ShuttingDownError
from draftwood_service.settings import Settings
from draftwood_strategies import Strategy, create
from draftwood_strategies.drafting import Drafting
from tests.service.engine_thread import EngineThread
from tests.service.fakes import FakeEngine, FakeGrammars, FakeModel, loaded_engine, until


def sample(max_tokens: int = 1000, tenant: str = "", strategy: str = "trie") -> Sample:
    prompt, stop = np.array([1, 2], np.int32), StopParams(max_tokens)
    drafting = Drafting(strategy, max_nodes=8)
    return Sample(Request(request_id="r", prompt=prompt, stop=stop, drafting=drafting, tenant=tenant))


def on_thread(
    engine: FakeEngine,
    model: FakeModel | None = None,
    interval: float = 0.0,
    on_memory: Callable[[Memory], None] | None = None,
) -> EngineThread:
    return EngineThread(lambda: loaded_engine(Settings(), model or FakeModel(), lambda: engine, on_memory), interval)


@asynccontextmanager
async def running(
    engine: FakeEngine, max_waiting: int = 2, runner: EngineThread | None = None
) -> AsyncIterator[EngineBridge]:
    bridge = EngineBridge(runner or on_thread(engine), max_running=engine.max_running, max_waiting=max_waiting)
    assert await bridge.start() == "info"
    try:
        yield bridge
    finally:
        engine.gate.set()
        assert await bridge.close()
        assert await bridge.close()
    assert engine.closed
    assert not engine.has_work
    assert not any(thread.name == "engine" for thread in threading.enumerate())


async def drained(stream: Stream) -> Output:
    """Everything until the finish."""
    everything = Output()
    while everything.finish is None:
        [pending] = await stream.take()
        everything.token_ids += pending.token_ids
        everything.finish = pending.finish
    return everything


async def test_only_the_first_output_the_last_and_a_new_request_do_not_wait_for_the_interval() -> None:
    class Engine(FakeEngine):
        """Waits after the first step with both requests."""

        def step(self) -> list[StepOutput]:
            before, outputs = self.most_running, super().step()
            if before < self.most_running == 2:
                self.gate.clear()
            return outputs

    engine = Engine(max_running=2)
    async with running(engine, 0, on_thread(engine, interval=3600.0)) as bridge:
        long, short = bridge.admit(), bridge.admit()
        long.submit(sample(1_000_000))
        [first] = await long.take()
        assert len(first.token_ids) == engine.tokens_per_step
        later = asyncio.create_task(long.take())
        await until(lambda: engine.steps > 10)
        await asyncio.sleep(0.02)
        assert not later.done()
        short.submit(sample(40))
        [more] = await later
        assert len(more.token_ids) >= 9 * engine.tokens_per_step
        [begun] = await short.take()
        engine.gate.set()
        [others] = await short.take()
        assert len(begun.token_ids) == engine.tokens_per_step
        assert (len(others.token_ids), others.finish) == (40 - engine.tokens_per_step, Finish(FinishReason.LENGTH))


def test_parts_are_bounded_and_lose_nothing() -> None:
    count = 2 * MAX_PART_TOKENS + 1
    pending = Output(0, 0, list(range(count)), ["x"] * count, [True] * count, Finish(FinishReason.STOP))
    parts = list(pending.parts())
    assert [len(part.token_ids) for part in parts] == [MAX_PART_TOKENS, MAX_PART_TOKENS, 1]
    assert [token for part in parts for token in part.token_ids] == pending.token_ids
    assert [part.finish for part in parts] == [None, None, pending.finish]
    only_an_end = Output(finish=Finish(FinishReason.STOP))
    assert [part.finish for part in only_an_end.parts()] == [only_an_end.finish]


def entered(admission: Admission, tenant: str, slots: int = 1) -> Stream:
    stream = Stream(admission.take_slots, admission.leave, slots, tenant)
    admission.enter(stream)
    return stream


async def test_a_tenant_that_holds_all_slots_gives_up_paused_requests_then_the_newest_that_have_not_begun() -> None:
    admission = Admission(2, 4, lambda tenant: 1.0)
    held = [entered(admission, "a") for _ in range(6)]
    for begun in held[:2]:
        begun.samples = (replace(sample(), completion_tokens=1),)
    held[0].paused = True
    with pytest.raises(QueueFullError):
        entered(admission, "a")
    others = [entered(admission, "b", 2), entered(admission, "b")]
    with pytest.raises(QueueFullError):  # four of six slots would be more than the other's
        entered(admission, "b")
    assert not any(stream.failed for stream in held)  # the others may still turn out to be invalid
    others[0].submit(sample(), sample())
    assert [stream.failed for stream in held] == [True, False, False, False, False, True]
    others[1].submit(sample())
    assert [stream.failed for stream in held] == [True, False, False, False, True, True]
    for stream, error in ((held[0], ReaderStalledError), (held[5], QueueFullError)):
        with pytest.raises(error):
            await stream.take()


def test_slots_that_nobody_gives_up_any_more_are_refused_when_a_request_is_submitted() -> None:
    admission = Admission(2, 0, lambda tenant: 1.0)
    held = [entered(admission, "a") for _ in range(2)]
    late = entered(admission, "b")
    for begun in held:
        begun.samples = (replace(sample(), completion_tokens=1),)
    with pytest.raises(QueueFullError):
        late.submit(sample())


def test_slots_are_shared_out_by_weight() -> None:
    admission = Admission(2, 6, {"a": 0.5, "b": 1.5}.__getitem__)
    first = [entered(admission, "a") for _ in range(8)]
    for stream in [entered(admission, "b") for _ in range(6)]:
        stream.submit(sample())
    assert sum(stream.failed for stream in first) == 6
    with pytest.raises(QueueFullError):
        entered(admission, "b")


async def test_a_format_is_compiled_beside_the_steps_of_others() -> None:
    class Grammars(FakeGrammars):
        def compile(self, kind: GrammarKind, text: str) -> Grammar:
            gate.wait()
            return super().compile(kind, text)

    gate, engine = threading.Event(), FakeEngine()
    async with running(engine, 2, on_thread(engine, FakeModel(grammars=Grammars()))) as bridge:
        streams = [bridge.admit() for _ in range(3)]
        formats = (Format(GrammarKind.REGEX, "x"), Format(GrammarKind.REGEX, "y"), None)
        for stream, chosen in zip(streams, formats, strict=True):
            stream.submit(Sample(replace(sample(40).request, format=chosen)))
        assert len((await drained(streams[2])).token_ids) == 40
        streams[0].close()
        gate.set()
        finish = (await drained(streams[1])).finish
        assert finish is not None
        assert isinstance(finish.error, InvalidValueError)


async def test_the_engine_learns_the_weight_of_a_tenant_with_its_requests() -> None:
    engine, weights = FakeEngine(), {"a": 5.0}

    @contextmanager
    def loaded() -> Iterator[LoadedEngine]:
        with loaded_engine(Settings(), FakeModel(), lambda: engine) as found:
            yield replace(found, weights=weights)

    async with running(engine, 2, EngineThread(loaded)) as bridge:
        for weight, expected in ((2.5, {"a": 2.5}), (1.0, {})):
            bridge.weight_of = {"a": weight}.__getitem__
            stream = bridge.admit(tenant="a")
            stream.submit(sample(4, tenant="a"))
            await drained(stream)
            stream.close()
            assert weights == expected


async def test_an_idle_engine_does_not_step() -> None:
    engine = FakeEngine()
    async with running(engine):
        await asyncio.sleep(0.02)
        assert engine.steps == 0


async def test_the_first_error_counts_unless_the_stream_has_ended() -> None:
    stream = Stream(lambda stream: None, lambda stream: None)
    stream.fail(ShuttingDownError())
    stream.fail(ValueError())
    with pytest.raises(ShuttingDownError):
        await stream.take()
    with pytest.raises(ShuttingDownError):
        stream.submit(sample())
    ended = Stream(lambda stream: None, lambda stream: None)
    ended.submit(sample())
    ended.put(Output(0, 0, [1], ["a"], [False], Finish(FinishReason.STOP)))
    ended.fail(ShuttingDownError())
    [pending] = await ended.take()
    assert pending.token_ids == [1]


async def test_an_engine_that_dies_ends_all_streams() -> None:
    stopped, engine = asyncio.Event(), FakeEngine()
    async with running(engine) as bridge:
        bridge.on_stopped = stopped.set
        streams = [bridge.admit() for _ in range(3)]
        not_submitted = bridge.admit()
        for stream in streams:
            stream.submit(sample(10**6))
            await stream.take()
        engine.step_error = RuntimeError("dead")
        bridge.admit().submit(sample())  # the others may be paused by now
        await stopped.wait()
        errors = []
        for stream in streams:
            with pytest.raises(EngineStoppedError) as error:
                await drained(stream)
            errors.append(error.value)
        assert len(set(map(id, errors))) == 3
        with pytest.raises(EngineStoppedError):
            not_submitted.submit(sample())
        with pytest.raises(EngineStoppedError):
            bridge.admit()
        assert bridge.stopped


async def test_an_engine_that_hangs_bounds_the_close() -> None:
    engine = FakeEngine()
    async with running(engine) as bridge:
        engine.gate.clear()
        stream = bridge.admit()
        stream.submit(sample())
        await until(lambda: engine.in_step)
        assert not await bridge.close(seconds=0.05)
        with pytest.raises(ShuttingDownError):
            await stream.take()


def test_a_service_that_has_ended_ends_the_engine() -> None:
    engine = FakeEngine()
    service, theirs = socket.socketpair()
    runner = on_thread(engine)
    runner.start(theirs)
    service.sendall(framed(Add(1, [sample(10**6).request])))
    while engine.steps < 3:
        time.sleep(0.001)
    service.close()
    assert runner.join(20.0)
    assert engine.closed
    assert not engine.has_work


async def test_an_error_that_cannot_be_pickled_keeps_its_text() -> None:
    class Local(Exception):
        pass

    engine = FakeEngine()
    async with running(engine) as bridge:
        found = []
        for engine.sequence_error in (Local("here"), InvalidValueError("f", 1, "it must be 2")):
            stream = bridge.admit()
            stream.submit(sample())
            finish = (await drained(stream)).finish
            assert finish is not None
            found.append(finish.error)
    unknown, typed = found
    assert isinstance(unknown, RuntimeError)
    assert str(unknown) == "Local: here"
    assert isinstance(typed, InvalidValueError)
    assert (typed.field, typed.value, typed.allowed) == ("f", 1, "it must be 2")


async def test_an_unknown_strategy_disables_drafting_only() -> None:
    async with running(FakeEngine()) as bridge:
        stream, one = bridge.admit(), sample(10, strategy="no such strategy")
        stream.submit(one)
        assert len((await drained(stream)).token_ids) == 10
        assert "no such strategy" in one.stats.drafting_disabled_reason


async def test_a_running_request_gets_the_strategy_whose_memory_was_loaded_late() -> None:
    """But for a sample whose drafter failed."""
    engine, callbacks = FakeEngine(), list[Callable[[Strategy], object]]()
    before, loaded = create("trie"), create("trie")

    def fetch(use: StrategyUse, on_loaded: Callable[[Strategy], object]) -> Strategy:
        callbacks.append(on_loaded)
        return before

    def late(memory: Memory) -> None:
        memory.fetch = fetch  # type: ignore[method-assign]

    async with running(engine, 2, on_thread(engine, on_memory=late)) as bridge:
        engine.gate.clear()
        stream = bridge.admit(2)
        stream.submit(sample(10), sample(10))
        await until(lambda: len(engine.added) == 2 and engine.in_step)
        assert [one.strategy for one in engine.added] == [before, before]
        engine.added[1].stats.drafting_disabled_reason = "it failed"
        callbacks[0](loaded)
        engine.gate.set()
        await until(lambda: not engine.has_work)
        assert [one.strategy for one in engine.added] == [loaded, before]


async def test_requests_that_end_before_their_memory_is_loaded() -> None:
    """One is cancelled meanwhile and never reaches the engine; the other begins once the memory is loaded."""
    engine, callbacks = FakeEngine(), list[Callable[[Strategy], object]]()

    def late(memory: Memory) -> None:
        memory.fetch = lambda use, on_loaded: callbacks.append(on_loaded)  # type: ignore[method-assign]

    async with running(engine, 2, on_thread(engine, on_memory=late)) as bridge:
        left, stayed = bridge.admit(), bridge.admit()
        left.submit(sample(10))
        stayed.submit(sample(10))
        await until(lambda: len(callbacks) == 2)
        left.close()
        for callback in callbacks:
            callback(create("none"))
        assert len((await drained(stayed)).token_ids) == 10
        for callback in callbacks:
            callback(create("none"))  # its memory was loaded after its end
        stayed.close()
        assert bridge.live == 0
