"""The connections of a gateway: how many there may be, and how long each may take to send a request or read an answer.

uvicorn bounds none of that: anybody who reaches the port could hold every file descriptor without a key.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from typing import Protocol

MAX_CONNECTIONS = 4096
MAX_UNFINISHED_BYTES = 128 * 2**20
"""Bytes of all requests that are not complete yet. Each is far above what honest clients need."""
_RESERVED_FILES = 320
"""File descriptors for the connections to the service, for logs, and for those that are accepted before others are
closed (`BACKLOG` at most)."""
BACKLOG = 256
_SWEEP_SECONDS = 1.0


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
        most: connections.
        most_bytes: of all incomplete requests.
        ended: called with the reason when one is ended: "late", "full" or "bytes".
    """

    def __init__(
        self, most: int, most_bytes: int = MAX_UNFINISHED_BYTES, ended: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._most = most
        self._most_bytes = most_bytes
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
        if len(self._all) >= self._most:
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
        while self._total > self._most_bytes:
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
        for connection in [one for one in self._all if one.deadline() < now]:
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
