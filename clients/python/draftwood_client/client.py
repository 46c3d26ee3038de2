"""The client of the generation service, blocking and with asyncio."""
# ruff: noqa: ASYNC109  # gRPC enforces deadlines itself and sends them to the server

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar, Unpack

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client.calls import AsyncCalls, AwaitingClient, BlockingClient, Call, Calls, unary
from draftwood_client.connection import ClientArguments, Connection, default_retry
from draftwood_client.errors import DeadlineError, StatusError, UnavailableError
from draftwood_client.grpc_errors import not_ready_error
from draftwood_client.messages import Messages, Prompt
from draftwood_client.options import CallOptions, RequestOptions
from draftwood_client.request import conversation, plain_prompt, token_ids, tokenize_request
from draftwood_client.results import Completion
from draftwood_client.streams import AsyncGenerationStream, BaseStream, GenerationStream

_Stream = TypeVar("_Stream", bound=BaseStream)

_POLL_SECONDS = 0.2
"""Between two questions whether a server is ready, each of which is retried as the client's policy says."""


class BaseClient(Generic[_Stream]):
    """The arguments of both clients, and the calls that they have alike."""

    _calls_type: ClassVar[type[Calls | AsyncCalls]]
    _stream_type: type[_Stream]
    _stub_type = GenerationServiceStub
    _calls: Any

    def __init__(self, target: str | None = None, **arguments: Unpack[ClientArguments]) -> None:
        given: ClientArguments = {"retry": default_retry(target), **arguments}
        self._connection = Connection.of(target, **given)
        self._calls = self._calls_type(self._connection, repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.target!r})"

    def stream_chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> _Stream:
        """The answer of `chat` as it is generated: deltas to iterate over.

            with client.stream_chat("Where is my order?") as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            print(stream.completion().drafting)

        With asyncio it is `async with`, `async for` and `await`; this method itself is not awaited. Arguments are
        checked here; the request is sent by the `with` statement or the first `next()`.
        """
        return self._stream(conversation(messages), options, "messages")

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> _Stream:
        """The continuation of `complete` as it is generated; otherwise as `stream_chat`."""
        return self._stream(plain_prompt(prompt), options)

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> _Stream:
        """The answer of `generate` as it is generated."""
        return self._stream(prompt, options)

    @unary
    def tokenize(self, source: str | Messages, **call: Unpack[CallOptions]) -> Call[pb.TokenizeResponse]:
        """The token ids of a text, or of a conversation as `chat` sends it, and the text of each.

        U+FFFD is in the text of a token that is part of a character. Raises `ArgumentError`, `StatusError`.
        """
        return Call("Tokenize", tokenize_request(source), call)

    @unary
    def detokenize(
        self, ids: Sequence[int], *, include_special_tokens: bool = False, **call: Unpack[CallOptions]
    ) -> Call[str]:
        """The text of token ids. Raises `ArgumentError`, `StatusError`."""
        request = pb.DetokenizeRequest(token_ids=token_ids("ids", ids), include_special_tokens=include_special_tokens)
        return Call("Detokenize", request, call, lambda response: response.text)

    @unary
    def model_info(self, **call: Unpack[CallOptions]) -> Call[pb.GetModelInfoResponse]:
        """The served model and its limits. Raises `StatusError`."""
        return Call("GetModelInfo", pb.GetModelInfoRequest(), call)

    def _stream(self, prompt: Prompt, options: RequestOptions, name: str = "prompt") -> _Stream:
        return self._stream_type(lambda: self._calls.stub(self._stub_type), self._connection, prompt, options, name)


class Client(BaseClient[GenerationStream], BlockingClient):
    """A connection to a Draftwood server.

    Thread-safe: one client serves any number of threads. Not fork-safe: make it in the process that uses it,
    after the fork. The connection is made with the first request.

        with Client("localhost:50051", tenant="acme") as client:
            print(client.chat("Where is my order?").text)
            print(client.complete("Once upon a time").text)

    What no argument names is taken from the environment: DRAFTWOOD_TARGET, DRAFTWOOD_TENANT, DRAFTWOOD_TIMEOUT,
    DRAFTWOOD_API_KEY or DRAFTWOOD_TOKEN, DRAFTWOOD_TLS (1 for public authorities), DRAFTWOOD_TLS_CA,
    DRAFTWOOD_TLS_SERVER_NAME, DRAFTWOOD_CLIENT_CERT and DRAFTWOOD_CLIENT_KEY, which are PEM files.

    Args:
        target: "host:port", or any gRPC name, with its port; "dns:///host:port" distributes requests over all of its
            addresses with a server that is ready. By default 127.0.0.1:50051.
        tenant: the default of requests; without one, that of the credential, or "default".
        timeout: the default deadline of requests in seconds, retries included; 600 by default, None for no deadline.
        retry: when a request is sent again; `NO_RETRY` switches retries off. By default as `RetryPolicy`, and for names
            (`dns:///...`) with five attempts in about three seconds, in which a name is looked up again.
        tls: True for public authorities, or a `TlsConfig`; False for none whatever the environment says.
        api_key: a key of the server, sent as "authorization: Bearer ...".
        token: a token (JWT) instead, or a function that is called for each request.
        plaintext_credentials: allows to send them without `tls` to another machine.
        metadata: headers of each request; names are lower-cased.
        channel_options: gRPC channel arguments by name; they override the client's own.

    Raises:
        ArgumentError: an argument is invalid.
    """

    _calls_type = Calls
    _stream_type = GenerationStream
    _calls: Calls

    def chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> Completion:
        """The whole answer to a conversation.

        Args:
            messages: the conversation; a text is one message of the user.
            options: see `GenerateOptions`; `timeout` and `metadata` as in `CallOptions`.

        Raises:
            ArgumentError: an argument is invalid; nothing was sent.
            StatusError: the request failed; see `errors` for the types.
        """
        with self.stream_chat(messages, **options) as stream:
            return stream.completion()

    def complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Completion:
        """The continuation of a text as it is, without the model's chat template. Arguments and errors as for `chat`.

        Args:
            prompt: text or token ids.
        """
        with self.stream_complete(prompt, **options) as stream:
            return stream.completion()

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """The RPC GenerateStream: `complete` for text and token ids, `chat` for messages. For prompts of any form."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    def wait_until_ready(self, timeout: float = 60.0) -> pb.GetModelInfoResponse:
        """Waits for a server that is starting or loading its model.

        Raises:
            DeadlineError: the server was not ready within `timeout` seconds; the message contains the last error.
            StatusError: the server answered with an error other than UNAVAILABLE.
        """
        wait = _ReadinessWait(self._connection, timeout)
        while True:
            try:
                return self.model_info(timeout=wait.remaining())
            except (UnavailableError, DeadlineError) as error:
                wait.check(error)
            time.sleep(_POLL_SECONDS)


class AsyncClient(BaseClient[AsyncGenerationStream], AwaitingClient):
    """A connection to a Draftwood server, for asyncio.

    May be created outside of an event loop; belongs to the loop of its first request. Neither thread-safe nor
    fork-safe. Cancelling a task that awaits an answer cancels the request.

        async with AsyncClient("localhost:50051") as client:
            completion = await client.chat("Where is my order?", max_tokens=50)

    Arguments and errors: see `Client`.
    """

    _calls_type = AsyncCalls
    _stream_type = AsyncGenerationStream
    _calls: AsyncCalls

    async def chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> Completion:
        """See `Client.chat`."""
        async with self.stream_chat(messages, **options) as stream:
            return await stream.completion()

    async def complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Completion:
        """See `Client.complete`."""
        async with self.stream_complete(prompt, **options) as stream:
            return await stream.completion()

    async def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """See `Client.generate`."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    async def wait_until_ready(self, timeout: float = 60.0) -> pb.GetModelInfoResponse:
        """See `Client.wait_until_ready`."""
        wait = _ReadinessWait(self._connection, timeout)
        while True:
            try:
                return await self.model_info(timeout=wait.remaining())
            except (UnavailableError, DeadlineError) as error:
                wait.check(error)
            await asyncio.sleep(_POLL_SECONDS)


class _ReadinessWait:
    """Until a server is ready, at most `timeout` seconds from now; None for no limit."""

    def __init__(self, connection: Connection, timeout: float | None) -> None:
        self._target = connection.target
        self._limit = connection.timeout_for(timeout)
        self._deadline = math.inf if self._limit is None else time.monotonic() + self._limit
        self._refusal: StatusError | None = None

    def remaining(self) -> float:
        """Seconds until the deadline, above 0; infinity without one."""
        return max(1e-3, self._deadline - time.monotonic())

    def check(self, error: StatusError) -> None:
        """Raises `DeadlineError` with the server's last refusal if there is no time for another question."""
        if isinstance(error, UnavailableError):
            self._refusal = error
        if not isinstance(error, UnavailableError) or self.remaining() <= _POLL_SECONDS:
            last = self._refusal or error
            raise not_ready_error(self._target, self._limit, last) from last
