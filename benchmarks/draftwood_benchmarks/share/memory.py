"""The memory of a service in this process, on a real store: loading time, lag between replicas, many tenants."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from draftwood_benchmarks.harness.report import BenchmarkError, percentile
from draftwood_memory.config import MemoryConfig
from draftwood_memory.memory import Memory
from draftwood_memory.records import Kind, Record
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.redis_client import RedisClient
from draftwood_memory.store.stored import Append
from draftwood_strategies.registry import warm_up

_RECORD_TOKENS = 200
_FINGERPRINT = "0" * 16
STRATEGY = "trie"
"""Of everything that `bench share` measures."""


def _memory(url: str, config: MemoryConfig | None = None) -> Memory:
    return Memory(RedisClient(url), _FINGERPRINT, config or MemoryConfig())


@contextmanager
def _started(memory: Memory, preload: int = 0) -> Iterator[Memory]:
    memory.start(lambda task: task(), preload, STRATEGY)
    try:
        yield memory
    finally:
        memory.stop()


def _learn(memory: Memory, tenant: str, tokens: Sequence[int], strategy: Any = None) -> None:
    with memory.learning(MemoryName(tenant), strategy) as scope:
        scope.learn(np.array(tokens, np.int32))


async def _strategy(memory: Memory, tenant: str) -> Any:
    """The tenant's strategy, as the first thing of a request."""
    return await asyncio.to_thread(memory.strategy, tenant, STRATEGY)


async def _until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # another thread makes it true
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the memory did not reach the expected state within {seconds:g} s")
        await asyncio.sleep(0.002)


async def boot(url: str) -> float:
    """Seconds from the start of a memory until a tenant of a million tokens can be drafted from.

    Each answer is an entry of its own, as answers are that come one at a time.
    """
    draw = np.random.default_rng(0)
    memory = _memory(url)
    assert memory.memories is not None
    tag = memory.naming.tag(MemoryName("million"))
    for _ in range(1_000_000 // _RECORD_TOKENS // 100):
        records = [
            Record(Kind.OUTPUT, draw.integers(0, 8000, _RECORD_TOKENS).astype(np.int32), int(time.time()))
            for _ in range(100)
        ]
        name = memory.codec.encode_name(tag, MemoryName("million"))
        await memory.memories.append(
            [
                Append(tag, 0, name, memory.codec.encode(tag, 0, b"benchmrk", [one]), None, 16 << 20, 0.0, 1_000_000)
                for one in records
            ]
        )
    await memory.memories.catalogue.note_use([tag])
    await memory.memories.client.close()
    memory.stop()
    warm_up(STRATEGY)  # as a service does before it loads its model
    memory = _memory(url)
    began = time.perf_counter()
    with _started(memory, preload=1):
        await _until(lambda: memory.preloaded)
        seconds = time.perf_counter() - began
        resident = memory.residents.get(MemoryName("million"))
        if resident is None or resident.log.tokens != 1_000_000 or resident.nbytes < 4_000_000:
            raise BenchmarkError("the tenant of a million tokens was not loaded completely")
    return seconds


async def lags(url: str, records: int) -> tuple[list[float], float]:
    """Seconds from the end of a request on one replica until the other drafts from its answer; and the bytes to and
    from the store for each learned token, of both replicas."""
    found: list[float] = []
    client = RedisClient(url)
    with _started(_memory(url)) as first, _started(_memory(url)) as second:
        await _strategy(second, "lag")
        await _strategy(first, "lag")
        await asyncio.sleep(0.5)  # until both follow
        sent = await _statistic(client, "total_net_input_bytes", "total_net_output_bytes")
        draw = np.random.default_rng(1)
        for number in range(records):
            strategy = await _strategy(second, "lag")
            before = strategy.tokens
            began = time.perf_counter()
            _learn(first, "lag", [number % 8000] * _RECORD_TOKENS)
            await _until(lambda strategy=strategy, before=before: strategy.tokens >= before + _RECORD_TOKENS)
            found.append(time.perf_counter() - began)
            await asyncio.sleep(float(draw.uniform(0.0, 0.2)))
    traffic = await _statistic(client, "total_net_input_bytes", "total_net_output_bytes") - sent
    await client.close()
    return found, traffic / (records * _RECORD_TOKENS)


async def many_tenants(url: str, tenants: int) -> dict[str, Any]:
    """Many tenants in one process: memory, CPU time and store commands while idle, time to load one again, and the
    share of requests that began without their memory, since it took longer to load than a request waits."""
    gc.collect()
    gc.freeze()  # as in the service: a collection that scans all libraries stops the process for longer than that
    client = RedisClient(url)
    draw = np.random.default_rng(2)
    with _started(_memory(url, MemoryConfig(max_resident=2 * tenants))) as memory:
        before = _resident_bytes()
        for number in range(tenants):
            strategy = await _strategy(memory, f"tenant-{number}")
            for _ in range(10_000 // _RECORD_TOKENS):
                tokens = draw.integers(0, 8000, _RECORD_TOKENS).astype(np.int32)
                strategy.learn(tokens)
                _learn(memory, f"tenant-{number}", tokens.tolist(), strategy)
            if number % 20 == 0:
                await _until(lambda: memory.outbox.pending < 500)
        await _until(lambda: not memory.outbox.pending)
        await asyncio.sleep(4.0)  # until the reads that follow writes have ended
        counters = memory.counters()
        mib = (_resident_bytes() - before) / 2**20
        idle_cpu, idle_commands = await _idle_load(client)
        usual = memory.residents.config
        memory.residents.config = replace(usual, idle_seconds=0.0)
        await _until(lambda: len(memory.residents) == 0)
        memory.residents.config = usual
        times, late = [], 0
        for number in range(0, tenants, max(1, tenants // 50)):
            began = time.perf_counter()
            back = await _strategy(memory, f"tenant-{number}")
            times.append(time.perf_counter() - began)
            late += back.tokens == 0
            if back.tokens not in (0, 10_000):
                raise BenchmarkError(f"a tenant of 10,000 tokens was loaded with {back.tokens}")
    await client.close()
    gc.unfreeze()
    return {
        "tenants": tenants,
        "tenants_tokens": counters.tokens,
        "tenants_index_mib": counters.index_bytes / 2**20,
        "tenants_rss_mib": mib,
        "tenants_idle_cpu": idle_cpu,
        "tenants_idle_commands_per_s": idle_commands,
        "tenants_return_ms_p50": 1000 * (percentile(times, 50) or 0.0),
        "tenants_return_ms_p99": 1000 * (percentile(times, 99) or 0.0),
        "tenants_late": late / len(times),
    }


async def _idle_load(client: RedisClient) -> tuple[float, float]:
    """(CPU seconds, store commands) per second of this process without requests."""
    processed = "total_commands_processed"
    commands, cpu, began = await _statistic(client, processed), time.process_time(), time.monotonic()
    await asyncio.sleep(5.0)
    seconds = time.monotonic() - began
    return (time.process_time() - cpu) / seconds, (await _statistic(client, processed) - commands - 1) / seconds


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


async def _statistic(client: RedisClient, *names: str) -> int:
    """The sum of some of the server's counters."""
    found = await client.command("INFO", "stats")
    if not isinstance(found, dict):
        found = dict(line.split(":", 1) for line in found.decode().splitlines() if ":" in line)
    return sum(int(found[name]) for name in names)
