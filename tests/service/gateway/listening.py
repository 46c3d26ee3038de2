"""A gateway of this process on a real socket, in front of a service with an engine that follows a script.

It has an event loop of its own, of the kind that its command uses.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvicorn

from draftwood_service.gateway.app import Gateway
from draftwood_service.gateway.connections import Connections, protocol
from draftwood_service.gateway.services import OpenClient, ServiceClient
from tests.service.fakes import until


@dataclass
class Listening:
    """A running gateway.

    Attributes:
        ended: reasons for which connections were ended.
        made: what answers.
        writers: of all connections to it, which are closed at the end.
    """

    port: int
    ended: list[str]
    made: Gateway
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self, sent: bytes = b"", tls: ssl.SSLContext | None = None) -> tuple[Any, Any]:
        """A connection, on which some bytes were sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        self.writers.append(writer)
        writer.write(sent)
        await writer.drain()
        return reader, writer

    async def answered(self, sent: bytes, tls: ssl.SSLContext | None = None) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer on a connection of its own, read to the end."""
        return read_answer(await self.raw(sent, tls))

    async def raw(self, sent: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """As `answered`, all of it."""
        reader, _ = await self.open(sent, tls)
        received: bytes = await reader.read()
        return received

    async def posted(self, path: str, fields: Any) -> tuple[int, Any]:
        return await self.answered(post(path, fields))


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()


def post(path: str, fields: Any) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_answer(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return int(head.split()[1]), body.decode()
    return int(head.split()[1]), json.loads(body) if b"application/json" in head else body.decode()


class _Server(uvicorn.Server):
    """Ends without delay."""

    async def main_loop(self) -> None:
        await self.on_tick(0)
        while not self.should_exit:  # noqa: ASYNC110  # which another thread sets
            await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(
    target: str | Mapping[str, str],
    limit: int = 100,
    byte_limit: int = 8 << 20,
    tls: ssl.SSLContext | None = None,
    strict: bool = False,
    keyless: bool = True,
    hosts: Collection[str] | None = None,
    origins: Sequence[str] = (),
    **arguments: Any,
) -> AsyncIterator[Listening]:
    """Args:
    target: the service; or those of several models, by their names.
    limit, byte_limit: of `Connections`.
    tls: makes it HTTPS.
    strict, keyless: see `Gateway`.
    hosts, origins: of `Gateway.app`.
    arguments: of its clients.
    """
    ended: list[str] = []

    def opener(of: str) -> OpenClient:
        return lambda credential: ServiceClient(of, token=credential, **arguments)

    targets = {"": target} if isinstance(target, str) else target
    servers = {model: opener(of) for model, of in targets.items()}
    made = Gateway(servers, max_body_bytes=1 << 20, strict=strict, keyless=keyless)
    connections = Connections(limit, byte_limit, ended.append)
    config = uvicorn.Config(
        made.app([*origins], hosts),
        port=0,
        http=partial(protocol, connections, tls),  # type: ignore[arg-type]
        loop="auto" if tls is None else "asyncio",
        ws="none",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    server = _Server(config)
    running = threading.Thread(target=server.run)
    running.start()
    await until(lambda: server.started)
    made_here = Listening(server.servers[0].sockets[0].getsockname()[1], ended, made)
    try:
        yield made_here
    finally:
        for writer in made_here.writers:
            writer.close()
        server.should_exit = True
        await asyncio.to_thread(running.join)
