"""How all clients reach a server: target, TLS, credentials, deadline, channel options."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypedDict, Unpack

import grpc
import grpc.aio

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import environment
from draftwood_client.errors import ArgumentTypeError, ArgumentValueError, StatusError
from draftwood_client.grpc_errors import cancelled_error, status_error
from draftwood_client.messages import Prompt
from draftwood_client.options import NO_RETRY, UNSET, CallOptions, GenerateOptions, RetryPolicy, Timeout, TlsConfig
from draftwood_client.request import generate_request, seconds
from draftwood_client.target import DEFAULT_TARGET, check_target, is_local

DEFAULT_TIMEOUT = 600.0
"""Seconds of a call that nobody set another deadline for; a server's own default is as long."""
MAX_MESSAGE_BYTES = 16 * 2**20

Token = str | Callable[[], str]
"""A bearer token, or a function that is called for each request."""
_AUTHORIZATION = "authorization"


class ConnectionArguments(TypedDict, total=False):
    """Arguments of the operators' clients; as for `Client`, which explains them."""

    tenant: str | None
    timeout: Timeout
    tls: bool | TlsConfig | None
    api_key: str | None
    token: Token | None
    plaintext_credentials: bool
    metadata: Mapping[str, str] | None
    channel_options: Mapping[str, Any] | None


class ClientArguments(ConnectionArguments, total=False):
    """Arguments of `Client` and `AsyncClient`."""

    retry: RetryPolicy


@dataclass(frozen=True, slots=True)
class Connection:
    """The checked constructor arguments of `Client` and `AsyncClient`; see there.

    Attributes:
        bulk_timeout: of calls that last as long as there is data: `timeout` if somebody set it, else None.
    """

    target: str
    tenant: str | None
    timeout: float | None
    bulk_timeout: float | None
    retry: RetryPolicy
    tls: TlsConfig | None
    token: Token | None = field(repr=False)
    metadata: tuple[tuple[str, str], ...] = field(repr=False)
    channel_options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, target: str | None = None, **arguments: Unpack[ClientArguments]) -> Connection:
        """Raises `ArgumentError`: an argument or a variable of the environment is invalid."""
        for name in arguments.keys() - ClientArguments.__annotations__.keys():
            raise ArgumentTypeError(name, "there is no such argument")
        if target is None:
            target = environment.read(environment.TARGET) or DEFAULT_TARGET
        check_target(target)
        if (tls := arguments.get("tls")) is None:
            tls = TlsConfig.from_environment() or False
        headers = {key.lower(): value for key, value in (arguments.get("metadata") or {}).items()}
        source, credential = _credential(arguments.get("api_key"), arguments.get("token"), headers.get(_AUTHORIZATION))
        if source and not (tls or arguments.get("plaintext_credentials") or is_local(target)):
            problem = f"would be sent to {target} in clear text; use TLS, or allow it with plaintext_credentials"
            raise ArgumentValueError(source, problem)
        timeout, tenant = arguments.get("timeout", UNSET), arguments.get("tenant")
        if timeout is UNSET:
            timeout = environment.seconds(environment.TIMEOUT) or UNSET
        return cls(
            target=target,
            tenant=tenant if tenant is not None else environment.read(environment.TENANT),
            timeout=DEFAULT_TIMEOUT if timeout is UNSET else seconds("timeout", timeout),
            bulk_timeout=None if timeout is UNSET else seconds("timeout", timeout),
            retry=arguments.get("retry", NO_RETRY),
            tls=(TlsConfig() if tls else None) if isinstance(tls, bool) else tls,
            token=credential,
            metadata=tuple(headers.items()),
            channel_options=tuple((arguments.get("channel_options") or {}).items()),
        )

    @classmethod
    def without_retries(cls, target: str | None, arguments: ConnectionArguments) -> Connection:
        """For operators' clients: a change that is sent twice could be made twice. Raises `ArgumentError`."""
        if "retry" in arguments:
            raise ArgumentTypeError("retry", "there is no such argument")
        return cls.of(target, **arguments)

    def open_channel(self) -> grpc.Channel:
        """A new blocking channel. It connects with its first request."""
        if self.tls is None:
            return grpc.insecure_channel(self.target, options=self.options())
        return grpc.secure_channel(self.target, self.tls.credentials(), options=self.options())

    def open_async_channel(self) -> grpc.aio.Channel:
        """A new channel, of the running event loop. It connects with its first request."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.target, options=self.options())
        return grpc.aio.secure_channel(self.target, self.tls.credentials(), options=self.options())

    def options(self) -> list[tuple[str, Any]]:
        """gRPC channel arguments, each once, for gRPC takes the first: those of the caller replace the others."""
        options: dict[str, Any] = {
            **_CHANNEL_OPTIONS,
            "grpc.primary_user_agent": _user_agent(),
            "grpc.service_config": json.dumps(self._service_config()),
        }
        if self.tls and self.tls.server_name:
            options["grpc.ssl_target_name_override"] = self.tls.server_name
        return [*(options | dict(self.channel_options)).items()]

    def _service_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": self.retry.method_config(),
        }
        if self.target.startswith(_OF_SEVERAL_SERVERS):
            config["healthCheckConfig"] = {"serviceName": _HEALTH_OF}
        return config

    def generate_request(self, prompt: Prompt, options: GenerateOptions, name: str = "prompt") -> pb.GenerateRequest:
        """The request, with the client's tenant if it names none, and with an id, which all its attempts share.

        Args:
            name: of the prompt, in errors.

        Raises:
            ArgumentError: prompt or options cannot be encoded.
        """
        if self.tenant is not None and options.get("tenant") is None:
            options["tenant"] = self.tenant
        request = generate_request(prompt, options, name)
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        return request

    def call_metadata(self, headers_of_call: Mapping[str, str] | None = None) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of one request: a `token` that is a function is called for each, and where the program is traced
        by OpenTelemetry, the request is a part of the present trace.

        Args:
            headers_of_call: headers of this request alone; they replace those of the client.

        Raises:
            ArgumentValueError: the function returned what no header can have.
        """
        headers = {key.lower(): value for key, value in (headers_of_call or {}).items()}
        metadata = (*(dict(self.metadata) | headers).items(), *_trace_context())
        if self.token is None or _AUTHORIZATION in headers:
            return metadata
        token = self.token() if callable(self.token) else self.token
        return (*metadata, (_AUTHORIZATION, _authorization("token", token)))

    def read(self, call: CallOptions) -> tuple[float | None, tuple[tuple[str, str | bytes], ...]]:
        """The deadline of a call in seconds, and its metadata. Raises `ArgumentError`."""
        for name in call.keys() - CallOptions.__annotations__.keys():
            raise ArgumentTypeError(name, "there is no such option")
        return self.timeout_for(call.get("timeout", UNSET)), self.call_metadata(call.get("metadata"))

    def timeout_for(self, timeout: Timeout) -> float | None:
        """A request's deadline in seconds: `timeout`, or the client's if it is not set; None for no deadline."""
        return self.timeout if timeout is UNSET else seconds("timeout", timeout)

    @contextmanager
    def errors(self, timeout: float | None, request_id: str = "") -> Iterator[None]:
        """Raises errors of gRPC as `StatusError`. May connect to addresses of this machine, for half a second each."""
        try:
            yield
        except grpc.RpcError as error:
            raise self._typed(error, timeout, request_id) from error

    @asynccontextmanager
    async def async_errors(
        self,
        timeout: float | None,  # noqa: ASYNC109  # for the error's text
        request_id: str = "",
    ) -> AsyncIterator[None]:
        """As `errors`, and on a thread what may connect, which would block the event loop.

        grpc.aio raises CancelledError also if only the RPC was cancelled, which is no cancellation of the task.
        """
        try:
            yield
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise await asyncio.to_thread(self._typed, error, timeout, request_id) from error
            raise self._typed(error, timeout, request_id) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise cancelled_error(request_id) from None

    def _typed(self, error: grpc.RpcError, timeout: float | None, request_id: str) -> StatusError:
        return status_error(error, target=self.target, tls=self.tls is not None, timeout=timeout, request_id=request_id)


_CHANNEL_OPTIONS: Mapping[str, Any] = {
    "grpc.max_receive_message_length": MAX_MESSAGE_BYTES,
    # gRPC retries a request only if it fits into this buffer; by default, 256 KiB.
    "grpc.per_rpc_retry_buffer_size": MAX_MESSAGE_BYTES,
    # A silently broken connection is detected within 40 s while a request is under way, however long the server writes
    # nothing: by default gRPC sends only two pings in a row without data. Servers accept one every 10 s.
    "grpc.keepalive_time_ms": 30_000,
    "grpc.keepalive_timeout_ms": 10_000,
    "grpc.http2.ping_timeout_ms": 10_000,  # this one counts in gRPC 1.85; the default is a minute
    "grpc.http2.max_pings_without_data": 0,
    # By default gRPC looks names up again once in 30 s at most: a rollout that is faster would leave no address.
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    # The client reconnects to a restarted server within about 2 s.
    "grpc.initial_reconnect_backoff_ms": 200,
    "grpc.max_reconnect_backoff_ms": 2_000,
}

_OF_SEVERAL_SERVERS = ("dns:", "ipv4:", "ipv6:")
"""Targets with these schemes: requests go to servers that report SERVING. A plain "host:port" is one server, whose own
answer tells more than that it is not healthy."""
_HEALTH_OF = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


def default_retry(target: str | None) -> RetryPolicy:
    """How clients of a target repeat requests by default; None: the target of the environment. For names, the attempts
    take longer than a name stays looked up: in a rollout, all known addresses may be those of servers that are gone."""
    if target is None:
        target = environment.read(environment.TARGET)
    return RetryPolicy(max_attempts=5, initial_backoff=0.2) if str(target).startswith("dns:") else RetryPolicy()


def _trace_context() -> list[tuple[str, str]]:
    """The headers of the present trace; none in a program that does not use OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return []
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return [*headers.items()]


def _credential(api_key: str | None, token: Token | None, header: str | None) -> tuple[str, Token | None]:
    """Where the credential comes from, "" without one, and the token to send; None also if it is a header already.

    Raises:
        ArgumentValueError: there are two, or it cannot be a header.
    """
    given: dict[str, Token | None] = {"api_key": api_key, "token": token, "metadata": header}
    if all(value is None for value in given.values()):
        given = {name: environment.read(name) for name in (environment.API_KEY, environment.TOKEN)}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ArgumentValueError(named[1], f"cannot be combined with {named[0]}: a request has one credential")
    if not named or named[0] == "metadata":
        return "".join(named), None
    if isinstance(value := given[named[0]], str):
        _authorization(named[0], value)
    return named[0], value


def _authorization(name: str, token: str) -> str:
    """The header's value. Raises ArgumentValueError, without the token in its text."""
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ArgumentValueError(name, "is empty, or has spaces, line ends or letters beyond ASCII")
    return f"Bearer {token}"


def package_version() -> str:
    """The installed version; "unknown" if the package is not installed."""
    try:
        return version("draftwood-client")
    except PackageNotFoundError:
        return "unknown"


def _user_agent() -> str:
    return f"draftwood-python/{package_version()}"
