"""HTTP/1.1 of uvicorn, with bounds on what a connection may send and how long it may take.

With httptools uvicorn itself limits neither headers nor times: its keep-alive timeout stops at the first byte.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from draftwood_service.gateway.errors import error_body
from draftwood_service.gateway.http.connections import Connections

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


def protocol(connections: Connections, context: ssl.SSLContext | None, **others: Any) -> BoundedProtocol | TlsProtocol:
    """That of a new connection.

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
