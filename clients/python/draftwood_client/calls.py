"""Calls of all clients: each is described once, and made on a blocking channel or on one of asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import update_wrapper, wraps
from types import TracebackType
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import grpc
import grpc.aio

from draftwood_client.connection import Connection
from draftwood_client.errors import ClientClosedError
from draftwood_client.options import CallOptions

_P = ParamSpec("_P")
_Result = TypeVar("_Result")
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True)
class Call(Generic[_Result]):
    """A call of one method of a client's service.

    Attributes:
        read: makes the result of a response.
        items: the field of a list in pages whose items are the results.
        stub: of another service than the client's.
    """

    method: str
    request: Any
    options: CallOptions
    read: Callable[[Any], _Result] = field(default=lambda response: response)
    items: str = ""
    stub: Any = None


class _Describing:
    """The base of `unary` and `streaming`: `client._calls` makes what the decorated method describes."""

    def __init__(self, describe: Callable[..., Call[Any]]) -> None:
        self._describe = describe
        update_wrapper(self, describe)  # type: ignore[arg-type]  # it is called through a client

    def _bound(self, client: Any, make: str) -> Any:
        if client is None:
            return self

        @wraps(self._describe)
        def call(*args: Any, **kwargs: Any) -> Any:
            described = self._describe(client, *args, **kwargs)
            return getattr(client._calls, make)(described.stub or client._stub_type, described)

        return call


class unary(_Describing, Generic[_P, _Result]):  # a decorator
    """Decorates a method that describes a call: it returns the result, or with asyncio what is awaited for it."""

    def __init__(self, describe: Callable[Concatenate[Any, _P], Call[_Result]]) -> None:
        super().__init__(describe)

    @overload
    def __get__(self, client: Blocking, kind: type) -> Callable[_P, _Result]: ...
    @overload
    def __get__(self, client: Awaiting, kind: type) -> Callable[_P, Awaitable[_Result]]: ...
    @overload
    def __get__(self, client: None, kind: type) -> Self: ...
    def __get__(self, client: Any, kind: type) -> Any:
        return self._bound(client, "result")


class streaming(_Describing, Generic[_P, _Result]):  # a decorator
    """Decorates a method that describes a call with many results: it returns an iterator over them."""

    def __init__(self, describe: Callable[Concatenate[Any, _P], Call[_Result]]) -> None:
        super().__init__(describe)

    @overload
    def __get__(self, client: Blocking, kind: type) -> Callable[_P, Iterator[_Result]]: ...
    @overload
    def __get__(self, client: Awaiting, kind: type) -> Callable[_P, AsyncIterator[_Result]]: ...
    @overload
    def __get__(self, client: None, kind: type) -> Self: ...
    def __get__(self, client: Any, kind: type) -> Any:
        return self._bound(client, "results")


class Calls:
    """A channel, and calls on it. Thread-safe."""

    def __init__(self, connection: Connection, client: str = "") -> None:
        self._connection = connection
        self._name = client or f"the client of {connection.target}"
        self._channel = connection.open_channel()
        self._closed = False
        self._stubs: dict[Any, Any] = {}

    @property
    def channel(self) -> grpc.Channel:
        """Raises `ClientClosedError`."""
        if self._closed:
            raise ClientClosedError(self._name)
        return self._channel

    def stub(self, kind: Callable[[grpc.Channel], _Response]) -> _Response:
        """A stub, made once, for that takes a tenth of a millisecond. Raises `ClientClosedError`."""
        channel = self.channel
        if kind not in self._stubs:
            self._stubs[kind] = kind(channel)
        stub: _Response = self._stubs[kind]
        return stub

    def ask(self, method: Callable[..., _Response], request: object, call: CallOptions) -> _Response:
        """Raises `StatusError`, `ArgumentError`."""
        timeout, metadata = self._connection.read(call)
        with self._connection.errors(timeout):
            return method(request, timeout=timeout, metadata=metadata)

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
        with self._connection.errors(timeout):
            yield from method(request, timeout=timeout, metadata=metadata)

    def result(self, stub: Any, call: Call[_Result]) -> _Result:
        """Raises as `ask`."""
        return call.read(self.ask(getattr(self.stub(stub), call.method), call.request, call.options))

    def results(self, stub: Any, call: Call[_Result]) -> Iterator[_Result]:
        """The results of a stream, or of a list, whose pages are read when they are asked for. Raises as `ask`."""
        method = getattr(self.stub(stub), call.method)
        if not call.items:
            yield from map(call.read, self.stream(method, call.request, call.options))
            return
        while True:
            page = self.ask(method, call.request, call.options)
            yield from map(call.read, getattr(page, call.items))
            call.request.page_token = page.next_page_token
            if not page.next_page_token:
                return

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
        self._stubs: dict[Any, Any] = {}

    @property
    def channel(self) -> grpc.aio.Channel:
        """Opened on first use, since it belongs to the running event loop. Raises `ClientClosedError`."""
        if self._closed:
            raise ClientClosedError(self._name)
        if self._channel is None:
            self._channel = self._connection.open_async_channel()
        return self._channel

    def stub(self, kind: Callable[[Any], Any]) -> Any:
        """See `Calls.stub`."""
        channel = self.channel
        if kind not in self._stubs:
            self._stubs[kind] = kind(channel)
        return self._stubs[kind]

    async def ask(self, method: Callable[..., Awaitable[_Response]], request: object, call: CallOptions) -> _Response:
        """Raises `StatusError`, `ArgumentError`."""
        timeout, metadata = self._connection.read(call)
        async with self._connection.async_errors(timeout):
            return await method(request, timeout=timeout, metadata=metadata)

    async def result(self, stub: Any, call: Call[_Result]) -> _Result:
        """See `Calls.result`."""
        return call.read(await self.ask(getattr(self.stub(stub), call.method), call.request, call.options))

    async def results(self, stub: Any, call: Call[_Result]) -> AsyncIterator[_Result]:
        """See `Calls.results`."""
        method = getattr(self.stub(stub), call.method)
        if not call.items:
            async for response in self._stream(method, call.request, call.options):
                yield call.read(response)
            return
        while True:
            page = await self.ask(method, call.request, call.options)
            for item in getattr(page, call.items):
                yield call.read(item)
            call.request.page_token = page.next_page_token
            if not page.next_page_token:
                return

    async def _stream(
        self, method: Callable[..., AsyncIterable[_Response]], request: object, call: CallOptions
    ) -> AsyncIterator[_Response]:
        timeout, metadata = self._connection.read({"timeout": None, **call})
        async with self._connection.async_errors(timeout):
            async for response in method(request, timeout=timeout, metadata=metadata):
                yield response

    async def close(self) -> None:
        self._closed = True
        if self._channel is not None:
            await self._channel.close()


class Blocking:
    """What makes the calls of a blocking client, or of a part of it, to one gRPC service."""

    _calls: Calls
    _stub_type: ClassVar[Any]


class Awaiting:
    """`Blocking` for asyncio."""

    _calls: AsyncCalls
    _stub_type: ClassVar[Any]


class BlockingClient(Blocking):
    """A blocking client: a context manager that closes it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels calls under way and closes the connection. May be called twice."""
        self._calls.close()


class AwaitingClient(Awaiting):
    """`BlockingClient` for asyncio."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels calls under way and closes the connection. May be called twice."""
        await self._calls.close()
