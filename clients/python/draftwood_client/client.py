"""The blocking client, and what it has in common with the asyncio one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, Unpack

import grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client.admin.calls import AsyncCalls, Calls
from draftwood_client.connection import Connection, Token
from draftwood_client.errors import DeadlineError, UnavailableError
from draftwood_client.options import UNSET, CallOptions, RequestOptions, Timeout
from draftwood_client.protocol.request import Messages, Prompt, conversation, plain_prompt, token_ids, tokenize_request
from draftwood_client.protocol.response import Answer, model_info, tokenization
from draftwood_client.protocol.status import cancelled_error
from draftwood_client.results import Completion, Delta, Finished, ModelInfo, Started, Tokenization
from draftwood_client.retry import POLL_SECONDS, ReadinessWait, RetryPolicy
from draftwood_client.tls import TlsConfig


class BaseClient:
    """The arguments of both clients."""

    _calls_of: ClassVar[type[Calls | AsyncCalls]]

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
        self._calls = self._calls_of(self._connection, repr(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._connection.target!r})"


class Client(BaseClient):
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
        retry: when a request is sent again; `NO_RETRY` switches retries off.
        tls: True for public authorities, or a `TlsConfig`; False for none whatever the environment says.
        api_key: a key of the server, sent as "authorization: Bearer ...".
        token: a token (JWT) instead, or a function that is called for each request.
        plaintext_credentials: allows to send them without `tls` to another machine.
        metadata: headers of each request; names are lower-cased.
        channel_options: gRPC channel arguments by name; they override the client's own.

    Raises:
        ArgumentError: an argument is invalid.
    """

    _calls_of = Calls
    _calls: Calls
    _cached_stub: GenerationServiceStub | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        self._calls.close()

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

    def stream_chat(self, messages: str | Messages, **options: Unpack[RequestOptions]) -> GenerationStream:
        """The answer of `chat` as it is generated: deltas to iterate over.

        with client.stream_chat("Where is my order?") as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(stream.completion().drafting)

        Arguments are checked here; the request is sent by the `with` statement or the first `next()`.
        """
        return self._stream(conversation(messages), options, "messages")

    def stream_complete(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> GenerationStream:
        """The continuation of `complete` as it is generated; otherwise as `stream_chat`."""
        return self._stream(plain_prompt(prompt), options)

    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Completion:
        """The RPC Generate: `complete` for text and token ids, `chat` for messages. For prompts of any form."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> GenerationStream:
        """The answer of `generate` as it is generated."""
        return self._stream(prompt, options)

    def tokenize(self, source: str | Messages, **call: Unpack[CallOptions]) -> Tokenization:
        """The token ids of a text, or of a conversation as `chat` sends it. Raises `ArgumentError`, `StatusError`."""
        return tokenization(self._calls.ask(self._stub().Tokenize, tokenize_request(source), call))

    def detokenize(
        self, ids: Sequence[int], *, include_special_tokens: bool = False, **call: Unpack[CallOptions]
    ) -> str:
        """The text of token ids. Raises `ArgumentError`, `StatusError`."""
        request = pb.DetokenizeRequest(token_ids=token_ids("ids", ids), include_special_tokens=include_special_tokens)
        return self._calls.ask(self._stub().Detokenize, request, call).text

    def model_info(self, **call: Unpack[CallOptions]) -> ModelInfo:
        """The served model and its limits. Raises `StatusError`."""
        return model_info(self._calls.ask(self._stub().GetModelInfo, pb.GetModelInfoRequest(), call))

    def wait_until_ready(self, timeout: float = 60.0) -> ModelInfo:
        """Waits for a server that is starting or loading its model.

        Raises:
            DeadlineError: the server was not ready within `timeout` seconds; the message contains the last error.
            StatusError: the server answered with an error other than UNAVAILABLE.
        """
        limit = self._connection.timeout_for(timeout)
        wait = ReadinessWait(self._connection.target, limit)
        while True:
            try:
                return self.model_info(timeout=wait.remaining())
            except (UnavailableError, DeadlineError) as error:
                wait.check(error)
            time.sleep(POLL_SECONDS)

    def _stream(self, prompt: Prompt, options: RequestOptions, name: str = "prompt") -> GenerationStream:
        return GenerationStream(self._stub, self._connection, prompt, options, name)

    def _stub(self) -> GenerationServiceStub:
        """Made once, for that takes a tenth of a millisecond. Raises `ClientClosedError`."""
        channel = self._calls.channel
        if self._cached_stub is None:
            self._cached_stub = GenerationServiceStub(channel)
        return self._cached_stub


class BaseStream:
    """A request of both clients, and what has come of its answer."""

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
        return f"<{type(self).__name__} {state}{f', request_id={self._request_id!r}' if self._request_id else ''}>"

    @property
    def started(self) -> Started | None:
        return self._answer.started

    @property
    def finished(self) -> Finished | None:
        return self._answer.finished

    @property
    def _request_id(self) -> str:
        return self._request.request_id

    def _send(self) -> Any:
        if self._cancelled.is_set():
            raise cancelled_error(self._request_id)
        self._call = self._stub().Generate(
            self._request, timeout=self._timeout, metadata=self._connection.call_metadata(self._metadata)
        )
        return self._call


class GenerationStream(BaseStream, Iterator[Delta]):
    """One answer as it is generated. Returned by `Client.stream`; a context manager and an iterator.

    Leaving the `with` block cancels an unfinished answer. Without one, garbage collection of the object does.
    Iterate in one thread; `cancel` may be called from any.

    Attributes:
        started: set when the server has admitted the request; None before.
        finished: set when the answer is complete; None before.
    """

    _call: _Events | None

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
        call = self._start()
        if self._first is not None:
            first, self._first = self._first, None
            return first
        try:
            for event in call:
                if (delta := self._answer.take(event)) is not None:
                    return delta
        except grpc.RpcError as error:
            raise self._connection.error(error, self._timeout, self._request_id) from error
        self._answer.check_complete()
        raise StopIteration

    def cancel(self) -> None:
        """Cancels the request on client and server; no effect after its end. May be called from any thread."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    def completion(self) -> Completion:
        """The whole answer; reads the rest of the stream first. Raises `StatusError`."""
        for _ in self:
            pass
        return self._answer.completion()

    def _start(self) -> _Events:
        """Sends the request, if it has not been sent, and waits for the first event."""
        if self._call is not None:
            return self._call
        call: _Events = self._send()
        if self._cancelled.is_set():
            call.cancel()
        try:
            if (event := next(call, None)) is not None:
                self._first = self._answer.take(event)
        except grpc.RpcError as error:
            raise self._connection.error(error, self._timeout, self._request_id) from error
        return call


class _Events(Protocol):
    """A stub's return value for a stream of events."""

    def __iter__(self) -> Iterator[pb.GenerateResponse]: ...

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...
