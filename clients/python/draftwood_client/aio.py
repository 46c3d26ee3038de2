"""The asyncio client: names, arguments and errors of the blocking one in `client`."""
# ruff: noqa: ASYNC109  # gRPC enforces deadlines itself and sends them to the server

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeAlias, Unpack

import grpc
import grpc.aio

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client.admin.calls import AsyncCalls, raise_if_task_cancelled
from draftwood_client.client import BaseClient, BaseStream
from draftwood_client.errors import DeadlineError, UnavailableError
from draftwood_client.options import CallOptions, RequestOptions
from draftwood_client.protocol.request import Messages, Prompt, conversation, plain_prompt, token_ids, tokenize_request
from draftwood_client.protocol.response import model_info, tokenization
from draftwood_client.protocol.status import cancelled_error
from draftwood_client.results import Completion, Delta, ModelInfo, Tokenization
from draftwood_client.retry import POLL_SECONDS, ReadinessWait

if TYPE_CHECKING:
    from draftwood.v1.generation_pb2_grpc import GenerationServiceAsyncStub

_Events: TypeAlias = "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]"


class AsyncClient(BaseClient):
    """A connection to a Draftwood server, for asyncio.

    May be created outside of an event loop; belongs to the loop of its first request. Neither thread-safe nor
    fork-safe. Cancelling a task that awaits an answer cancels the request.

        async with AsyncClient("localhost:50051") as client:
            completion = await client.chat("Where is my order?", max_tokens=50)

    Arguments and errors: see `Client`.
    """

    _calls_of = AsyncCalls
    _calls: AsyncCalls
    _cached_stub: GenerationServiceAsyncStub | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        await self._calls.close()

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
        return tokenization(await self._calls.ask(self._stub().Tokenize, request, call))

    async def detokenize(
        self, ids: Sequence[int], *, include_special_tokens: bool = False, **call: Unpack[CallOptions]
    ) -> str:
        """The text of token ids. Raises `ArgumentError`, `StatusError`."""
        request = pb.DetokenizeRequest(token_ids=token_ids("ids", ids), include_special_tokens=include_special_tokens)
        return (await self._calls.ask(self._stub().Detokenize, request, call)).text

    async def model_info(self, **call: Unpack[CallOptions]) -> ModelInfo:
        """The served model and its limits. Raises `StatusError`."""
        return model_info(await self._calls.ask(self._stub().GetModelInfo, pb.GetModelInfoRequest(), call))

    async def wait_until_ready(self, timeout: float = 60.0) -> ModelInfo:
        """Waits for a server that is starting or loading its model. See `Client.wait_until_ready`."""
        limit = self._connection.timeout_for(timeout)
        wait = ReadinessWait(self._connection.target, limit)
        while True:
            try:
                return await self.model_info(timeout=wait.remaining())
            except (UnavailableError, DeadlineError) as error:
                wait.check(error)
            await asyncio.sleep(POLL_SECONDS)

    def _stream(self, prompt: Prompt, options: RequestOptions, name: str = "prompt") -> AsyncGenerationStream:
        return AsyncGenerationStream(self._stub, self._connection, prompt, options, name)

    def _stub(self) -> GenerationServiceAsyncStub:
        """Opens the channel on first use, since it belongs to the running event loop. Raises `ClientClosedError`."""
        channel = self._calls.channel
        if self._cached_stub is None:
            self._cached_stub = GenerationServiceStub(channel)
        return self._cached_stub


class AsyncGenerationStream(BaseStream, AsyncIterator[Delta]):
    """One answer as it is generated. Returned by `AsyncClient.stream`; a context manager and an iterator.

    Leaving the `async with` block cancels an unfinished answer. Without one, garbage collection of the object does.

    Attributes:
        started: set when the server has admitted the request; None before.
        finished: set when the answer is complete; None before.
    """

    _call: _Events | None

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
        if self._cancelled.is_set() and self.finished is None:
            raise cancelled_error(self._request_id)
        self._answer.check_complete()
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Cancels the request on client and server; no effect after its end. Call it from the event loop's thread."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream first. Raises `StatusError`."""
        async for _ in self:
            pass
        return self._answer.completion()

    async def _start(self) -> _Events:
        """Sends the request, if it has not been sent, and waits for the first event."""
        if self._call is not None:
            return self._call
        call: _Events = self._send()
        try:
            if isinstance(event := await call.read(), pb.GenerateResponse):
                self._first = self._answer.take(event)
        except grpc.RpcError as error:
            raise await self._connection.async_error(error, self._timeout, self._request_id) from error
        except asyncio.CancelledError:
            raise_if_task_cancelled()
            raise cancelled_error(self._request_id) from None
        return call
