"""Helpers of the memory's tests: outputs to learn, replicas, and a check that they agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from draftwood_service.memory.codec.encryption import KeyRing
from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.naming import MemoryName
from draftwood_service.memory.operations import MemoryOperation, submit
from draftwood_service.memory.replica.instances import InstanceKey
from draftwood_service.memory.store.base import MemoryStore
from draftwood_service.memory.store.redis_client import RedisClient, RedisTls
from draftwood_service.memory.store.redis_store import RedisStore

Result = TypeVar("Result")

FINGERPRINT = "f" * 16
FAST = MemoryConfig(round_seconds=0.03)


@dataclass
class Answer:
    """A request's output."""

    output: SequenceOf[int]


def numbers(count: int, start: int = 0) -> list[int]:
    """Consecutive tokens, so that a sequence can be told from others."""
    return [(start + i) % 30_000 for i in range(count)]


def memory_of(
    url: str,
    *,
    config: MemoryConfig = FAST,
    keys: KeyRing | None = None,
    fingerprint: str = FINGERPRINT,
    tls: RedisTls | None = None,
    timeout: float = 1.0,
) -> MemoryManager:
    """A memory manager over a Redis server, as in a service."""
    from draftwood_service.memory.store.base import Limits

    store: MemoryStore = RedisStore(RedisClient(url, tls, timeout), fingerprint, Limits(config.log_bytes, config.ttl))
    return MemoryManager(store, fingerprint, config, keys)


@asynccontextmanager
async def replicas(count: int, url: str, **options: Any) -> AsyncIterator[list[MemoryManager]]:
    """Memories of several processes over one server."""
    memories = [memory_of(url, **options) for _ in range(count)]
    loop = asyncio.get_running_loop()  # in the role of the engine's thread, which strategies belong to

    def run(task: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(task)

    for memory in memories:
        memory.start(run)
    try:
        yield memories
    finally:
        for memory in memories:
            await asyncio.to_thread(memory.stop)


async def perform(operation: MemoryOperation[Result], memory: MemoryManager) -> Result:
    """The result of an operation that runs on the memory thread."""
    return await asyncio.wrap_future(submit(operation, memory))


async def learn_output(memory: MemoryManager, tenant: str, tokens: SequenceOf[int], strategy: str = "trie") -> None:
    """A request of the tenant with the output `tokens`, learned by its own strategy and then by the memory."""
    used = await memory.strategy(tenant, strategy)
    learned = getattr(used, "learn", None)
    if learned is not None:
        import numpy as np

        learned(np.array(tokens, np.int32))
    with memory.learn_on_exit(MemoryName(tenant), used, [Answer(tokens)]):
        pass


def log_of(memory: MemoryManager, tenant: str) -> list[list[int]]:
    """The sequences of a memory's log, the oldest first."""
    resident = memory.residents.get(MemoryName(tenant))
    return [] if resident is None else [record.tokens.tolist() for record in resident.log]


def known_to(memory: MemoryManager, tenant: str, strategy: str = "trie") -> list[list[int]]:
    """The sequences in the strategy's index, sorted."""
    resident = memory.residents.get(MemoryName(tenant))
    used: Any = None if resident is None else resident.strategies.get(InstanceKey(strategy))
    return [] if used is None else sorted(tokens.tolist() for tokens in used.sequences())


async def agreed(memories: SequenceOf[MemoryManager], tenant: str, seconds: float = 10.0) -> list[list[int]]:
    """Waits until all outboxes are empty and all logs and indexes of a tenant are the same; returns the log."""
    deadline = time.monotonic() + seconds
    while True:
        for memory in memories:
            if memory.residents.get(MemoryName(tenant)) is None:
                await memory.strategy(tenant, "trie")
            resident = memory.residents.open(MemoryName(tenant))
            resident.used_at = time.monotonic()
            resident.checked_at = 0.0 if not memory.thread.failing else resident.checked_at
        logs = [log_of(memory, tenant) for memory in memories]
        indexes = [known_to(memory, tenant) for memory in memories]
        same = all(log == logs[0] for log in logs) and all(index == sorted(logs[0]) for index in indexes)
        same &= all(memory.residents.open(MemoryName(tenant)).loaded for memory in memories)
        if same and not any(memory.outbox.pending or memory.thread.failing for memory in memories):
            return logs[0]
        if time.monotonic() > deadline:
            shown = [
                (len(log), len(index), memory.outbox.pending, memory.thread.failing)
                for log, index, memory in zip(logs, indexes, memories, strict=True)
            ]
            raise AssertionError(f"replicas disagree after {seconds} s: log, index, outbox, failing = {shown}")
        await asyncio.sleep(0.03)
