"""`draftwood bench share`: cost and gain of a memory that replicas share.

The store is the embedded one, a real Valkey server. Two services measure acceptance; loading and lag are measured in
this process, with the memory that a service has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, percentile, progress, table
from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import ChatMessage, Client, Completion
from draftwood_client.cli.options import command
from draftwood_memory import Memory, MemoryConfig, MemoryName
from draftwood_memory.records import Kind, Record
from draftwood_memory.store.embedded import EmbeddedServer
from draftwood_memory.store.redis_client import RedisClient
from draftwood_memory.store.stored import Append
from draftwood_strategies.registry import warm_up

_STORE_BYTES = 1 << 30
"""Memory limit of the store; more than the benchmark needs."""
_STRATEGY = "trie"
_RECORD_TOKENS, _MAX_TOKENS = 200, 200


@command
def share(
    output: OutputOptions,
    questions: Annotated[int, typer.Option(min=1, max=20, help="Measured questions.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=1, max=120, help="Other questions, which the first replica learns from.")
    ] = 60,
    records: Annotated[int, typer.Option(min=10, help="Records whose lag to the other replica is measured.")] = 200,
) -> None:
    """Cost and gain of a memory that replicas share: loading time, lag, bytes to and from the store, acceptance."""
    with tempfile.TemporaryDirectory(prefix="draftwood-share-") as folder, ExitStack() as stack:
        store = stack.enter_context(EmbeddedServer(Path(folder), _STORE_BYTES))
        store.wait()
        row: dict[str, Any] = {}
        with console.status("Loading a tenant of a million tokens"):
            row["boot_s_per_million_tokens"] = asyncio.run(_boot(store.url))
        with console.status("Lag"):
            seconds, row["store_bytes_per_token"] = asyncio.run(_lags(store.url, records))
        for percent in (50, 99):
            row[f"lag_ms_p{percent}"] = 1000 * (percentile(seconds, percent) or 0.0)
        row |= _acceptances(store, questions, warmup)
    targets = {
        "boot_s_per_million_tokens": "< 1",
        "store_bytes_per_token": "< 60",
        "lag_ms_p99": "< 100",
        "acceptance_after_share": f"within 3% of {row['acceptance_own']:.2f}",
    }
    shown = [{"name": name.replace("_", " "), "value": row[name], "target": targets.get(name, "")} for name in row]
    columns = {"": "{name}", "measured": "{value:.3f}", "target": "{target}"}
    rounded = {name: round(value, 4) for name, value in row.items()}
    output.report(table("A memory that replicas share", shown, columns, texts=1), [rounded])


def _memory(url: str) -> Memory:
    return Memory(RedisClient(url), "0" * 16, MemoryConfig())


@contextmanager
def _started(memory: Memory, preload: int = 0) -> Iterator[Memory]:
    memory.start(lambda task: task(), preload, _STRATEGY)
    try:
        yield memory
    finally:
        memory.stop()


async def _strategy(memory: Memory) -> Any:
    """The tenant's strategy, as the first thing of a request."""
    return await asyncio.to_thread(memory.strategy, "lag", _STRATEGY)


async def _until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # another thread makes it true
        if time.monotonic() > deadline:
            raise BenchmarkError(f"the memory did not reach the expected state within {seconds:g} s")
        await asyncio.sleep(0.002)


async def _boot(url: str) -> float:
    """Seconds from the start of a memory until a tenant of a million tokens can be drafted from.

    Each answer is an entry of its own, as answers are that come one at a time.
    """
    draw, million = np.random.default_rng(0), MemoryName("million")
    memory = _memory(url)
    assert memory.memories is not None
    tag = memory.naming.tag(million)
    name = memory.codec.encode_name(tag, million)
    for _ in range(1_000_000 // _RECORD_TOKENS // 100):
        answers = draw.integers(0, 8000, (100, _RECORD_TOKENS)).astype(np.int32)
        records = [Record(Kind.OUTPUT, answer, int(time.time())) for answer in answers]
        entries = [memory.codec.encode(tag, 0, b"benchmrk", [record]) for record in records]
        await memory.memories.append([Append(tag, 0, name, entries, None, 16 << 20, 0.0, 1_000_000)])
    await memory.memories.catalogue.note_use([tag])
    await memory.memories.client.close()
    memory.stop()
    warm_up(_STRATEGY)  # as a service does before it loads its model
    memory = _memory(url)
    began = time.perf_counter()
    with _started(memory, preload=1):
        await _until(lambda: memory.preloaded)
        seconds = time.perf_counter() - began
        resident = memory.residents.get(million)
        if resident is None or resident.log.tokens != 1_000_000 or resident.nbytes < 4_000_000:
            raise BenchmarkError("the tenant of a million tokens was not loaded completely")
    return seconds


async def _lags(url: str, records: int) -> tuple[list[float], float]:
    """Seconds from the end of a request on one replica until the other drafts from its answer; and the bytes to and
    from the store for each learned token, of both replicas."""
    lags: list[float] = []
    client, draw = RedisClient(url), np.random.default_rng(1)
    with _started(_memory(url)) as first, _started(_memory(url)) as second:
        await _strategy(second)
        await _strategy(first)
        await asyncio.sleep(0.5)  # until both follow
        sent = await _traffic(client)
        for number in range(records):
            strategy = await _strategy(second)
            before = strategy.tokens
            began = time.perf_counter()
            with first.learning(MemoryName("lag"), None) as scope:
                scope.learn(np.full(_RECORD_TOKENS, number % 8000, np.int32))
            await _until(lambda strategy=strategy, before=before: strategy.tokens >= before + _RECORD_TOKENS)
            lags.append(time.perf_counter() - began)
            await asyncio.sleep(float(draw.uniform(0.0, 0.2)))
    traffic = await _traffic(client) - sent
    await client.close()
    return lags, traffic / (records * _RECORD_TOKENS)


async def _traffic(client: RedisClient) -> int:
    """Bytes to and from the server so far."""
    stats = await client.command("INFO", "stats")
    if not isinstance(stats, dict):
        stats = dict(line.split(":", 1) for line in stats.decode().splitlines() if ":" in line)
    return sum(int(stats[name]) for name in ("total_net_input_bytes", "total_net_output_bytes"))


def _acceptances(store: EmbeddedServer, questions: int, warmup: int) -> dict[str, float]:
    """Acceptance lengths of a tenant's answers on two services with one store."""
    measured, others = read_questions()
    measured, others = measured[:questions], others[:warmup]
    flags = ("--dtype", "float32", "--threads", "1", "--strategy", _STRATEGY, "--store", store.url)
    with (
        running_server(*flags) as first,
        running_server(*flags) as second,
        Client(first, tenant="share") as a,
        Client(second, tenant="share") as b,
    ):
        numbered = enumerate(progress(measured, "cold"))
        cold = _acceptance([_ask(b, text, tenant=f"cold-{number}") for number, text in numbered])
        for text in progress(others, "one replica learns"):
            _ask(a, text)
        _ask(b, others[0], max_tokens=1)  # a replica follows a tenant from its first request on
        time.sleep(1.0)
        # A stopped store shares nothing, so both replicas are measured on what they have learned by now.
        assert store.pid is not None
        os.kill(store.pid, signal.SIGSTOP)
        try:
            learned = _acceptance([_ask(a, text) for text in progress(measured, "the replica that learned")])
            shared = _acceptance([_ask(b, text) for text in progress(measured, "the other replica")])
        finally:
            os.kill(store.pid, signal.SIGCONT)
    return {"acceptance_cold": cold, "acceptance_own": learned, "acceptance_after_share": shared}


def _ask(client: Client, text: str, **options: Any) -> Completion:
    return client.generate([ChatMessage("user", text)], **{"max_tokens": _MAX_TOKENS, **options})


def _acceptance(completions: Sequence[Completion]) -> float:
    """Tokens per decoding step over all answers."""
    return sum(len(each.token_ids) for each in completions) / sum(each.drafting.steps for each in completions)
