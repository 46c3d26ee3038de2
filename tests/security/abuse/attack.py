"""What an attack is, and how its calls ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

_UNTYPED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


@dataclass(slots=True)
class Statuses:
    """How the calls of an attack ended.

    Attributes:
        counts: by status code of gRPC or HTTP; CANCELLED where the attack ended the call, CLOSED where the gateway
            closed a connection without an answer.
        untyped: the first status that does not tell a caller what to change, if there is one.
    """

    counts: Counter[str]
    untyped: str = ""

    def add(self, code: grpc.StatusCode, details: str | None) -> None:
        self.counts[code.name] += 1
        if code in _UNTYPED and not self.untyped:
            self.untyped = f"{code.name}: {details}"

    def add_http(self, answer: bytes) -> None:
        """Counts the first line of an answer; none is a connection that was closed."""
        status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "CLOSED"
        self.counts[status] += 1
        if status == "500" and not self.untyped:
            self.untyped = answer[:200].decode(errors="replace")


Traffic = Callable[[str, float, Statuses], Awaitable[None]]
"""(target, seconds, statuses): attacks for so long."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Attributes:
    name: in reports.
    line: what it does.
    allowed: statuses that its calls may end with.
    prepare: makes its traffic, payloads included, before the time is taken.
    gateway: its target is the gateway, and it is what others see through the gateway that counts.
    """

    name: str
    line: str
    allowed: frozenset[str]
    prepare: Callable[[], Traffic]
    gateway: bool = False
