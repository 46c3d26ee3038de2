"""What others see through the gateway during an attack."""

from __future__ import annotations

import asyncio
import json
import time

from tests.security.abuse.probes import NEIGHBOUR, PROBE_LIMIT, PROBE_PAUSE, PROBE_TOKENS, Seen


async def probe_gateway(target: str, seconds: float) -> Seen:
    """Measures for so long, on a connection of its own for each request."""
    seen, end = Seen(), time.monotonic() + seconds
    await asyncio.gather(_check_health(target, end, seen), _ask(target, end, seen))
    return seen


async def _check_health(target: str, end: float, seen: Seen) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    while (started := time.monotonic()) < end:
        try:
            await _until(target, request, b"ok")
            seen.health.append(time.monotonic() - started)
        except Exception as error:
            seen.health.append(PROBE_LIMIT)
            seen.refused.append(f"health: {type(error).__name__}: {error}")
        await asyncio.sleep(PROBE_PAUSE)


async def _ask(target: str, end: float, seen: Seen) -> None:
    number = 0
    while (started := time.monotonic()) < end:
        number += 1
        fields = {"prompt": f"Neighbour's question {number}", "max_tokens": PROBE_TOKENS, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "draftwood": {"tenant": NEIGHBOUR}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        try:
            seen.ttfts.append(await _until(target, head.encode() + body, b"data: ") - started)
        except Exception as error:
            seen.ttfts.append(PROBE_LIMIT)
            seen.refused.append(f"{type(error).__name__}: {error}")
        await asyncio.sleep(PROBE_PAUSE)


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
