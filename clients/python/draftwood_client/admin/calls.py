"""Calls of all clients, blocking and asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio

from draftwood_client.connection import Connection
from draftwood_client.errors import ClientClosedError
from draftwood_client.options import CallOptions
from draftwood_client.protocol.status import cancelled_error

_Response = TypeVar("_Response")


class Calls:
    """A channel, and calls on it. Thread-safe."""

    def __init__(self, connection: Connection, client: str = "") -> None:
        self._connection = connection
        self._name = client or f"the client of {connection.target}"
        self._channel = connection.open_channel()
        self._closed = False

    @property
    def channel(self) -> grpc.Channel:
        """Raises `ClientClosedError`."""
        if self._closed:
            raise ClientClosedError(self._name)
        return self._channel

    def ask(self, method: Callable[..., _Response], request: object, call: CallOptions) -> _Response:
        """Raises `StatusError`, `ArgumentError`."""
        timeout, metadata = self._connection.read(call)
        try:
            return method(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self._connection.error(error, timeout) from error

    def pages(self, method: Callable[..., _Response], request: Any, call: CallOptions) -> Iterator[_Response]:
        """All pages of a list, each read when it is asked for. Raises as `ask`."""
        while True:
            page: Any = self.ask(method, request, call)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def stream(
        self,
        method: Callable[..., Iterator[_Response]],
        request: object,
        call: CallOptions,
        default_timeout: float | None = None,
    ) -> Iterator[_Response]:
        """The responses of a stream, for at most `default_timeout` seconds if `call` has no timeout.

        Raises `StatusError`, `ArgumentError`.
        """
        timeout, metadata = self._connection.read({"timeout": default_timeout, **call})
        try:
            yield from method(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self._connection.error(error, timeout) from error

    def close(self) -> None:
        self._closed = True
        self._channel.close()


class AsyncCalls:
    """`Calls` for asyncio. Belongs to the event loop of its first call."""

    def __init__(self, connection: Connection, client: str = "") -> None:
        self._connection = connection
        self._name = client or f"the client of {connection.target}"
        self._channel: grpc.aio.Channel | None = None
        self._closed = False

    @property
    def channel(self) -> grpc.aio.Channel:
        """Opened on first use, since it belongs to the running event loop. Raises `ClientClosedError`."""
        if self._closed:
            raise ClientClosedError(self._name)
        if self._channel is None:
            self._channel = self._connection.open_async_channel()
        return self._channel

    async def ask(self, method: Callable[..., Awaitable[_Response]], request: object, call: CallOptions) -> _Response:
        """Raises `StatusError`, `ArgumentError`."""
        timeout, metadata = self._connection.read(call)
        try:
            return await method(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, timeout) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error() from None

    async def pages(
        self, method: Callable[..., Awaitable[_Response]], request: Any, call: CallOptions
    ) -> AsyncIterator[_Response]:
        """As of `Calls`."""
        while True:
            page: Any = await self.ask(method, request, call)
            yield page
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def stream(
        self, method: Callable[..., AsyncIterable[_Response]], request: object, call: CallOptions
    ) -> AsyncIterator[_Response]:
        """The responses of a stream, without a deadline unless `call` has one. Raises as `ask`."""
        timeout, metadata = self._connection.read({"timeout": None, **call})
        try:
            async for one in method(request, timeout=timeout, metadata=metadata):
                yield one
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, timeout) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error() from None

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


def raise_if_task_cancelled() -> None:
    """Inside `except CancelledError`: raises it again if the task was cancelled.

    grpc.aio also raises it if only the RPC was cancelled, which is no cancellation of the task.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise
