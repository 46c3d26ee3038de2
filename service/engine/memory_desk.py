"""What operators ask of memories, across the link: `RemoteMemory` asks, `MemoryDesk` beside the engine answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

from service.engine.link import Answer, Ask, portable
from service.memory import MemoryName, TenantMemory
from service.memory.admin import Intake, MemoryAdmin, MemoryFacts
from service.memory.codec.records import Kind, Record
from service.memory.replica.counters import MemoryCounters
from strategies.draft import Int32Array


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """The memories of a process as a whole.

    Attributes:
        store: where they rest, without passwords.
        healthy: the store answers.
    """

    store: str
    healthy: bool
    counters: MemoryCounters


class MemoryDesk:
    """Answers questions on a thread of its own.

    Args:
        send: brings an answer to who asked; may raise EOFError.
    """

    def __init__(self, memory: TenantMemory, send: Callable[[Answer], None]) -> None:
        self._memory = memory
        self._admin = MemoryAdmin(memory)
        self._send = send
        self._intakes: dict[int, Intake] = {}
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "statistics": self._admin.statistics,
            "export": self._admin.export,
            "purge": self._admin.purge,
            "summary": self._summary,
            "fill": self._fill,
            "filled": self._filled,
        }

    def handle(self, ask: Ask) -> None:
        """Answers later. From one thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="memory-desk", daemon=True)
            self._thread.start()
        future = asyncio.run_coroutine_threadsafe(self._call(ask), self._loop)
        future.add_done_callback(lambda done: self._answer(ask.number, done))

    def close(self) -> None:
        """Answers nothing any more."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _call(self, ask: Ask) -> Any:
        return await self._methods[ask.method](*ask.arguments)

    def _answer(self, number: int, done: Future[Any]) -> None:
        error = done.exception()
        answer = Answer(number, None, portable(error)) if error else Answer(number, done.result(), None)
        with suppress(EOFError):
            self._send(answer)

    async def _summary(self) -> MemorySummary:
        memory = self._memory
        return MemorySummary(memory.store.shown, memory.thread.healthy, memory.counters())

    async def _fill(self, key: int, name: MemoryName, kind: Kind, sequences: list[Int32Array]) -> tuple[int, int]:
        intake = self._intakes.get(key)
        if intake is None:
            intake = self._intakes[key] = self._admin.intake(name)
        await intake.add(kind, sequences)
        return intake.records, intake.tokens

    async def _filled(self, key: int) -> None:
        self._intakes.pop(key, None)


class RemoteMemory:
    """Operators' view of the memories beside the engine. Every method may raise `MemoryStoreError`.

    Args:
        ask: calls a method of the desk.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]]) -> None:
        self._ask = ask
        self._keys = count()

    async def statistics(self, tenant: str | None) -> list[MemoryFacts]:
        """Of one tenant or all, those written to last first; without those that were purged or cannot be read."""
        found: list[MemoryFacts] = await self._ask("statistics", tenant)
        return found

    async def export(self, name: MemoryName) -> list[Record]:
        """All that a memory holds, the oldest first."""
        records: list[Record] = await self._ask("export", name)
        return records

    async def purge(self, tenant: str) -> tuple[int, int]:
        """Empties a tenant's memories; returns how many, and how many tokens they held in the store."""
        purged: tuple[int, int] = await self._ask("purge", tenant)
        return purged

    async def summary(self) -> MemorySummary:
        summary: MemorySummary = await self._ask("summary")
        return summary

    def intake(self, name: MemoryName) -> RemoteIntake:
        """For filling a memory. An async context manager."""
        return RemoteIntake(self._ask, next(self._keys), name)


class RemoteIntake:
    """Fills one memory, as `service.memory.admin.Intake`.

    Attributes:
        records, tokens: what the store has confirmed so far.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], key: int, name: MemoryName) -> None:
        self._ask = ask
        self._key = key
        self._name = name
        self.records = 0
        self.tokens = 0

    async def add(self, kind: Kind, sequences: list[Int32Array]) -> None:
        """Returns when the store has confirmed the sequences, int32[n] each.

        Raises:
            MemoryPurgedError: the memory was purged since the first call.
            MemoryStoreError: the store failed; what came before this call is in it.
        """
        self.records, self.tokens = await self._ask("fill", self._key, self._name, kind, sequences)

    async def __aenter__(self) -> RemoteIntake:
        return self

    async def __aexit__(self, *error: object) -> None:
        with suppress(Exception):  # the link is down, and the intake gone with it
            await self._ask("filled", self._key)
