"""How all clients reach a server: target, TLS, credentials, deadline, channel options."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood_client._status import status_error
from draftwood_client.errors import ArgumentTypeError, ArgumentValueError, StatusError
from draftwood_client.request import GenerateOptions, Prompt, generate_request, seconds
from draftwood_client.retry import RetryPolicy

DEFAULT_TARGET = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 16 * 2**20

Token = str | Callable[[], str]
"""A bearer token, or a function that is called for each request."""
_AUTHORIZATION = "authorization"


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """TLS settings; certificates and keys are PEM bytes.

    Attributes:
        root_certificates: trusted authorities; None for gRPC's own set of public authorities.
        certificate_chain, private_key: the client certificate, for servers that require one. Both or neither.
        server_name: the name on the server's certificate, if it differs from the host of the target.

    Raises:
        ArgumentValueError: only one of `certificate_chain` and `private_key` is given.
    """

    root_certificates: bytes | None = None
    certificate_chain: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ArgumentValueError("tls", "certificate_chain and private_key must be given together")

    @classmethod
    def from_files(
        cls,
        root_certificates: str | Path | None = None,
        certificate_chain: str | Path | None = None,
        private_key: str | Path | None = None,
        server_name: str | None = None,
    ) -> TlsConfig:
        """Reads PEM files.

        Raises:
            ArgumentValueError: a file cannot be read, or only one of certificate and key is given.
        """
        return cls(
            _pem("root_certificates", root_certificates),
            _pem("certificate_chain", certificate_chain),
            _pem("private_key", private_key),
            server_name,
        )

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.root_certificates, self.private_key, self.certificate_chain)


@dataclass(frozen=True, slots=True)
class Connection:
    """The checked constructor arguments of `Client` and `AsyncClient`; see there."""

    target: str
    tenant: str | None
    timeout: float | None
    retry: RetryPolicy
    tls: TlsConfig | None
    token: Token | None = field(repr=False)
    metadata: tuple[tuple[str, str], ...] = field(repr=False)
    channel_options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(
        cls,
        target: str,
        *,
        tenant: str | None,
        timeout: float | None,
        retry: RetryPolicy,
        tls: bool | TlsConfig,
        api_key: str | None,
        token: Token | None,
        plaintext_credentials: bool,
        metadata: Mapping[str, str] | None,
        channel_options: Mapping[str, Any] | None,
    ) -> Connection:
        if not isinstance(target, str):
            raise ArgumentTypeError("target", f"must be a str, not {type(target).__name__}")
        if not target:
            raise ArgumentValueError("target", f"is empty; it must name a server, such as {DEFAULT_TARGET!r}")
        headers = {key.lower(): value for key, value in (metadata or {}).items()}
        given = {"api_key": api_key, "token": token, "metadata": headers.get(_AUTHORIZATION)}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise ArgumentValueError(named[1], f"cannot be combined with {named[0]}: a request has one credential")
        if named and not (tls or plaintext_credentials or is_local(target)):
            problem = f"would be sent to {target} in clear text; use TLS, or allow it with plaintext_credentials"
            raise ArgumentValueError(named[0], problem)
        for name, value in (("api_key", api_key), ("token", token)):
            if isinstance(value, str):
                _authorization(name, value)
        return cls(
            target=target,
            tenant=tenant,
            timeout=seconds("timeout", timeout),
            retry=retry,
            tls=(TlsConfig() if tls else None) if isinstance(tls, bool) else tls,
            token=token if api_key is None else api_key,
            metadata=tuple(headers.items()),
            channel_options=tuple((channel_options or {}).items()),
        )

    def open_channel(self) -> grpc.Channel:
        """A new blocking channel. It connects with its first request."""
        if self.tls is None:
            return grpc.insecure_channel(self.target, options=self.options())
        return grpc.secure_channel(self.target, self.tls.credentials(), options=self.options())

    def options(self) -> list[tuple[str, Any]]:
        """gRPC channel arguments, each once, for gRPC takes the first: those of the caller replace the others."""
        own: dict[str, Any] = {
            **_CHANNEL_OPTIONS,
            "grpc.primary_user_agent": _user_agent(),
            "grpc.service_config": json.dumps(self._service_config()),
        }
        if self.tls and self.tls.server_name:
            own["grpc.ssl_target_name_override"] = self.tls.server_name
        return [*(own | dict(self.channel_options)).items()]

    def _service_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "loadBalancingConfig": [{"round_robin": {}}],
            "methodConfig": self.retry.method_config(),
        }
        if self.target.startswith(_OF_SEVERAL_SERVERS):
            config["healthCheckConfig"] = {"serviceName": _HEALTH_OF}
        return config

    def generate_request(self, prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
        """The request, with the client's tenant if it names none, and with an id, which all its attempts share.

        Raises:
            ArgumentError: prompt or options cannot be encoded.
        """
        if self.tenant is not None and options.get("tenant") is None:
            options["tenant"] = self.tenant
        request = generate_request(prompt, options)
        if not request.request_id:
            request.request_id = uuid.uuid4().hex
        return request

    def call_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of one request: a `token` that is a function is called for each, and where the program is traced
        by OpenTelemetry, the request is a part of the present trace.

        Raises:
            ArgumentValueError: the function returned what no header can have.
        """
        metadata = (*self.metadata, *_trace_context())
        if self.token is None:
            return metadata
        token = self.token() if callable(self.token) else self.token
        return (*metadata, (_AUTHORIZATION, _authorization("token", token)))

    def timeout_for(self, timeout: float | None) -> float | None:
        """A request's deadline in seconds: `timeout`, or the client's if it is None; infinity means no deadline."""
        return self.timeout if timeout is None else seconds("timeout", timeout)

    def error(self, error: grpc.RpcError, timeout: float | None, request_id: str = "") -> StatusError:
        return status_error(error, target=self.target, timeout=timeout, request_id=request_id)


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


def _trace_context() -> list[tuple[str, str]]:
    """The headers of the present trace; none in a program that does not use OpenTelemetry."""
    if "opentelemetry.trace" not in sys.modules:
        return []
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return [*headers.items()]


def _authorization(name: str, token: str) -> str:
    """The header's value. Raises ArgumentValueError, without the token in its text."""
    if not (token and token.isascii() and token.isprintable() and " " not in token):
        raise ArgumentValueError(name, "is empty, or has spaces, line ends or letters beyond ASCII")
    return f"Bearer {token}"


def is_local(target: str) -> bool:
    """Whether a target, as gRPC reads it, is on this machine for certain."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("ipv4", "ipv6"):
        return all(_is_loopback(address) for address in rest.split(","))
    return _is_loopback(target.removeprefix("dns:///").removeprefix("dns:"))


def _is_loopback(address: str) -> bool:
    """Whether "host:port", "[host]:port" or "host" is this machine."""
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::\d+)?", address)
    host = bracketed[1] if bracketed else address.partition(":")[0] if address.count(":") == 1 else address
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def package_version() -> str:
    """The installed version; "unknown" if the package is not installed."""
    try:
        return version("draftwood-client")
    except PackageNotFoundError:
        return "unknown"


def _user_agent() -> str:
    return f"draftwood-python/{package_version()}"


def _pem(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentValueError(f"tls.{name}", f"cannot read {str(path)!r}: {error.strerror}") from error
