"""The link between the service and its engine: one stream socket with pickled messages both ways.

The engine runs in a process of its own, so that gRPC's threads and the engine's never wait for the same interpreter
lock. `Link` is the event loop's end, `EngineEnd` the engine's. Both ends are this program: nothing from outside is
unpickled.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from draftwood_memory.memory import MemoryOperation
from draftwood_model_runner.request import Request
from draftwood_service.engine.audits import AuditResult
from draftwood_service.engine.reports import EngineReport
from draftwood_service.engine.stream import Output

_HEADER = struct.Struct("!I")
_CHUNK = 1 << 18
"""Bytes per read; an ordinary message has a few hundred."""


class ServiceEnded(BaseException):
    """The service has ended while the engine loads. Not an `Exception`, which the code that loads might catch."""


def service_has_ended(error: BaseException) -> bool:
    """Whether an error is `ServiceEnded`, or was raised for one, as an ImportError may be."""
    seen: set[int] = set()
    while id(error) not in seen:
        if isinstance(error, ServiceEnded):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__ or error
    return False


class Add(NamedTuple):
    """To the engine: the samples of one request, its id on the link, and the weight of its tenant."""

    id: int
    samples: SequenceOf[Request]
    weight: float = 1.0


class Control(NamedTuple):
    """To the engine, of a request: it ends without further output, gives up its slots, or waits for slots again."""

    id: int
    action: Literal["cancel", "pause", "resume"]


class MemoryRequest(NamedTuple):
    """To the engine's process: an operation on memories, which one `MemoryResponse` with the same id follows."""

    id: int
    operation: MemoryOperation[Any]


class MemoryResponse(NamedTuple):
    """From the engine's process: the operation's result, or its error."""

    id: int
    result: Any
    error: BaseException | None


class TokenizerFound(NamedTuple):
    """From the engine, while it loads: `Tokenizer.class_path`. The service loads the model's tokenizer meanwhile."""

    class_path: str


class Ready(NamedTuple):
    """From the engine: it is loaded; `info` is its `ModelInfo`."""

    info: Any


class Died(NamedTuple):
    """From the engine: its last message, with the error that ended it."""

    error: BaseException


ToEngine: TypeAlias = Add | Control | MemoryRequest
FromEngine: TypeAlias = TokenizerFound | Ready | list[Output] | MemoryResponse | AuditResult | EngineReport | Died
"""Among them the outputs of one or several steps in order, an answer that was decoded again, and a report a second."""


class Link(asyncio.Protocol):
    """The event loop's end.

    Args:
        on_message: called with each message of the engine.
        on_lost: called once, when the engine's end is closed.
    """

    def __init__(self, on_message: Callable[[Any], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= _HEADER.size:
            stop = start + _HEADER.size + _HEADER.unpack_from(self._buffer, start)[0]
            if stop > end:
                break
            message = pickle.loads(memoryview(self._buffer)[start + _HEADER.size : stop])
            start = stop
            self._on_message(message)
        del self._buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._on_lost()

    def send(self, message: ToEngine) -> None:
        """Sends without waiting; does nothing once the engine's end is closed."""
        if self._transport is not None:
            self._transport.write(framed(message))

    def close(self) -> None:
        """Closes the connection, which ends the engine; `on_lost` is not called for it."""
        self._on_lost = lambda: None
        if self._transport is not None:
            self._transport.close()


class EngineEnd:
    """The engine's end. It blocks while it sends, and while it waits for a message.

    Raises:
        EOFError: from every method, once the service's end is closed.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = Connection(connection.detach())
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._arrivals = select.poll()
        self._arrivals.register(self._connection, select.POLLIN)
        self._arrivals.register(self._wake_read, select.POLLIN)
        self._sending = threading.Lock()

    def send(self, message: FromEngine) -> None:
        """From any thread."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except OSError as error:
            raise EOFError from error

    def receive(self, wait: float | None) -> ToEngine | None:
        """The next message; None if there is none for `wait` seconds (None: for ever), or after `interrupt`."""
        ready = {fd for fd, _ in self._arrivals.poll(None if wait is None else 1000 * wait)}
        if self._wake_read in ready:
            os.read(self._wake_read, _CHUNK)
        if not ready - {self._wake_read}:
            return None
        try:
            message: ToEngine = pickle.loads(self._connection.recv_bytes())
        except OSError as error:
            raise EOFError from error
        return message

    def interrupt(self) -> None:
        """Makes a waiting `receive` return. From any thread."""
        with suppress(BlockingIOError):  # the pipe is full, so `receive` will return anyway
            os.write(self._wake_write, b"!")

    def close(self) -> None:
        with self._sending:
            self._connection.close()


def framed(message: object) -> bytes:
    """A message with its length in front, as `Connection` reads it."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def picklable(error: BaseException) -> BaseException:
    """The error itself if it can be pickled, else a RuntimeError with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
