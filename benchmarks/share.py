"""`draftwood bench share`: what a memory that several replicas share costs and brings.

The store is the embedded one, a real Valkey server. Two services measure acceptance and the cost of a step; start,
lag and many tenants are measured in this process, with the same memory that a service has.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.demo import read_questions
from benchmarks.report import BenchmarkError, OutputOptions, console, percentile, progress, shown
from benchmarks.server_process import server_process
from draftwood_client import ChatMessage, Client, Completion
from draftwood_client.cli.options import command
from service.memory import MemoryName, TenantMemory
from service.memory.store.base import Limits
from service.memory.store.embedded import EmbeddedServer
from service.memory.store.redis_client import RedisClient
from service.memory.store.redis_store import RedisStore
from service.memory.tenants import MemoryConfig

_MAX_TOKENS = 200
_RECORD_TOKENS = 200
_FINGERPRINT = "0" * 16
_STORE_BYTES = 1 << 30
_STRATEGY = "trie"


class _Answer:
    """What a request wrote."""

    def __init__(self, output: Sequence[int]) -> None:
        self.output = output


@command
def share(
    output: OutputOptions,
    questions: Annotated[int, typer.Option(min=1, max=20, help="Measured questions.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, max=120, help="Other questions that the first replica learns.")] = 60,
    records: Annotated[int, typer.Option(min=10, help="Records whose way to the other replica is timed.")] = 200,
    pairs: Annotated[int, typer.Option(min=1, help="Answers with and without the store, to compare steps.")] = 40,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants of 10,000 tokens at once; 0 leaves this out.")] = 1000,
) -> None:
    """What sharing a memory between replicas costs and brings: start, lag, acceptance, time of a step, many tenants."""
    out = console()
    output.check()
    with tempfile.TemporaryDirectory(prefix="draftwood-share-") as folder, ExitStack() as stack:
        store = stack.enter_context(EmbeddedServer(Path(folder), _STORE_BYTES))
        store.wait()
        row: dict[str, Any] = {}
        with out.status("A tenant of a million tokens"):
            row["boot_s_per_million_tokens"] = asyncio.run(_boot(store.url))
        with out.status("Lag"):
            lags = [1000 * lag for lag in asyncio.run(_lags(store.url, records))]
        row["lag_ms_p50"], row["lag_ms_p99"] = percentile(lags, 50), percentile(lags, 99)
        row |= _services(store, questions, warmup, pairs, out)
        if tenants:
            with out.status(f"{tenants} tenants of 10,000 tokens"):
                row |= asyncio.run(_many(store.url, tenants))
    row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    out.print(_table(row))
    output.write([row], lambda axes: _draw(lags, axes))


def _memory(url: str, config: MemoryConfig | None = None) -> TenantMemory:
    config = config or MemoryConfig()
    store = RedisStore(RedisClient(url), _FINGERPRINT, Limits(config.log_bytes))
    return TenantMemory(store, _FINGERPRINT, config)


@contextmanager
def _started(memory: TenantMemory, preload: int = 0) -> Iterator[TenantMemory]:
    memory.start(lambda task: task(), preload, _STRATEGY)
    try:
        yield memory
    finally:
        memory.stop()


async def _teach(memory: TenantMemory, tenant: str, tokens: Sequence[int]) -> None:
    with memory.lesson_of(tenant, await memory.strategy(tenant, "none"), [_Answer(tokens)]):
        pass


async def _until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # what is waited for happens on another thread
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the memory was not where it should be after {seconds:g} s")
        await asyncio.sleep(0.002)


async def _boot(url: str) -> float:
    """Seconds from a process's memory starting to a tenant of a million tokens being drafted from."""
    draw = np.random.default_rng(0)
    with _started(_memory(url)) as first:
        for _ in range(1_000_000 // _RECORD_TOKENS):
            await _teach(first, "million", draw.integers(0, 8000, _RECORD_TOKENS).tolist())
        await _until(lambda: not first.outbox.pending)
        await asyncio.sleep(1.0)  # for the log to be folded
    memory = _memory(url)
    began = time.perf_counter()
    with _started(memory, preload=1):
        await _until(lambda: memory.arrived)
        seconds = time.perf_counter() - began
        resident = memory.residents.get(MemoryName("million"))
        if resident is None or resident.log.tokens != 1_000_000 or resident.nbytes < 4_000_000:
            raise BenchmarkError("the tenant of a million tokens did not come back whole")
    return seconds


async def _lags(url: str, records: int) -> list[float]:
    """Seconds from a request's end on one replica to its answer being drafted from on the other."""
    lags: list[float] = []
    with _started(_memory(url)) as first, _started(_memory(url)) as second:
        await second.strategy("lag", _STRATEGY)
        await first.strategy("lag", _STRATEGY)
        draw = np.random.default_rng(1)
        for number in range(records):
            strategy: Any = await second.strategy("lag", _STRATEGY)
            before = strategy.tokens
            began = time.perf_counter()
            await _teach(first, "lag", [number % 8000] * _RECORD_TOKENS)
            await _until(lambda strategy=strategy, before=before: strategy.tokens >= before + _RECORD_TOKENS)
            lags.append(time.perf_counter() - began)
            await asyncio.sleep(float(draw.uniform(0.0, 0.2)))
    return lags


def _services(store: EmbeddedServer, questions: int, warmup: int, pairs: int, out: Console) -> dict[str, Any]:
    measured, others = read_questions()
    measured, others = measured[:questions], others[:warmup]
    flags = ("--dtype", "float32", "--threads", "1", "--strategy", _STRATEGY)
    with ExitStack() as stack:
        first, second, alone = (
            stack.enter_context(server_process(*flags, "--store", url)).target
            for url in (store.url, store.url, "memory")
        )
        with Client(first, tenant="share") as a, Client(second, tenant="share") as b, Client(alone, tenant="x") as c:
            cold = _acceptance([_ask(b, text, f"cold-{n}") for n, text in enumerate(progress(measured, "cold", out))])
            for text in progress(others, "teaching one replica", out):
                _ask(a, text)
            _ask(b, others[0], max_tokens=1)  # a tenant that nobody asks for here is not followed
            time.sleep(1.0)
            # Both measure on what they have now: a store that stands still shares nothing meanwhile.
            assert store.pid is not None
            os.kill(store.pid, signal.SIGSTOP)
            try:
                own = _acceptance([_ask(a, text) for text in progress(measured, "the taught replica", out)])
                shared = _acceptance([_ask(b, text) for text in progress(measured, "the other replica", out)])
            finally:
                os.kill(store.pid, signal.SIGCONT)
            time.sleep(2.0)
            overheads = _overheads(a, c, measured, pairs, out)
    return {
        "acceptance_cold": cold,
        "acceptance_own": own,
        "acceptance_after_share": shared,
        "hot_path_overhead": statistics.median(overheads) - 1.0,
    }


def _ask(client: Client, text: str, tenant: str | None = None, **options: Any) -> Completion:
    asked = {"max_tokens": _MAX_TOKENS, **options, **({} if tenant is None else {"tenant": tenant})}
    return client.generate([ChatMessage("user", text)], **asked)


def _acceptance(completions: Sequence[Completion]) -> float:
    """Tokens a decoding step over all answers."""
    return sum(len(one.token_ids) for one in completions) / sum(one.drafting.steps for one in completions)


def _overheads(attached: Client, alone: Client, measured: Sequence[str], pairs: int, out: Console) -> list[float]:
    """For each pair of equal answers, the time of a step with the store over that without. Who begins takes turns."""
    ratios = []
    for number in progress(range(pairs), "a step with and without the store", out):
        text = measured[number % len(measured)]
        order = (attached, alone) if number % 2 else (alone, attached)
        seconds = {}
        for client in order:
            drafting = _ask(client, text, f"step-{number}").drafting
            seconds[client] = drafting.step_time / drafting.steps
        ratios.append(seconds[attached] / seconds[alone])
    return ratios


async def _many(url: str, tenants: int) -> dict[str, Any]:
    """Many tenants in one process: their memory, what they cost while nobody asks, and how they leave and return."""
    client = RedisClient(url)
    draw = np.random.default_rng(2)
    with _started(_memory(url, MemoryConfig(most_tenants=2 * tenants))) as memory:
        before = _resident_bytes()
        for number in range(tenants):
            strategy: Any = await memory.strategy(f"tenant-{number}", _STRATEGY)
            for _ in range(10_000 // _RECORD_TOKENS):
                tokens = draw.integers(0, 8000, _RECORD_TOKENS).astype(np.int32)
                strategy.learn(tokens)
                with memory.lesson_of(f"tenant-{number}", strategy, [_Answer(tokens.tolist())]):
                    pass
            if number % 20 == 0:
                await _until(lambda: memory.outbox.pending < 500)
        await _until(lambda: not memory.outbox.pending)
        await asyncio.sleep(4.0)  # until nothing is read for having been written to
        counters = memory.counters()
        mib = (_resident_bytes() - before) / 2**20
        commands, cpu, began = await _commands(client), time.process_time(), time.monotonic()
        await asyncio.sleep(5.0)
        seconds = time.monotonic() - began
        idle_cpu = (time.process_time() - cpu) / seconds
        idle_commands = (await _commands(client) - commands - 1) / seconds
        memory.residents._idle_seconds = 0.0
        await _until(lambda: len(memory.residents) == 0)
        memory.residents._idle_seconds = 900.0
        times = []
        for number in range(0, tenants, max(1, tenants // 50)):
            began = time.perf_counter()
            back: Any = await memory.strategy(f"tenant-{number}", _STRATEGY)
            times.append(time.perf_counter() - began)
            if back.tokens != 10_000:
                raise BenchmarkError(f"a tenant came back with {back.tokens} tokens")
    await client.close()
    return {
        "tenants": tenants,
        "tenants_tokens": counters.tokens,
        "tenants_index_mib": counters.index_bytes / 2**20,
        "tenants_rss_mib": mib,
        "tenants_idle_cpu": idle_cpu,
        "tenants_idle_commands_per_s": idle_commands,
        "tenants_return_ms_p50": 1000 * (percentile(times, 50) or 0.0),
        "tenants_return_ms_p99": 1000 * (percentile(times, 99) or 0.0),
    }


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


async def _commands(client: RedisClient) -> int:
    """How many commands the server has processed."""
    found = await client.command("INFO", "stats")
    if isinstance(found, dict):
        return int(found["total_commands_processed"])
    return int(found.split(b"total_commands_processed:")[1].split()[0])


def _table(row: dict[str, Any]) -> Table:
    bars = {
        "boot_s_per_million_tokens": "< 2",
        "lag_ms_p99": "< 1000",
        "acceptance_after_share": f"within 3% of {row['acceptance_own']:.2f}",
        "hot_path_overhead": "< 0.01",
    }
    table = Table(title="A memory that replicas share", title_justify="left")
    for heading in ("", "measured", "wanted"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in row.items():
        table.add_row(
            name.replace("_", " "), shown(value, 3) if isinstance(value, float) else str(value), bars.get(name, "")
        )
    return table


def _draw(lags: list[float], axes: Any) -> None:
    ordered = sorted(lags)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    axes.set_xlabel("milliseconds until the other replica drafts from a record")
    axes.set_ylabel("share of records")
    axes.set_ylim(0, 1)
