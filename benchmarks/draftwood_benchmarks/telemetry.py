"""`draftwood bench telemetry`: what metrics, traces and logs cost in tokens per second."""

from __future__ import annotations

import asyncio
import socket
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Annotated, Any

import grpc
import numpy as np
import typer
import uvloop
from rich.table import Table

from draftwood_benchmarks.load.command import read_levels
from draftwood_benchmarks.shared.machine import OtherLoad, warning
from draftwood_benchmarks.shared.models import ModelOptions, chosen_model
from draftwood_benchmarks.shared.prompts import read_prompts
from draftwood_benchmarks.shared.report import BenchmarkError, OutputOptions, console, progress
from draftwood_benchmarks.shared.server_process import server_process
from draftwood_client import AsyncClient, ChatMessage
from draftwood_client.cli.options import command

_TARGET = 0.98
_SCRAPE_SECONDS = 5.0
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens per second with telemetry over those without: the median of the pairs, and its 95% interval."""

    streams: int
    pairs: int
    ratio: float
    low: float
    high: float


@command
def telemetry(
    model: ModelOptions,
    output: OutputOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of requests at once.")] = "1,8",
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of rounds with and without.")] = 30,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per answer.")] = 128,
) -> None:
    """Tokens per second with everything on (Prometheus, OTLP, every call traced) over those with everything off.

    Two services, with and without, answer the same questions in turn.
    """
    out = console()
    output.check()
    levels = read_levels(streams)
    texts = read_prompts(None)
    ratios: dict[int, list[float]] = {level: [] for level in levels}
    with ExitStack() as stack:
        chosen = stack.enter_context(chosen_model(model, out))
        flags = (*chosen.server_flags, "--max-running", str(max(levels)), "--audit-share", "0", "--log-format", "json")
        endpoint, port = stack.enter_context(_sink()), _free_port()
        watched = ("--metrics-port", str(port), "--otlp-endpoint", endpoint, "--trace-share", "1")
        with_it = stack.enter_context(server_process(*flags, *watched, "--log-level", "info"))
        without = stack.enter_context(server_process(*flags, "--log-level", "info"))
        scrapes = stack.enter_context(_scraped(f"http://127.0.0.1:{port}/metrics"))
        load = OtherLoad()
        for number, level in progress([(n, level) for n in range(pairs) for level in levels], "pairs", out):
            chunk = [*islice(cycle(texts), number * level, (number + 1) * level)]
            rates = {}
            for server in (with_it, without) if number % 2 else (without, with_it):
                rates[server.target] = uvloop.run(_rate(server.target, chunk, max_tokens, f"round-{number}-{level}"))
            ratios[level].append(rates[with_it.target] / rates[without.target])
        busy = load.share()
        if not scrapes:
            raise BenchmarkError("metrics were never collected")
    rows = [_row(level, ratios[level]) for level in levels]
    table = Table("streams", "pairs", "tokens/s with / without", "95% interval", title=f"telemetry{warning(busy)}")
    for row in rows:
        table.add_row(str(row.streams), str(row.pairs), f"{row.ratio:.3f}", f"{row.low:.3f} to {row.high:.3f}")
    table.caption = f"target: at least {_TARGET}"
    out.print(table)
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows), busy=busy)


async def _rate(target: str, texts: Sequence[str], max_tokens: int, tenant: str) -> float:
    """Tokens per second of these requests at once. The tenant is new, so that both services draft alike."""
    async with AsyncClient(target, tenant=tenant) as client:

        async def ask(text: str) -> int:
            answer = await client.generate(
                [ChatMessage("user", text)], max_tokens=max_tokens, ignore_eos=True, temperature=0.0
            )
            return len(answer.token_ids)

        await client.model_info()
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(ask, texts)))
        return tokens / (time.perf_counter() - began)


def _row(streams: int, ratios: Sequence[float]) -> Row:
    random = np.random.default_rng(0)
    drawn = random.choice(np.array(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975]).tolist()
    return Row(streams, len(ratios), round(statistics.median(ratios), 4), round(low, 4), round(high, 4))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def _sink() -> Iterator[str]:
    """A collector that takes everything; yields its URL."""

    class Everything(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Everything(),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def _scraped(url: str) -> Iterator[list[int]]:
    """Collects metrics every few seconds meanwhile; yields the sizes of what came."""
    stopping, sizes = threading.Event(), list[int]()

    def scrape() -> None:
        while not stopping.is_set():
            with urllib.request.urlopen(url, timeout=10) as page:
                sizes.append(len(page.read()))
            stopping.wait(_SCRAPE_SECONDS)

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        yield sizes
    finally:
        stopping.set()
        thread.join()


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    names, ratios = [f"{row.streams} streams" for row in rows], [row.ratio for row in rows]
    errors = [[row.ratio - row.low for row in rows], [row.high - row.ratio for row in rows]]
    axes.errorbar(names, ratios, yerr=errors, fmt="o", capsize=4)
    axes.axhline(_TARGET, linestyle="--", label=f"target {_TARGET}")
    axes.set_ylabel("tokens/s with telemetry / without")
    axes.legend()
