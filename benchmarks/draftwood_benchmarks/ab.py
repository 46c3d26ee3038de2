"""`draftwood bench ab`: tokens per second of two services that differ in some settings, in turn."""

from __future__ import annotations

import asyncio
import json
import shlex
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import cycle, islice
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import uvloop

from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.report import BenchmarkError, OtherLoad, OutputOptions, progress, table, warning
from draftwood_benchmarks.harness.servers import observed, running_gateway, running_server
from draftwood_benchmarks.load import read_levels
from draftwood_client import AsyncClient, ChatMessage
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError

_RESAMPLES = 2000


class _Service(NamedTuple):
    """One of the two services.

    Attributes:
        target: "host:port" of the service.
        gateway: port of the gateway through which it is asked; None: over gRPC.
    """

    target: str
    gateway: int | None = None


@command
def ab(
    model: ModelOptions,
    output: OutputOptions,
    a: Annotated[str, typer.Option(metavar="FLAGS", help="Flags of `draftwood serve` for A.")] = "",
    b: Annotated[str, typer.Option(metavar="FLAGS", help="Flags of `draftwood serve` for B.")] = "",
    b_gateway: Annotated[bool, typer.Option("--b-gateway", help="Ask B through a gateway.")] = False,
    b_observed: Annotated[
        bool,
        typer.Option(
            "--b-observed",
            help="B sends traces of all calls, metrics and logs to a collector, and its metrics are scraped.",
        ),
    ] = False,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of requests at once.")] = "1,8",
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of rounds with A and B.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per answer.")] = 128,
) -> None:
    """Tokens per second of B relative to A, on the same questions in turn.

    Services and clients share the machine. Each round has a new tenant, so that both draft from nothing learned before.
    """
    levels, texts = read_levels(streams), read_prompts(None)
    if a == b and not (b_gateway or b_observed):
        raise InvalidInputError("b", b, "must differ from A: give --b, --b-gateway or --b-observed")
    ratios: dict[int, list[float]] = {level: [] for level in levels}
    with ExitStack() as stack:
        chosen = stack.enter_context(chosen_model(model))
        flags = [*chosen.server_flags, "--max-running", str(max(levels)), "--audit-share", "0"]
        extra = stack.enter_context(observed()) if b_observed else ()
        first = _Service(stack.enter_context(running_server(*flags, *shlex.split(a))))
        target = stack.enter_context(running_server(*flags, *shlex.split(b), *extra))
        second = _Service(target, stack.enter_context(running_gateway(target)).port if b_gateway else None)
        load = OtherLoad()
        for number, level in progress([(n, level) for n in range(pairs) for level in levels], "pairs"):
            chunk = [*islice(cycle(texts), number * level, (number + 1) * level)]
            rates = {}
            for service in (second, first) if number % 2 else (first, second):
                rates[service] = uvloop.run(_rate(service, chunk, max_tokens, f"round-{number}-{level}"))
            ratios[level].append(rates[second] / rates[first])
        busy = load.share()
    rows = [_row(level, ratios[level]) for level in levels]
    columns = {"streams": "{streams}", "pairs": "{pairs}", "tokens/s, B / A": "{ratio:.3f}"}
    shown = table(f"{chosen.name}: A and B{warning(busy)}", rows, columns | {"95% interval": "{low:.3f} to {high:.3f}"})
    sides = {"a": a, "b": b, "b_gateway": b_gateway, "b_observed": b_observed}
    output.report(shown, rows, model=chosen.name, busy=busy, **sides)


async def _rate(service: _Service, texts: Sequence[str], max_tokens: int, tenant: str) -> float:
    """Tokens per second of these requests at once."""
    async with AsyncClient(service.target, tenant=tenant) as client:
        name = (await client.model_info()).model  # also connects before the clock starts
        asked = [
            _over_grpc(client, text, max_tokens)
            if service.gateway is None
            else _through(service.gateway, name, text, max_tokens, tenant)
            for text in texts
        ]
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*asked))
        return tokens / (time.perf_counter() - began)


async def _over_grpc(client: AsyncClient, text: str, max_tokens: int) -> int:
    options: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    async with client.stream([ChatMessage("user", text)], **options) as stream:
        return sum([len(delta.token_ids) async for delta in stream])


async def _through(port: int, model: str, text: str, max_tokens: int, tenant: str) -> int:
    """Reads the stream as bytes: a client's own work is not measured."""
    request = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "draftwood": {"tenant": tenant},
    }
    body = json.dumps(request).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    writer.write(f"{head}connection: close\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    at = answer.rfind(b'"completion_tokens":')
    if at < 0:
        raise BenchmarkError(f"the gateway answered {answer[:200]!r}")
    return int(answer[at + 20 :].split(b",", 1)[0])


def _row(streams: int, ratios: Sequence[float]) -> dict[str, Any]:
    """Tokens per second of B relative to A: the median of the pairs, and its 95% interval."""
    drawn = np.random.default_rng(0).choice(np.array(ratios), (_RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975]).round(4).tolist()
    ratio = round(statistics.median(ratios), 4)
    return {"streams": streams, "pairs": len(ratios), "ratio": ratio, "low": low, "high": high}
