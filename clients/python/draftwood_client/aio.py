"""The asyncio client: names, arguments and errors of the blocking one in `client`."""
# ruff: noqa: ASYNC109  # gRPC enforces deadlines itself and sends them to the server

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client.connection import Connection, Token
from draftwood_client.errors import ClientClosedError, DeadlineError, UnavailableError
from draftwood_client.options import UNSET, CallOptions, RequestOptions, Timeout
from draftwood_client.protocol.request import Messages, Prompt, conversation, plain_prompt, token_ids, tokenize_request
from draftwood_client.protocol.response import Answer, model_info, tokenization
from draftwood_client.protocol.status import cancelled_error
from draftwood_client.results import Completion, Delta, Finished, ModelInfo, Started, Tokenization
from draftwood_client.retry import POLL_SECONDS, RetryPolicy, Waiting
from draftwood_client.tls import TlsConfig

if TYPE_CHECKING:
    from draftwood.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Request = TypeVar("_Request", contravariant=True)
_Response = TypeVar("_Response", covariant=True)


class AsyncClient:
    """A connection to a Draftwood server, for asyncio.

    May be created outside of an event loop; belongs to the loop of its first request. Neither thread-safe nor
    fork-safe. Cancelling a task that awaits an answer cancels the request.

        async with AsyncClient("localhost:50051") as client:
            completion = await client.chat("Where is my order?", max_tokens=50)

    Arguments and errors: see `Client`.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        tenant: str | None = None,
        timeout: Timeout = UNSET,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008  # frozen
        tls: bool | TlsConfig | None = None,
        api_key: str | None = None,
        token: Token | None = None,
        plaintext_credentials: bool = False,
        metadata: Mapping[str, str] | None = None,
        channel_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = Connection.of(
            target,
            tenant=tenant,
            timeout=timeout,
            retry=retry,
            tls=tls,
            api_key=api_key,
            token=token,
            plaintext_credentials=plaintext_credentials,
            metadata=metadata,
            channel_options=channel_options,
        )
        self._opened: tuple[grpc.aio.Channel, GenerationServiceAsyncStub] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.target!r})"

    async def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        self._closed = True
        if self._opened is not None:
            await self._opened[0].close()

    async def chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer to a conversation. See `Client.chat`."""
        async with self.stream_chat(messages, **options) as stream:
            return await stream.completion()

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Completion:
        """The continuation of a text as it is. See `Client.complete`."""
        async with self.stream_complete(prompt, **options) as stream:
            return await stream.completion()

    def stream_chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> AsyncGenerationStream:
        """The answer of `chat` as it is generated. Not a coroutine: enter it or iterate over it.

        async with client.stream_chat("Where is my order?") as stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)

        Arguments are checked here; the request is sent by the `async with` statement or the first `anext()`.
        """
        return self._stream(conversation(messages), options, "messages")

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> AsyncGenerationStream:
        """The continuation of `complete` as it is generated; otherwise as `stream_chat`."""
        return self._stream(plain_prompt(prompt), options)

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """The RPC Generate: `complete` for text and token ids, `chat` for messages. For prompts of any form."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> AsyncGenerationStream:
        """The answer of `generate` as it is generated."""
        return self._stream(prompt, options)

    async def tokenize(self, source: str | Messages, **call: Unpack[CallOptions]) -> Tokenization:
        """The token ids of a text, or of a conversation as `chat` sends it. Raises `ArgumentError`, `StatusError`."""
        request = tokenize_request(source)
        return tokenization(await self._call(self._stub().Tokenize, request, call))

    async def detokenize(
        self, ids: Sequence[int], *, include_special_tokens: bool = False, **call: Unpack[CallOptions]
    ) -> str:
        """The text of token ids. Raises `ArgumentError`, `StatusError`."""
        request = pb.DetokenizeRequest(token_ids=token_ids("ids", ids), include_special_tokens=include_special_tokens)
        return (await self._call(self._stub().Detokenize, request, call)).text

    async def model_info(self, **call: Unpack[CallOptions]) -> ModelInfo:
        """The served model and its limits. Raises `StatusError`."""
        return model_info(await self._call(self._stub().GetModelInfo, pb.GetModelInfoRequest(), call))

    async def wait_until_ready(self, timeout: float = 60.0) -> ModelInfo:
        """Waits for a server that is starting or loading its model. See `Client.wait_until_ready`."""
        limit = self._connection.timeout_for(timeout)
        waiting = Waiting(self._connection.target, limit)
        while True:
            try:
                return await self.model_info(timeout=waiting.remaining())
            except (UnavailableError, DeadlineError) as error:
                waiting.check(error)
            await asyncio.sleep(POLL_SECONDS)

    def _stream(self, prompt: Prompt, options: RequestOptions, name: str = "prompt") -> AsyncGenerationStream:
        limit = self._connection.timeout_for(options.pop("timeout", UNSET))
        metadata = options.pop("metadata", None)
        request = self._connection.generate_request(prompt, options, name)
        return AsyncGenerationStream(self._stub, request, self._connection, limit, metadata)

    def _stub(self) -> GenerationServiceAsyncStub:
        """Opens the channel on first use, since it belongs to the running event loop."""
        if self._closed:
            raise ClientClosedError(repr(self))
        if self._opened is None:
            channel = open_channel(self._connection)
            self._opened = channel, GenerationServiceStub(channel)
        return self._opened[1]

    async def _call(self, method: _Method[_Request, _Response], request: _Request, call: CallOptions) -> _Response:
        limit, metadata = self._connection.read(call)
        try:
            return await method(request, timeout=limit, metadata=metadata)
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, limit) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error() from None


class AsyncGenerationStream(AsyncIterator[Delta]):
    """One answer as it is generated. Returned by `AsyncClient.stream`; a context manager and an iterator.

    Leaving the `async with` block cancels an unfinished answer. Without one, garbage collection of the object does.

    Attributes:
        started: set when the server has admitted the request; None before.
        finished: set when the answer is complete; None before.
    """

    def __init__(
        self,
        stub: Callable[[], GenerationServiceAsyncStub],
        request: pb.GenerateRequest,
        connection: Connection,
        timeout: float | None,
        metadata: Mapping[str, str] | None,
    ) -> None:
        self._stub = stub
        self._request = request
        self._connection = connection
        self._timeout = timeout
        self._metadata = metadata
        self._answer = Answer()
        self._call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None
        self._first: Delta | None = None
        self._cancelled = False

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
        call = await self._start()
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            while isinstance(event := await call.read(), pb.GenerateResponse):
                if (delta := self._answer.take(event)) is not None:
                    return delta
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, self._timeout, self._request_id) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error(self._request_id) from None
        if self._cancelled and self.finished is None:
            raise cancelled_error(self._request_id)
        self._answer.check_complete()
        raise StopAsyncIteration

    def __repr__(self) -> str:
        state = "finished" if self.finished else "started" if self.started else "not started"
        return f"<{type(self).__name__} {state}{f', request_id={self._request_id!r}' if self._request_id else ''}>"

    @property
    def started(self) -> Started | None:
        return self._answer.started

    @property
    def finished(self) -> Finished | None:
        return self._answer.finished

    def cancel(self) -> None:
        """Cancels the request on client and server; no effect after its end. Call it from the event loop's thread."""
        self._cancelled = True
        if self._call is not None:
            self._call.cancel()

    async def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream first. Raises `StatusError`."""
        async for _ in self:
            pass
        return self._answer.completion()

    @property
    def _request_id(self) -> str:
        return self._request.request_id

    async def _start(self) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]:
        """Sends the request, if it has not been sent, and waits for the first event."""
        if self._call is not None:
            return self._call
        if self._cancelled:
            raise cancelled_error(self._request_id)
        self._call = call = self._stub().Generate(
            self._request, timeout=self._timeout, metadata=self._connection.call_metadata(self._metadata)
        )
        try:
            if isinstance(event := await call.read(), pb.GenerateResponse):
                self._first = self._answer.take(event)
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, self._timeout, self._request_id) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error(self._request_id) from None
        return call


class _Method(Protocol[_Request, _Response]):
    """A unary method of an async stub."""

    def __call__(
        self, request: _Request, *, timeout: float | None, metadata: tuple[tuple[str, str | bytes], ...]
    ) -> Awaitable[_Response]: ...


def raise_if_task_cancelled() -> None:
    """Inside `except CancelledError`: raises it again if the task was cancelled.

    grpc.aio also raises it if only the RPC was cancelled, which is no cancellation of the task.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling():
        raise


def open_channel(connection: Connection) -> grpc.aio.Channel:
    """A new channel, of the running event loop. It connects with its first request."""
    if connection.tls is None:
        return grpc.aio.insecure_channel(connection.target, options=connection.options())
    return grpc.aio.secure_channel(connection.target, connection.tls.credentials(), options=connection.options())
