"""The connections of a gateway: how many there may be, and how long each may take to send a request or read an answer.

uvicorn bounds none of that: anybody who reaches the port could hold every file descriptor without a key.
"""

from __future__ import annotations

import asyncio
import json
import math
import resource
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftwood_service.gateway.errors import error_body

MAX_CONNECTIONS = 4096
MAX_UNFINISHED_BYTES = 128 * 2**20
"""Bytes of all requests that are not complete yet. Each is far above what honest clients need."""
_RESERVED_FILES = 320
"""File descriptors for the connections to the service, for logs, and for those that are accepted before others are
closed (`BACKLOG` at most)."""
BACKLOG = 256
_SWEEP_SECONDS = 1.0
MAX_HEADER_BYTES = 32 * 1024
"""Limit of the request line and all headers together; a bearer token has up to 8 KiB."""
MAX_DISCARDED_BYTES = 2**20
"""Limit of the bytes that are discarded after a refused request."""
HEADER_SECONDS = 10.0
"""From the first byte of a request, or from when a connection is opened, to the end of its headers. Also for a TLS
handshake."""
BODY_SECONDS = 60.0
"""From the end of the headers to that of the body."""
READ_SECONDS = 30.0
"""For which a client may read nothing of an answer that waits to be sent, as for `--stall-timeout` of the service."""
_CLOSE_SECONDS = 5.0
"""For a client to read what is sent before a connection is closed."""


class Connection(Protocol):
    """A connection, as `Connections` knows it."""

    def deadline(self) -> float:
        """When it is too late, on the clock of `time.monotonic`; infinity while the gateway works for it."""
        ...

    def expire(self) -> None:
        """Ends it, because the deadline has passed."""
        ...

    def abort(self) -> None:
        """Closes it at once, without another byte."""
        ...


class Connections:
    """All connections. When there are too many, the one that has waited longest is ended for a new one.

    A connection waits from when it is opened, or its last answer has ended, until it has sent a whole request, and
    while its client does not read its answer: it costs a file descriptor and its bytes meanwhile, and needs no key.

    Args:
        limit: maximum number of connections.
        byte_limit: maximum bytes of all incomplete requests together.
        ended: called with the reason when one is ended: "late", "full" or "bytes".
    """

    def __init__(
        self, limit: int, byte_limit: int = MAX_UNFINISHED_BYTES, ended: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._limit = limit
        self._byte_limit = byte_limit
        self._ended = ended
        self._all: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}
        """Ordered by how long they have waited, the longest first."""
        self._bytes: dict[Connection, int] = {}
        """Bytes of incomplete requests, the oldest request first."""
        self._total = 0
        self._sweeping: asyncio.TimerHandle | None = None

    def open(self, connection: Connection) -> bool:
        """Counts a new connection; False if there are too many, and requests of all others are being answered."""
        if len(self._all) >= self._limit:
            victim = next(iter(self._waiting), None)
            if victim is None:
                self._ended("full")
                return False
            self._end(victim, "full")
        self._all.add(connection)
        self._waiting[connection] = None
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)
        return True

    def received(self, connection: Connection, size: int) -> None:
        """Counts bytes of a request that is not complete; with 0, that it begins."""
        if connection not in self._all:
            return
        if connection not in self._bytes:
            self._wait(connection)
        self._bytes[connection] = self._bytes.get(connection, 0) + size
        self._total += size
        while self._total > self._byte_limit:
            self._end(next(iter(self._bytes)), "bytes")

    def complete(self, connection: Connection) -> None:
        """Its request is complete, and is answered now."""
        self._forget(connection)

    def idle(self, connection: Connection) -> None:
        """Its last answer has ended, or its client does not read it."""
        if connection in self._all and connection not in self._bytes:
            self._wait(connection)

    def resumed(self, connection: Connection) -> None:
        """Its client reads its answer again."""
        if connection not in self._bytes:
            self._waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """It is gone. May be called twice."""
        self._forget(connection)
        self._all.discard(connection)

    def _wait(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._waiting[connection] = None

    def _forget(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._total -= self._bytes.pop(connection, 0)

    def _end(self, connection: Connection, reason: str) -> None:
        self.closed(connection)
        self._ended(reason)
        connection.abort()

    def _sweep(self) -> None:
        self._sweeping = None
        now = time.monotonic()
        for connection in [each for each in self._all if each.deadline() < now]:
            self._ended("late")
            connection.expire()
        if self._all:
            self._sweeping = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._sweep)


def connection_limit() -> int:
    """How many connections this process can have. Raises its soft limit of open files as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + _RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft - _RESERVED_FILES))


def run_server(
    app: ASGIApp,
    host: str,
    port: int,
    context: ssl.SSLContext | None,
    drain_seconds: int,
    ended: Callable[[str], None],
) -> None:
    """Answers requests until SIGTERM or SIGINT.

    Args:
        context: for TLS.
        drain_seconds: for streams to end.
        ended: called with the reason when a connection is ended, see `Connections`.
    """
    connections = Connections(connection_limit(), ended=ended)
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=partial(protocol, connections, context),  # type: ignore[arg-type]  # uvicorn only calls it
        loop="auto" if context is None else "asyncio",  # see TlsProtocol
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=drain_seconds,
    )


def protocol(connections: Connections, context: ssl.SSLContext | None, **others: Any) -> BoundedProtocol | TlsProtocol:
    """The protocol of a new connection.

    Args:
        connections: all of the gateway.
        context: for TLS.
        others: of uvicorn.
    """
    bounded = BoundedProtocol(connections, **others)
    return bounded if context is None else TlsProtocol(connections, context, bounded)


class BoundedProtocol(HttpToolsProtocol):
    """A connection.

    Args:
        connections: all of the gateway.
        others: of uvicorn.
    """

    def __init__(self, connections: Connections, **others: Any) -> None:
        super().__init__(**others)
        self._connections = connections
        self._receive_by = math.inf
        self._read_by = math.inf
        self._sending = False
        """Whether a request has begun to come and is not complete."""
        self._in_body = False
        """Whether its headers are complete: then `cycle`, which is uvicorn's, answers it, and a former one before."""
        self._unparsed = 0
        """Bytes since the last piece of a body or the last whole request."""
        self._problem: tuple[int, str] | None = None
        self._refused = False
        self._discarded = 0

    # Connection

    def deadline(self) -> float:
        return min(self._receive_by, self._read_by)

    def expire(self) -> None:
        answer = self.cycle
        free = answer is None or (not answer.response_started if self._in_body else answer.response_complete)
        if self._sending and free and not self._refused:
            limits = f"headers have {HEADER_SECONDS:g} s, a body {BODY_SECONDS:g} s"
            self._refuse(408, f"the request was not complete in time: {limits}")
        else:
            self.abort()

    def abort(self) -> None:
        self.transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._connections.open(self):
            self._receive_by = time.monotonic() + HEADER_SECONDS
        else:
            self._refuse(503, "the gateway has no place for another connection; try again later")
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED_BYTES:
                self.abort()
            return
        self._begin_request()
        self._unparsed += len(data)
        self._connections.received(self, len(data))
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._unparsed > MAX_HEADER_BYTES and not self._refused:
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def pause_writing(self) -> None:
        self._read_by = time.monotonic() + READ_SECONDS
        self._connections.idle(self)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._read_by = math.inf
        if self.cycle is not None and not self.cycle.response_complete:
            self._connections.resumed(self)
        super().resume_writing()

    # httptools

    def on_message_begin(self) -> None:
        self._begin_request()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._problem = 431, f"the headers have {size} bytes; at most {MAX_HEADER_BYTES} are allowed"
            raise ValueError("too large headers")  # httptools stops reading, and uvicorn calls send_400_response
        self._unparsed = 0
        self._in_body = True
        self._receive_by = time.monotonic() + BODY_SECONDS
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unparsed = 0
        self._sending = self._in_body = False
        self._receive_by = math.inf
        self._connections.complete(self)
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._wait()

    # uvicorn

    def on_response_complete(self) -> None:
        if self._sending:  # an answer that did not need the rest of the request
            self._receive_by = min(self._receive_by, time.monotonic() + _CLOSE_SECONDS)
        elif not self.pipeline:
            self._wait()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(*(self._problem or (400, "is not an HTTP request that can be read")))

    def _begin_request(self) -> None:
        if not self._sending:
            self._sending = True
            self._receive_by = time.monotonic() + HEADER_SECONDS
            self._connections.received(self, 0)

    def _wait(self) -> None:
        """For the next request. uvicorn closes the connection first, but a close waits until the client has read."""
        self._receive_by = time.monotonic() + self.timeout_keep_alive + _CLOSE_SECONDS
        self._connections.idle(self)

    def _refuse(self, status: int, problem: str) -> None:
        """Answers with an error in OpenAI's form. What still comes is discarded until the client closes the connection,
        or is late: if it were closed at once, what it has sent would make its system drop the answer."""
        self._refused = True
        body = json.dumps(error_body(status, problem)).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._receive_by = time.monotonic() + _CLOSE_SECONDS


class TlsProtocol(asyncio.Protocol):
    """A connection until its TLS handshake is complete, then that of `inner`: counted from the beginning.

    For asyncio's own event loop: with uvloop 0.23, a handshake on a connection that was paused never ends.

    Args:
        context: of the server.
        inner: gets the connection.
    """

    def __init__(self, connections: Connections, context: ssl.SSLContext, inner: BoundedProtocol) -> None:
        self._connections = connections
        self._context = context
        self._inner = inner
        self._early: list[bytes] = []
        self._late_at = time.monotonic() + HEADER_SECONDS
        self._plain: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None

    def deadline(self) -> float:
        return self._late_at

    def expire(self) -> None:
        self.abort()

    def abort(self) -> None:
        assert self._plain is not None
        self._plain.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._plain = transport
        if self._connections.open(self):
            transport.pause_reading()  # the first byte is TLS
            self._task = asyncio.get_running_loop().create_task(self._shake_hands(transport))
        else:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)  # a client may send its request with the end of the handshake

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.closed(self)

    async def _shake_hands(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        secure: asyncio.Transport | None = None
        with suppress(OSError, ssl.SSLError):  # whoever speaks no TLS
            secure = await loop.start_tls(
                transport, self, self._context, server_side=True, ssl_handshake_timeout=HEADER_SECONDS
            )
        self._connections.closed(self)
        if secure is None or secure.is_closing():
            transport.abort()
            return
        secure.set_protocol(self._inner)
        self._inner.connection_made(secure)
        for data in self._early:
            self._inner.data_received(data)
