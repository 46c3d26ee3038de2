"""What others see through the gateway during an attack."""

from __future__ import annotations

import asyncio
import json
import time

from tests.security.abuse.probes import NEIGHBOUR, PROBE_LIMIT, PROBE_TOKENS, Seen, probe_by


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
