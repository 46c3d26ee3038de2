"""Two services over one store, with traffic on both that faults of the store must not affect."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from draftwood.v1 import generation_pb2 as pb
from draftwood_memory import Memory, MemoryName
from tests.memory.helpers import until
from tests.service.fakes import FakeEngine, Served, answer, serving

TENANTS = ("a", "b.c", "A~")
_SLOWEST = 0.5
"""Seconds that a request of a few milliseconds may take, not counting those in which the machine stalls."""
_SLOWEST_ONCE = 3.0
"""The same for one moment of a test: a busy machine can hold up this process alone. Requests that wait for the store
are slow again and again.
"""


_WATCH = """
import time
while True:
    began = time.monotonic()
    time.sleep(0.005)
    ended = time.monotonic()
    if ended - began > 0.007:
        print(began + 0.005, ended, flush=True)
"""


class Stalls:
    """A process of its own that does nothing but wake up, and records when it woke too late. A context manager."""

    def __enter__(self) -> Self:
        self._notes = tempfile.TemporaryFile("a+b")
        self._process = subprocess.Popen([sys.executable, "-ISc", _WATCH], stdout=self._notes)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._notes.close()

    def between(self, began: float, ended: float) -> float:
        """Seconds that the machine kept it waiting between two readings of `time.monotonic`."""
        time.sleep(0.02)  # stalls that began before `ended` are recorded
        self._notes.seek(0)
        lines = self._notes.read().split(b"\n")[:-1]  # the last line may be incomplete
        late = [[float(value) for value in line.split()] for line in lines]
        return sum(max(0.0, min(ended, end) - max(began, start)) for start, end in late)


@dataclass
class Live:
    """Services under traffic.

    Attributes:
        slow: when requests that took too long began and ended, on the clock of `time.monotonic`.
        answered: requests that ended well; a failed one ends the test.
    """

    services: list[Served]
    slow: list[tuple[float, float]] = field(default_factory=list)
    answered: int = 0
    stopping: bool = False

    @property
    def memories(self) -> list[Memory]:
        return [served.memory for served in self.services]

    async def traffic(self, served: Served, draw: random.Random) -> None:
        while not self.stopping:
            began = time.monotonic()
            await self.ask(served, draw.choice(TENANTS), draw.randint(1, 60))
            if (ended := time.monotonic()) - began > _SLOWEST:
                self.slow.append((began, ended))
            await asyncio.sleep(0.03)

    async def ask(self, served: Served, tenant: str, tokens: int) -> None:
        request = pb.GenerateRequest(text="x", tenant=tenant, drafting=pb.DraftOptions(strategy="trie"))
        request.stop.max_tokens = tokens
        got = await answer(served.stub.GenerateStream(request))
        assert got.finished.usage.completion_tokens == tokens
        self.answered += 1

    def learned(self) -> int:
        return sum(memory.counters().learned for memory in self.memories)

    async def converged(self, seconds: float = 25.0, lossless: bool = True) -> None:
        """Stops the traffic and waits until each service has what the other learns, and all that was ever learned.

        Args:
            lossless: False if the store lost something; then what is learned from now on counts.
        """
        self.stopping = True
        await until(lambda: not any(memory.outbox.pending for memory in self.memories), seconds)
        for number, (served, other) in enumerate(zip(self.services, reversed(self.memories), strict=True)):
            for tenant in TENANTS:
                await self.ask(served, tenant, 50 + number)
                await until(partial(self._heard, other, tenant), seconds)
        assert not any(memory.counters().dropped for memory in self.memories)
        await until(lambda: not any(memory.thread.failing for memory in self.memories), seconds)
        if lossless:
            await until(lambda: all(self._records(memory) >= self.learned() for memory in self.memories), seconds)

    def _heard(self, memory: Memory, tenant: str) -> bool:
        """The memory has a record of another process that was learned since the traffic stopped."""
        memory.residents.open(MemoryName(tenant))  # in use
        lengths = [int(logged.record.tokens.size) for logged in memory.residents.open(MemoryName(tenant)).log]
        return any(length in (50, 51) for length in lengths[-4:])

    def _records(self, memory: Memory) -> int:
        return sum(len(memory.residents.open(MemoryName(tenant)).log) for tenant in TENANTS)


@asynccontextmanager
async def live(*urls: str, **settings: Any) -> AsyncIterator[Live]:
    """A service for each URL, with traffic, once all tenants' memories have records. On exit, asserts that no request
    has failed, and that none was slow but in one moment.
    """
    async with AsyncExitStack() as stack:
        stalls = stack.enter_context(Stalls())
        services = []
        for url in urls:
            engine = FakeEngine()
            values: dict[str, Any] = {"store": url, "store_timeout": 1.0, **settings}
            services.append(await stack.enter_async_context(serving(engine, **values)))
        running = Live(services)
        for served in services:
            await running.ask(served, TENANTS[0], 60)  # loads compiled functions before the traffic starts
        async with asyncio.TaskGroup() as tasks:
            for number, served in enumerate(services):
                tasks.create_task(running.traffic(served, random.Random(number)))
            await asyncio.sleep(0.5)
            await until(
                lambda: all(
                    len(memory.residents.open(MemoryName(tenant)).log)
                    for memory in running.memories
                    for tenant in TENANTS
                )
            )
            try:
                yield running
            finally:
                running.stopping = True
        assert running.answered > 10
        moments = [
            (began, ended, ended - began - stalls.between(began, ended)) for began, ended in sorted(running.slow)
        ]
        slow = [moment for moment in moments if moment[2] > _SLOWEST]
        once = all(began < slow[0][1] and took < _SLOWEST_ONCE for began, _, took in slow)
        assert once, f"slow requests: {slow}"
