"""What an eavesdropper between server and client sees of a TLS connection: sizes and times of its records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

Record: TypeAlias = tuple[float, int]
"""(time of `time.perf_counter`, bytes) of a TLS record that the server sent."""

_HEADER = 5
"""Bytes of the clear header of a TLS record: type, version (2), length (2)."""
_CONTROL = 39
"""Bytes of the largest record that holds no message but an answer to a ping (TLS 22, HTTP/2 17). Clients ping when they
like, so such records would only move the others."""
_CHUNK = 65_536


@dataclass(slots=True)
class RecordReader:
    """Cuts the bytes of one direction of a connection into TLS records.

    Attributes:
        records: those that have arrived whole, with their headers; without HTTP/2's small control frames.
    """

    records: list[Record] = field(default_factory=list)
    _unread: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes, now: float) -> None:
        self._unread += data
        while len(self._unread) >= _HEADER:
            size = _HEADER + int.from_bytes(self._unread[3:_HEADER])
            if len(self._unread) < size:
                return
            del self._unread[:size]
            if size > _CONTROL:
                self.records.append((now, size))


@asynccontextmanager
async def eavesdropped(target: str) -> AsyncIterator[tuple[str, RecordReader]]:
    """A local address that leads to `target`, and what is seen there. For one connection."""
    host, _, port = target.rpartition(":")
    seen = RecordReader()
    relays: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        for relayed in (_relay(reader, server_writer, None), _relay(server_reader, writer, seen)):
            relays.add(asyncio.create_task(relayed))

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"localhost:{proxy.sockets[0].getsockname()[1]}", seen
    finally:
        proxy.close()
        for relay in relays:
            relay.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _relay(source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: RecordReader | None) -> None:
    try:
        while data := await source.read(_CHUNK):
            if seen is not None:
                seen.feed(data, time.perf_counter())
            sink.write(data)
            await sink.drain()
    finally:
        sink.close()
