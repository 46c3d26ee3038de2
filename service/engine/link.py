"""The link between the service and its engine: one stream socket, whole objects both ways, pickled.

The engine runs in a process of its own, so that gRPC's threads and the engine's never wait for one interpreter lock.
`Link` is the event loop's end, `EngineEnd` the engine's. Both ends are ours: nothing is unpickled that came from
outside.
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
from contextlib import suppress
from typing import Any, NamedTuple, cast

from model_runner.sequence import Finish, Sequence, SequenceStats, TokenLogprobs

_HEADER = struct.Struct("!I")
_CHUNK = 1 << 18


class Add(NamedTuple):
    """To the engine: a request's samples, with the names that both ends have for them; without strategy and grammar."""

    sequences: dict[int, Sequence]


class Cancel(NamedTuple):
    """To the engine: ends sequences without further output."""

    names: list[int]


class Ask(NamedTuple):
    """To the engine's process: a question about memories, which one `Answer` follows."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Answer(NamedTuple):
    """From the engine's process: what `method` returned, or raised."""

    number: int
    value: Any
    error: BaseException | None


class Ready(NamedTuple):
    """From the engine: it stands; `facts` is what its maker tells the service."""

    facts: Any


class Written(NamedTuple):
    """What one step wrote for one sequence, as in `StepOutput`; `stats` come with the first output and the last."""

    name: int
    token_ids: list[int]
    texts: list[str]
    drafted: list[bool]
    finish: Finish | None
    logprobs: list[TokenLogprobs]
    stats: SequenceStats | None


class Stepped(NamedTuple):
    """From the engine: what one or several steps wrote, in order."""

    outputs: list[Written]


class Died(NamedTuple):
    """From the engine: its last word."""

    error: BaseException


class Link(asyncio.Protocol):
    """The event loop's end.

    Args:
        on_message: gets each message of the engine.
        on_lost: called once when the engine's end is gone.
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

    def send(self, message: Add | Cancel | Ask) -> None:
        """Sends without waiting; into the void once the engine's end is gone."""
        if self._transport is not None:
            self._transport.write(framed(message))

    def close(self) -> None:
        """Tells the engine's end to end."""
        if self._transport is not None:
            self._transport.close()


class EngineEnd:
    """The engine's end. It blocks: while it sends, and where it waits for a message.

    Raises:
        EOFError: from every method, once the service's end is gone.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._connection = connection
        self._alarm, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._arrivals.register(self._alarm, select.POLLIN)
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def send(self, message: Ready | Stepped | Died | Answer) -> None:
        """From any thread."""
        data = framed(message)
        try:
            with self._sending:
                self._connection.sendall(data)
        except OSError as error:
            raise EOFError from error

    def receive(self, wait: bool) -> Add | Cancel | Ask | None:
        """The next message; None where there is none and `wait` is false, or `interrupt` was called."""
        if not self._buffer:
            arrived = self._arrivals.poll(None if wait else 0)
            if not arrived:
                return None
            ready = {fd for fd, _ in arrived}
            if self._alarm in ready:
                os.read(self._alarm, _CHUNK)
            if self._connection.fileno() not in ready:
                return None
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        message: Add | Cancel | Ask = pickle.loads(self._read(size))
        return message

    def interrupt(self) -> None:
        """Lets a `receive` that waits return. From any thread."""
        with suppress(BlockingIOError):  # it rings already
            os.write(self._ring, b"!")

    def close(self) -> None:
        with self._sending:
            self._connection.close()

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                data = self._connection.recv(_CHUNK)
            except OSError as error:
                raise EOFError from error
            if not data:
                raise EOFError
            self._buffer += data
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def framed(message: object) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(data)) + data


def portable(error: BaseException) -> BaseException:
    """The error itself where it survives the way, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
