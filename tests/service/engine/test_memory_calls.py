"""Operations on memories across the link: results, errors, cancellation, and the end of the engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from draftwood_memory.errors import StoreFullError
from draftwood_memory.memory import Memory
from draftwood_model_runner.errors import EngineStoppedError
from draftwood_service.errors import ShuttingDownError
from tests.service.engine.test_bridge import running, sample
from tests.service.fakes import FakeEngine


@dataclass(frozen=True)
class Raise:
    """An operation that fails."""

    error: Exception

    async def run(self, memory: Memory) -> None:
        raise self.error


@dataclass(frozen=True)
class Hang:
    """An operation that does not end."""

    async def run(self, memory: Memory) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True)
class Reply:
    """An operation with a result."""

    value: int

    async def run(self, memory: Memory) -> int:
        return self.value


async def test_operations_on_memories_return_or_raise_across_the_link() -> None:
    async with running(FakeEngine()) as bridge:
        assert await asyncio.gather(*(bridge.run_operation(Reply(value)) for value in range(5))) == [0, 1, 2, 3, 4]
        with pytest.raises(StoreFullError, match="no space"):
            await bridge.run_operation(Raise(StoreFullError("no space")))
        cancelled = asyncio.create_task(bridge.run_operation(Hang()))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await bridge.run_operation(Reply(6)) == 6
    with pytest.raises(EngineStoppedError):
        await bridge.run_operation(Reply(7))


@pytest.mark.parametrize(("dies", "error"), [(True, EngineStoppedError), (False, ShuttingDownError)])
async def test_operations_end_with_the_engine_or_the_bridge(dies: bool, error: type[Exception]) -> None:
    engine = FakeEngine()
    async with running(engine) as bridge:
        waiting = asyncio.create_task(bridge.run_operation(Hang()))
        await asyncio.sleep(0)
        if dies:
            engine.step_error = RuntimeError("dead")
            stream = bridge.admit()
            stream.submit(sample())
        else:
            await bridge.close()
        with pytest.raises(error):
            await waiting
        if dies:
            stream.close()
