"""Helpers of the memory's tests: processes with a memory, what they learn and what they know."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import numpy as np

from draftwood_memory import Memory, MemoryConfig, MemoryName, MemoryOverrides, RedisClient, RedisTls, StrategyKey
from draftwood_memory.memory import MemoryOperation
from draftwood_memory.operations import FillMemory, FillProgress
from draftwood_memory.records import Kind
from draftwood_memory.resident import Resident
from draftwood_memory.store.encryption import KeyRing
from draftwood_memory.store.naming import stream_key

Result = TypeVar("Result")

FINGERPRINT = "f" * 16
KEY_A, KEY_B = "A" * 43 + "=", "C" * 42 + "A="
NAMES = f"names={KEY_B}"


def numbers(count: int, start: int = 0) -> list[int]:
    """Consecutive tokens, so that a sequence can be told from others."""
    return [(start + i) % 30_000 for i in range(count)]


def tokens_of(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # another thread makes it true
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.005)


def memory_of(
    url: str | None,
    *,
    config: MemoryConfig | None = None,
    keys: KeyRing | None = None,
    fingerprint: str = FINGERPRINT,
    tls: RedisTls | None = None,
    timeout: float = 5.0,
    **options: Any,
) -> Memory:
    """A memory, as in a service; without a store if there is no address."""
    client = None if url is None else RedisClient(url, tls, timeout)
    return Memory(client, fingerprint, config or MemoryConfig(), keys, **options)


@asynccontextmanager
async def replicas(count: int, url: str | None, **options: Any) -> AsyncIterator[list[Memory]]:
    """The memories of several processes over one server. The event loop is the thread that drafts."""
    memories = [memory_of(url, **options) for _ in range(count)]
    loop, here = asyncio.get_running_loop(), threading.get_ident()

    def run(task: Callable[[], None]) -> None:
        if threading.get_ident() == here:
            task()
        else:
            loop.call_soon_threadsafe(task)

    try:
        for memory in memories:
            memory.start(run)
        yield memories
    finally:
        for memory in memories:
            await stopped(memory)


@asynccontextmanager
async def started(memory: Memory, **options: Any) -> AsyncIterator[Memory]:
    """A memory that a test has made, running. Its strategies learn on the memory thread."""
    try:
        memory.start(lambda task: task(), **options)
        yield memory
    finally:
        await stopped(memory)


async def stopped(memory: Memory) -> None:
    """Stops a memory, and waits until its thread has ended, which `Memory.stop` does for some seconds only."""
    await asyncio.to_thread(memory.stop)
    await asyncio.to_thread(memory.thread._thread.join)


def fill(
    tenant: str, *texts: SequenceOf[int], progress: FillProgress | None = None, overrides: MemoryOverrides | None = None
) -> FillMemory:
    """An import of texts."""
    sequences = [tokens_of(*text) for text in texts]
    name, progress, overrides = MemoryName(tenant), progress or FillProgress(), overrides or MemoryOverrides()
    return FillMemory(name, Kind.CORPUS, sequences, progress, overrides)


async def perform(operation: MemoryOperation[Result], memory: Memory) -> Result:
    """The result of an operation that runs on the memory thread."""
    return await asyncio.wrap_future(memory.submit(operation))


def key_of(command: SequenceOf[Any]) -> str:
    """The first key of a command."""
    return str(command[3 if command[0] == "EVAL" else 1])


@contextmanager
def before_command(
    memory: Memory, word: str, work: Callable[[], Coroutine[Any, Any, object]], of: str = ""
) -> Iterator[None]:
    """Runs something on this event loop in the midst of what a memory sends: before its first command with a word,
    whose key begins with `of`."""
    assert memory.memories is not None
    client: Any = memory.memories.client
    send, loop, pending = client.commands, asyncio.get_running_loop(), [work]

    async def commands(words: Any) -> Any:
        answers = []
        for one in words:
            if one[0] == word and key_of(one).startswith(of) and pending:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(pending.pop()(), loop))
            answers += await send([one])
        return answers

    client.commands = commands
    try:
        yield
    finally:
        client.commands = send


async def strategy_of(memory: Memory, tenant: str, name: str = "trie", arm: str = "") -> Any:
    """What a request of the tenant drafts with."""
    return await asyncio.to_thread(memory.strategy, tenant, name, arm)


async def learn_output(memory: Memory, tenant: str, tokens: SequenceOf[int], arm: str = "") -> None:
    """A request of the tenant that wrote `tokens`, which its own strategy has learned as it drafted."""
    strategy = await strategy_of(memory, tenant, arm=arm)
    strategy.learn(tokens_of(*tokens))
    with memory.learning(MemoryName(tenant, arm), strategy) as request:
        request.learn(tokens_of(*tokens))


async def stored(memories: SequenceOf[Memory], tenant: str, tokens: SequenceOf[int]) -> list[list[int]]:
    """The first process learns an output of the tenant; what all of them then know, as `agreed` returns it."""
    await learn_output(memories[0], tenant, tokens)
    return await agreed(memories, tenant)


def resident(memory: Memory, tenant: str, arm: str = "") -> Resident:
    return memory.residents.open(MemoryName(tenant, arm))


def log_of(memory: Memory, tenant: str, arm: str = "") -> list[list[int]]:
    """The sequences that a process holds of a memory, the oldest first."""
    found = memory.residents.get(MemoryName(tenant, arm))
    return [] if found is None else [logged.record.tokens.tolist() for logged in found.log]


def learned_by(memory: Memory, tenant: str, arm: str = "") -> list[list[int]]:
    """The sequences in the index of the strategy "trie", sorted."""
    found = memory.residents.get(MemoryName(tenant, arm))
    used: Any = None if found is None else found.strategies.get(StrategyKey("trie"))
    return [] if used is None else sorted(tokens.tolist() for tokens in used.sequences())


def stream_of(memory: Memory, tenant: str, arm: str = "") -> str:
    """The key of the stream that the process reads and writes."""
    found = resident(memory, tenant, arm)
    return stream_key(found.tag, found.epoch or 0)


async def agreed(memories: SequenceOf[Memory], tenant: str, outboxes: bool = True) -> list[list[int]]:
    """Waits until all `outboxes` are empty, and all records and indexes of a tenant the same; returns them sorted."""
    for memory in memories:
        await strategy_of(memory, tenant)

    def same() -> bool:
        for memory in memories:
            resident(memory, tenant)  # in use
        found = [sorted(log_of(memory, tenant)) for memory in memories]
        indexes = [learned_by(memory, tenant) for memory in memories]
        settled = not any(memory.outbox.pending * outboxes or memory.thread.failing for memory in memories)
        loaded = all(resident(memory, tenant).loaded for memory in memories)
        return settled and loaded and all(one == found[0] for one in (*found, *indexes))

    await until(same)
    return sorted(log_of(memories[0], tenant))
