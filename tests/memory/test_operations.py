"""Operators' operations on the memory thread, with a store in this process."""

from __future__ import annotations

import asyncio
import math
import pickle
from collections.abc import Iterator

import numpy as np
import pytest

from draftwood_model_runner.request import MemoryTerms






    ExportMemory,
    FillMemory,
    FillProgress,
    GetStatistics,
    MemoryOperation,
    PurgeMemory,
    submit,
)



from tests.service.fakes import until
from tests.memory.helpers import FINGERPRINT, log_of, numbers, perform

NAME = MemoryName("t")


@pytest.fixture
def memory() -> Iterator[MemoryManager]:
    """Its memories hold two records, and their logs are full after one."""
    config = MemoryConfig(bytes=320, round_seconds=0.01)
    memory = MemoryManager(InProcessStore(Limits(1), shared=True), FINGERPRINT, config)
    memory.start(lambda task: task())
    yield memory
    memory.stop()


def fill(progress: FillProgress, count: int = 10) -> FillMemory:
    return FillMemory(NAME, Kind.CORPUS, [np.array(numbers(count), np.int32)], progress, MemoryTerms())


async def filled(memory: MemoryManager) -> FillProgress:
    """A memory with a full log that this process cannot fold, since another one has the lease."""
    assert await memory.store.lease(memory.naming.tag(NAME), "another process", math.inf)
    return await perform(fill(FillProgress()), memory)


def release_lease(memory: MemoryManager) -> None:
    store = memory.store
    assert isinstance(store, InProcessStore)
    store._leases.clear()


async def test_rounds_and_other_operations_go_on_while_a_full_log_is_waited_for(
    memory: MemoryManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_SECONDS", 3600.0)
    progress = await filled(memory)
    waiting = submit(fill(progress), memory)
    report = await perform(GetStatistics("t"), memory)
    assert [(one.name, one.stored.tokens, one.resident) for one in report.memories] == [(NAME, 10, True)]
    polls = memory.counters().polls
    await until(lambda: memory.counters().polls > polls + 2)
    assert not waiting.done()
    await asyncio.to_thread(memory.stop)
    assert waiting.cancelled()


async def test_a_fill_ends_once_the_log_is_folded(memory: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_SECONDS", 0.005)
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_TRIES", 10**6)
    progress = await filled(memory)
    waiting = submit(fill(progress, 7), memory)
    await perform(GetStatistics(None), memory)
    assert not waiting.done()
    release_lease(memory)
    done = await asyncio.wrap_future(waiting)
    assert (done.source, done.epoch, done.records, done.tokens) == (progress.source, 0, 2, 17)
    assert [record.tokens.size for record in await perform(ExportMemory(NAME), memory)] == [10, 7]


async def test_a_log_that_stays_full_ends_the_fill(memory: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_SECONDS", 0.0)
    progress = await filled(memory)
    with pytest.raises(StoreFullError):
        await perform(fill(progress), memory)
    assert memory.residents.open(NAME).pins == 0
    assert log_of(memory, "t") == [numbers(10)]


async def test_a_purge_ends_the_fill_that_it_interrupts(memory: MemoryManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_SECONDS", 0.005)
    monkeypatch.setattr("draftwood_service.memory.operations._FULL_TRIES", 10**6)
    progress = await filled(memory)
    waiting = submit(fill(progress), memory)
    assert await perform(PurgeMemory("t"), memory) == PurgeResult(1, 10)
    with pytest.raises(MemoryPurgedError):
        await asyncio.wrap_future(waiting)
    assert (await perform(fill(FillProgress()), memory)).records == 1
    assert await perform(PurgeMemory("t"), memory) == PurgeResult(1, 10)


async def test_a_fill_of_nothing_reaches_no_store(memory: MemoryManager) -> None:
    empty = FillMemory(NAME, Kind.CORPUS, [np.empty(0, np.int32)], FillProgress(), MemoryTerms())
    assert await perform(empty, memory) == empty.progress
    assert NAME not in memory.residents


async def test_a_stopped_thread_runs_nothing(memory: MemoryManager) -> None:
    await asyncio.to_thread(memory.stop)
    with pytest.raises(StoreUnavailableError):
        await perform(GetStatistics(None), memory)


@pytest.mark.parametrize("operation", [GetStatistics("t"), ExportMemory(NAME), PurgeMemory("t"), fill(FillProgress())])
async def test_operations_and_their_results_can_be_sent(
    memory: MemoryManager, operation: MemoryOperation[object]
) -> None:
    result = await perform(pickle.loads(pickle.dumps(operation)), memory)
    assert type(pickle.loads(pickle.dumps(result))) is type(result)
