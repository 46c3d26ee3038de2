"""Attacks on the gateway by clients that show no key. Each once stopped it, or took its memory or file descriptors."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from tests.security.abuse.attack import Attack, Statuses, Traffic

MOST_FILES = 1024
"""Open files of the gateway, as in many containers."""
_HALF_OPEN = 1500
"""Connections of the attack that keeps them half open: more than the gateway may have files."""
_FAIR_STREAMS = 4
_PIECE = 64 * 1024
_BODY_BYTES = 4 * 2**20 - 100
_PAUSE = 0.25
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What an attack does with one connection."""


def _clients(count: int, client: Client, pause: float = 0.0) -> Traffic:
    """So many clients at once, each with one connection after the other."""

    async def attack(target: str, seconds: float, statuses: Statuses) -> None:
        end = time.monotonic() + seconds
        host, port = target.rsplit(":", 1)

        async def connections() -> None:
            while time.monotonic() < end:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    try:
                        with suppress(OSError):
                            await client(reader, writer)
                        await _count(reader, statuses)
                    finally:
                        writer.transport.abort()
                await asyncio.sleep(pause)

        tasks = [asyncio.create_task(connections()) for _ in range(count)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    return attack


async def _count(reader: asyncio.StreamReader, statuses: Statuses) -> None:
    """Reads until the gateway closes the connection."""
    answer = b""
    with suppress(OSError):
        while part := await reader.read(_PIECE):
            answer = answer or part
    statuses.add_http(answer)


def _endless_header() -> Traffic:
    piece = b"a" * _PIECE

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ")
        while not reader.at_eof() and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return _clients(1, client)


def _large_header() -> Traffic:
    return _sends(b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * (32 << 20) + b"\r\n\r\n")


def _half(begun: bytes) -> Traffic:
    """Connections on which a byte comes now and then, and never the last one."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        while not reader.at_eof() and not writer.is_closing():
            await asyncio.sleep(0.5)
            writer.write(b" ")
            await writer.drain()

    return _clients(_HALF_OPEN, client)


def _many_values() -> Traffic:
    message = '{"role":"u"}'
    messages = ",".join([message] * (_BODY_BYTES // (len(message) + 1)))
    body = f'{{"messages":[{messages}]}}'.encode()
    return _sends(_HEAD.replace(b"/v1/", b"/v1/chat/") + b"content-length: %d\r\n\r\n" % len(body) + body)


def _sends(request: bytes) -> Traffic:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        await writer.drain()
        writer.write_eof()

    return _clients(1, client, _PAUSE)


def _fair() -> Traffic:
    fields = {"prompt": "A client asks.", "max_tokens": 400, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "draftwood": {"tenant": "fair"}}).encode()
    request = _HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)

    return _clients(_FAIR_STREAMS, client)


_CUT = frozenset({"431", "CLOSED"})
"""CLOSED is a connection that the gateway ended while a client was still sending, or to make place for another."""
_LATE = frozenset({"408", "CLOSED"})
_HALF_HEADER, _HALF_BODY = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", _HEAD + b"content-length: 100000\r\n\r\n{"
GATEWAY_ATTACKS = [
    Attack("http-fair", "a well-behaved tenant through the gateway", frozenset({"200"}), _fair, gateway=True),
    Attack("http-endless-header", "a header without end", _CUT, _endless_header, gateway=True),
    Attack("http-large-header", "headers of 32 MiB", _CUT, _large_header, gateway=True),
    Attack("http-half-headers", "1,500 half headers", _LATE, partial(_half, _HALF_HEADER), gateway=True),
    Attack("http-half-bodies", "1,500 half bodies", _LATE, partial(_half, _HALF_BODY), gateway=True),
    Attack("http-many-values", "300,000 messages in 4 MiB", frozenset({"400"}), _many_values, gateway=True),
]
