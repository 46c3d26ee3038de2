"""What others see during an attack: a health check, a neighbouring tenant with short requests, the memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_benchmarks.closed_loop import OWN_CONNECTION
from draftwood_client import NO_RETRY, AsyncClient
from tests.process_memory import resident_mib

NEIGHBOUR = "neighbour"
PROBE_PAUSE = 0.02
"""Seconds between two health checks, and between two requests of the neighbour."""
PROBE_TOKENS = 10
PROBE_LIMIT = 30.0
"""Seconds after which a probe gives up."""


@dataclass(slots=True)
class Seen:
    """What the probes measured in one window; seconds.

    Attributes:
        health: of each health check.
        ttfts: of each request of the neighbour; one that failed counts as `PROBE_LIMIT`.
        refused: what failed, with the reasons.
    """

    health: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


Look = Callable[[int], Awaitable[float]]
"""One look, by its number: the seconds that it took. Raises if it was refused."""


async def probe_by(health: Look, ask: Look, seconds: float) -> Seen:
    """Looks for so long, both ways at once."""
    seen, end = Seen(), time.monotonic() + seconds

    async def keep_looking(look: Look, found: list[float], name: str) -> None:
        for number in count(1):
            try:
                found.append(await look(number))
            except Exception as error:
                found.append(PROBE_LIMIT)
                seen.refused.append(f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(PROBE_PAUSE)
            if time.monotonic() >= end:
                return

    await asyncio.gather(keep_looking(health, seen.health, "health"), keep_looking(ask, seen.ttfts, "request"))
    return seen


async def probe(target: str, seconds: float) -> Seen:
    """A service, over gRPC."""
    async with (
        grpc.aio.insecure_channel(target, options=[*OWN_CONNECTION.items()]) as channel,
        AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client,
    ):
        stub = health_pb2_grpc.HealthStub(channel)

        async def health(number: int) -> float:
            started = time.monotonic()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_LIMIT)
            return time.monotonic() - started

        async def ask(number: int) -> float:
            options: Any = {"max_tokens": PROBE_TOKENS, "tenant": NEIGHBOUR, "ignore_eos": True, "timeout": PROBE_LIMIT}
            started, first = time.monotonic(), 0.0
            async with client.stream(f"Neighbour's question {number}", **options) as stream:
                async for delta in stream:
                    if delta.token_ids and not first:
                        first = time.monotonic() - started
            return first

        await health(0)  # the first one connects
        return await probe_by(health, ask, seconds)


async def settled_mib(pid: int, seconds: float) -> float:
    """Resident memory of a service and its children when it has had time to give memory back: the least seen."""
    least, end = resident_mib(pid), time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.25)
        least = min(least, resident_mib(pid))
    return least


async def probe_gateway(target: str, seconds: float) -> Seen:
    """A gateway, on a connection of its own for each request."""

    async def health(number: int) -> float:
        started = time.monotonic()
        await _until(target, b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n", b"ok")
        return time.monotonic() - started

    async def ask(number: int) -> float:
        fields = {"prompt": f"Neighbour's question {number}", "max_tokens": PROBE_TOKENS, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "draftwood": {"tenant": NEIGHBOUR}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        started = time.monotonic()
        return await _until(target, head.encode() + body, b"data: ") - started

    return await probe_by(health, ask, seconds)


async def _until(target: str, request: bytes, wanted: bytes) -> float:
    """Sends a request and reads its answer to the end; returns when `wanted` had come."""
    host, port = target.rsplit(":", 1)
    async with asyncio.timeout(PROBE_LIMIT):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request)
            answer, seen = b"", 0.0
            while part := await reader.read(65_536):
                answer += part
                if not seen and wanted in answer:
                    seen = time.monotonic()
        finally:
            writer.transport.abort()
    if not seen or not answer.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(f"the answer is {answer[:100]!r}")
    return seen
