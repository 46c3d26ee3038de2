"""Writes a call's messages, filled up if asked for, and ends a call whose client does not read them, or sends none
where one is due."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from draftwood.v1 import generation_pb2 as pb
from draftwood_service.errors import ClientDisconnectedError, ReaderStalledError

Request = TypeVar("Request")

_SMALLEST = 2
"""Bytes of an empty entry of `padding`: tag and length."""


class Writer:
    """Async context manager around a call's answer. A message that is not read within `stall_seconds` ends it.

    With `reading`, neither may the client let so long pass until its next message, or the end of its stream.

    Args:
        padding: responses of Generate are filled up to a multiple of so many bytes; 0 fills up none.

    One timer serves all messages: a timeout for each message would cost more than sending it.

    Raises:
        ReaderStalledError: on exit, if a message waited too long.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any], stall_seconds: float, padding: int = 0) -> None:
        self._context = context
        self._padding = padding
        self._stall_seconds = stall_seconds
        self._waiting_since: float | None = None
        self._timeout = asyncio.timeout(None)

    async def write(self, message: Message) -> None:
        """Returns when gRPC has accepted the message.

        Raises:
            ClientDisconnectedError: the call has ended.
        """
        if self._padding and isinstance(message, pb.GenerateResponse):
            pad(message, self._padding)
        self._waiting_since = self._loop.time()
        try:
            await self._context.write(message)
        except grpc.aio.InternalError:
            raise ClientDisconnectedError() from None
        self._waiting_since = None

    async def reading(self, requests: AsyncIterator[Request]) -> AsyncIterator[Request]:
        """The messages of a client's stream."""
        while True:
            self._waiting_since = self._loop.time()
            try:
                request = await anext(requests)
            except StopAsyncIteration:
                return
            finally:
                self._waiting_since = None
            yield request

    async def __aenter__(self) -> Writer:
        await self._timeout.__aenter__()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._stall_seconds, self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError:
            raise ReaderStalledError(self._stall_seconds) from None

    def _check(self) -> None:
        now = self._loop.time()
        left = self._stall_seconds - (0.0 if self._waiting_since is None else now - self._waiting_since)
        if left <= 0:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_later(left, self._check)


def pad(message: pb.GenerateResponse, multiple: int) -> None:
    """Adds random bytes, which no compression on the way removes, so that the serialized size is a multiple."""
    gap = -message.ByteSize() % multiple
    if gap == 0:
        return
    if gap < _SMALLEST:
        gap += multiple
    size = _entry(gap)
    if size is None:  # the length takes a byte too many or too few: an empty entry takes the difference
        message.padding.append(b"")
        size = _entry(gap - _SMALLEST)
        assert size is not None
    message.padding.append(os.urandom(size))


def _entry(gap: int) -> int | None:
    """Bytes in an entry of `padding` that takes `gap` bytes with its tag and length; None if there is no such entry."""
    for length_bytes in (1, 2, 3):
        size = gap - 1 - length_bytes
        if size >= 0 and max(1, math.ceil(size.bit_length() / 7)) == length_bytes:
            return size
    return None
