"""Two services over one store, with traffic on both that faults of the store must not affect."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from draftwood.v1 import generation_pb2 as pb


from tests.service.fakes import FakeEngine, Served, answer, serving, until
from tests.service.stalls import Stalls

TENANTS = ("a", "b:c", "{a}")
_SLOWEST = 0.5
"""Seconds that a request of a few milliseconds may take, not counting those in which the machine stalls."""
_SLOWEST_ONCE = 3.0
"""The same for one moment of a test: a busy machine can hold up this process alone. Requests that wait for the store
are slow again and again.
"""

Log = list[tuple[str, int, tuple[int, ...]]]


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
    def memories(self) -> list[MemoryManager]:
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
        got = await answer(served.stub.Generate(request))
        assert got.finished.usage.completion_tokens == tokens
        self.answered += 1

    def learned(self) -> int:
        return sum(memory.counters().learned for memory in self.memories)

    async def converged(self, seconds: float = 25.0) -> dict[str, Log]:
        """Stops the traffic and waits until both have the same records: all that were ever learned, once."""
        self.stopping = True
        deadline = time.monotonic() + seconds
        while True:
            logs = [{tenant: _log(memory, tenant) for tenant in TENANTS} for memory in self.memories]
            whole = sum(map(len, logs[0].values())) == self.learned()
            if logs[0] == logs[1] and whole and not any(memory.outbox.pending for memory in self.memories):
                break
            if time.monotonic() > deadline:
                sizes = [{tenant: len(log) for tenant, log in one.items()} for one in logs]
                pending = [memory.counters() for memory in self.memories]
                raise AssertionError(f"no agreement: {sizes}, learned {self.learned()}, {pending}")
            for memory in self.memories:
                for tenant in TENANTS:
                    memory.residents.open(MemoryName(tenant)).used_at = time.monotonic()
                    memory.residents.open(MemoryName(tenant)).checked_at = 0.0
            await asyncio.sleep(0.05)
        for log in logs[0].values():
            assert len({(source, seq) for source, seq, _ in log}) == len(log)
            for source in {entry[0] for entry in log}:
                counts = [seq for owner, seq, _ in log if owner == source]
                assert counts == sorted(counts)
        assert not any(memory.counters().dropped for memory in self.memories)
        return logs[0]


def _log(memory: MemoryManager, tenant: str) -> Log:
    resident = memory.residents.get(MemoryName(tenant))
    records = [] if resident is None else [*resident.log]
    return [(record.source, record.seq, tuple(record.tokens.tolist())) for record in records]


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
            await until(lambda: all(_log(memory, tenant) for memory in running.memories for tenant in TENANTS))
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
