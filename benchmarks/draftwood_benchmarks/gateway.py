"""`draftwood bench gateway`: tokens per second through the gateway, over those of the service itself."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Annotated, Any

import numpy as np
import typer
import uvloop
from rich.table import Table

from draftwood_benchmarks.load.command import read_levels
from draftwood_benchmarks.shared.gateway_process import running_gateway
from draftwood_benchmarks.shared.machine import OtherLoad, warning
from draftwood_benchmarks.shared.models import ModelOptions, chosen_model
from draftwood_benchmarks.shared.prompts import read_prompts
from draftwood_benchmarks.shared.report import BenchmarkError, OutputOptions, console, progress
from draftwood_benchmarks.shared.server_process import server_process
from draftwood_client import AsyncClient, ChatMessage, Client
from draftwood_client.cli.options import command

_TARGET = 0.95
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second through the gateway over those without it: the median of the pairs, and its 95% interval."""

    streams: int
    pairs: int
    ratio: float
    low: float
    high: float


@command
def gateway(
    model: ModelOptions,
    output: OutputOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of requests at once.")] = "1,32",
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of rounds with the gateway and without.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per answer.")] = 128,
) -> None:
    """Tokens per second of streams through the gateway over those without it, on one service, in turn.

    Service, gateway and clients share the machine.
    """
    out = console()
    output.check()
    levels, texts = read_levels(streams), read_prompts(None)
    ratios: dict[int, list[float]] = {level: [] for level in levels}
    with chosen_model(model, out) as chosen:
        flags = ("--max-running", str(max(levels)), "--audit-share", "0")
        with server_process(*chosen.server_flags, *flags) as server, running_gateway(server.target) as started:
            with Client(server.target) as client:
                name = client.model_info().model
            load = OtherLoad()
            for number, level in progress([(n, level) for n in range(pairs) for level in levels], "pairs", out):
                chunk = [*islice(cycle(texts), number * level, (number + 1) * level)]
                rates = {}
                for through in (True, False) if number % 2 else (False, True):
                    tenant = f"round-{number}-{level}-{through}"
                    rates[through] = uvloop.run(
                        _through(started.port, name, chunk, max_tokens, tenant)
                        if through
                        else _direct(server.target, chunk, max_tokens, tenant)
                    )
                ratios[level].append(rates[True] / rates[False])
            busy = load.share()
    rows = [_row(level, ratios[level]) for level in levels]
    table = Table("streams", "pairs", "tokens/s with / without", "95% interval", title=f"gateway{warning(busy)}")
    for row in rows:
        table.add_row(str(row.streams), str(row.pairs), f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}")
    table.caption = f"target: at least {_TARGET} with 32 streams"
    out.print(table)
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows), busy=busy)


async def _direct(target: str, texts: Sequence[str], max_tokens: int, tenant: str) -> float:
    async with AsyncClient(target, tenant=tenant) as client:

        async def ask(text: str) -> int:
            tokens = 0
            async with client.stream(
                [ChatMessage("user", text)], max_tokens=max_tokens, ignore_eos=True, temperature=0.0
            ) as stream:
                async for delta in stream:
                    tokens += len(delta.token_ids)
            return tokens

        await client.model_info()
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, texts)))
        return tokens / (time.perf_counter() - began)


async def _through(port: int, model: str, texts: Sequence[str], max_tokens: int, tenant: str) -> float:
    async def ask(text: str) -> int:
        """Reads the stream as bytes: a client's own work is not measured."""
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "draftwood": {"tenant": tenant},
            }
        ).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
        at = answer.rfind(b'"completion_tokens":')
        if at < 0:
            raise BenchmarkError(f"the gateway answered {answer[:200]!r}")
        return int(answer[at + 20 :].split(b",", 1)[0])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(ask, texts)))
    return tokens / (time.perf_counter() - began)


def _row(streams: int, ratios: Sequence[float]) -> Row:
    drawn = np.random.default_rng(0).choice(np.array(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975]).tolist()
    return Row(streams, len(ratios), round(statistics.median(ratios), 4), round(low, 4), round(high, 4))


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    names, ratios = [f"{row.streams} streams" for row in rows], [row.ratio for row in rows]
    errors = [[row.ratio - row.low for row in rows], [row.high - row.ratio for row in rows]]
    axes.errorbar(names, ratios, yerr=errors, fmt="o", capsize=4)
    axes.axhline(_TARGET, linestyle="--", label=f"target {_TARGET}")
    axes.set_ylabel("tokens/s through the gateway / without")
    axes.legend()
