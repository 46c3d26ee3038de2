"""One answer as it is generated, blocking and with asyncio."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self

from draftwood.v1 import generation_pb2 as pb
from draftwood_client.connection import Connection
from draftwood_client.grpc_errors import cancelled_error
from draftwood_client.messages import Prompt
from draftwood_client.options import UNSET, RequestOptions
from draftwood_client.results import Answer, Completion, Delta


class BaseStream:
    """A request of both clients, and what has come of its answer.

    Attributes:
        started: set when the server has admitted the request; None before.
        finished: set when the answer is complete; None before.
    """

    def __init__(
        self, stub: Callable[[], Any], connection: Connection, prompt: Prompt, options: RequestOptions, name: str
    ) -> None:
        self._call: Any = None
        self._first: Delta | None = None
        self._answer = Answer()
        self._cancelled = threading.Event()
        self._stub = stub
        self._connection = connection
        self._timeout = connection.timeout_for(options.pop("timeout", UNSET))
        self._metadata = options.pop("metadata", None)
        self._request = connection.generate_request(prompt, options, name)

    def __repr__(self) -> str:
        state = "finished" if self.finished else "started" if self.started else "not started"
        request_id = self._request.request_id
        return f"<{type(self).__name__} {state}{f', request_id={request_id!r}' if request_id else ''}>"

    @property
    def started(self) -> pb.Started | None:
        return self._answer.started

    @property
    def finished(self) -> pb.Finished | None:
        return self._answer.finished

    def cancel(self) -> None:
        """Cancels the request on client and server; no effect after its end.

        A blocking stream may be cancelled from any thread, one of asyncio from the thread of its event loop.
        """
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def _send(self) -> None:
        if self._cancelled.is_set():
            raise cancelled_error(self._request.request_id)
        metadata = self._connection.call_metadata(self._metadata)
        self._call = self._stub().GenerateStream(self._request, timeout=self._timeout, metadata=metadata)
        if self._cancelled.is_set():
            self._call.cancel()

    def _take_first(self) -> Delta | None:
        first, self._first = self._first, None
        return first


class GenerationStream(BaseStream, Iterator[Delta]):
    """One answer as it is generated. Returned by `Client.stream`; a context manager and an iterator.

    Leaving the `with` block cancels an unfinished answer. Without one, garbage collection of the object does.
    Iterate in one thread; `cancel` may be called from any.

    Attributes:
        started: set when the server has admitted the request; None before.
        finished: set when the answer is complete; None before.
    """

    def __enter__(self) -> Self:
        """Returns once the server has admitted the request. Raises `StatusError`."""
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        """The next delta. Raises `StatusError`, `RequestCancelledError` after `cancel`."""
        self._start()
        if (first := self._take_first()) is not None:
            return first
        while (event := self._read()) is not None:
            if (delta := self._answer.take(event)) is not None:
                return delta
        self._answer.complete()
        raise StopIteration

    def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream first. Raises `StatusError`."""
        for _ in self:
            pass
        return self._answer.completion()

    def _start(self) -> None:
        """Sends the request, if it has not been sent, and waits for the first event."""
        if self._call is None:
            self._send()
            if (event := self._read()) is not None:
                self._first = self._answer.take(event)

    def _read(self) -> pb.GenerateStreamResponse | None:
        with self._connection.errors(self._timeout, self._request.request_id):
            event: pb.GenerateStreamResponse | None = next(self._call, None)
            return event


class AsyncGenerationStream(BaseStream, AsyncIterator[Delta]):
    """`GenerationStream` for asyncio, returned by `AsyncClient.stream`."""

    async def __aenter__(self) -> Self:
        """Returns once the server has admitted the request. Raises `StatusError`."""
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        if self._call is not None and not self._call.done():
            self._call.cancel()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """The next delta. Raises `StatusError`, `RequestCancelledError` after `cancel`."""
        await self._start()
        if (first := self._take_first()) is not None:
            return first
        while (event := await self._read()) is not None:
            if (delta := self._answer.take(event)) is not None:
                return delta
        if self._cancelled.is_set() and self.finished is None:
            raise cancelled_error(self._request.request_id)
        self._answer.complete()
        raise StopAsyncIteration

    async def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream first. Raises `StatusError`."""
        async for _ in self:
            pass
        return self._answer.completion()

    async def _start(self) -> None:
        """Sends the request, if it has not been sent, and waits for the first event."""
        if self._call is None:
            self._send()
            if (event := await self._read()) is not None:
                self._first = self._answer.take(event)

    async def _read(self) -> pb.GenerateStreamResponse | None:
        async with self._connection.async_errors(self._timeout, self._request.request_id):
            event = await self._call.read()
            return event if isinstance(event, pb.GenerateStreamResponse) else None
