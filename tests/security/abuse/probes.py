"""What others see during an attack: a health check, a neighbouring tenant with short requests, the memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_benchmarks.load.closed_loop import OWN_CONNECTION
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
        refused: the neighbour's requests that failed, with the reasons.
    """

    health: list[float] = field(default_factory=list)
    ttfts: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


async def probe(target: str, seconds: float) -> Seen:
    """Measures for so long."""
    seen, end = Seen(), time.monotonic() + seconds
    await asyncio.gather(_check_health(target, end, seen), _ask(target, end, seen))
    return seen


async def _check_health(target: str, end: float, seen: Seen) -> None:
    request = health_pb2.HealthCheckRequest()
    async with grpc.aio.insecure_channel(target, options=[*OWN_CONNECTION.items()]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await stub.Check(request, timeout=PROBE_LIMIT)  # the first one connects
        while (started := time.monotonic()) < end:
            await stub.Check(request, timeout=PROBE_LIMIT)
            seen.health.append(time.monotonic() - started)
            await asyncio.sleep(PROBE_PAUSE)


async def _ask(target: str, end: float, seen: Seen) -> None:
    async with AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
        number = 0
        while (started := time.monotonic()) < end:
            number += 1
            try:
                prompt = f"Neighbour's question {number}"
                options = {"max_tokens": PROBE_TOKENS, "tenant": NEIGHBOUR, "ignore_eos": True}
                first = 0.0
                async with client.stream(prompt, timeout=PROBE_LIMIT, **options) as stream:  # type: ignore[arg-type]
                    async for delta in stream:
                        if delta.token_ids and not first:
                            first = time.monotonic() - started
                seen.ttfts.append(first)
            except Exception as error:
                seen.ttfts.append(PROBE_LIMIT)
                seen.refused.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(PROBE_PAUSE)


async def settled_mib(pid: int, seconds: float) -> float:
    """Resident memory of a service and its children when it has had time to give memory back: the least seen."""
    least, end = resident_mib(pid), time.monotonic() + seconds
    while time.monotonic() < end:
        await asyncio.sleep(0.25)
        least = min(least, resident_mib(pid))
    return least
