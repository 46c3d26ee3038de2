"""A bound port, which answers before there is a model: imports nothing that takes long."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import vllm_engine_pb2

from draftwood.admin.v1 import audit_pb2, experiments_pb2, status_pb2, tenants_pb2
from draftwood.v1 import generation_pb2, memory_pb2
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth import Authenticator
from draftwood_service.rpc.access import Gate
from draftwood_service.rpc.calls import Run, ServedMethod, handlers
from draftwood_service.rpc.health import MAX_REQUEST_BYTES, Health, enable_reflection
from draftwood_service.settings import Settings
from draftwood_service.settings.groups import ListenSettings
from draftwood_service.starting import require_free, require_pem
from draftwood_service.telemetry import NO_TELEMETRY, Telemetry

STOP_SECONDS = 0.5
"""For calls that do not end by themselves, such as health watches, at the stop."""
OTHER_STREAMS = 256
"""Calls of a connection beside the requests that run or wait: of health, of memories, watches."""
FULL_CONNECTIONS = 16
"""Connections that may have all of their streams at once. It bounds memory, so it is far above what callers need."""
SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    memory_pb2.DESCRIPTOR.services_by_name["MemoryService"],
    audit_pb2.DESCRIPTOR.services_by_name["AuditService"],
    status_pb2.DESCRIPTOR.services_by_name["StatusService"],
    tenants_pb2.DESCRIPTOR.services_by_name["TenantService"],
    experiments_pb2.DESCRIPTOR.services_by_name["ExperimentService"],
    vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"],
)


LIVENESS = "liveness"
"""Name in health of what an orchestrator restarts the process for: SERVING while loading and draining, too."""


class BoundServer:
    """A bound port. It is bound before the model is loaded, so that an address in use is reported at once.

    Once started, health is NOT_SERVING and every other call is refused with `LoadingError`, until a `RunningServer`
    takes over.

    Attributes:
        health: what it says of each service.

    Args:
        telemetry: records its calls.

    Raises:
        InvalidInputError: the server cannot listen on the address, with the reason.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry = NO_TELEMETRY) -> None:
        require_free("port", settings.host, settings.port)
        self.telemetry = telemetry
        self.settings = settings
        self.grpc_server = grpc.aio.server(
            options=options(settings), maximum_concurrent_rpcs=FULL_CONNECTIONS * _streams(settings)
        )
        self.health = Health()
        self.authenticator = Authenticator(settings)
        self.gate = Gate(self.authenticator)
        self._served: dict[str, ServedMethod] = {}
        self._started = False
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port = _listen(self.grpc_server, "port", host, settings.port, server_credentials(settings))
        self.address = f"{host}:{self.port}"
        self.grpc_server.add_generic_rpc_handlers(
            tuple(handlers(service, self._served, self.gate, telemetry) for service in SERVICES)
        )
        self.health.add_to(self.grpc_server)
        if settings.reflection:
            enable_reflection([service.full_name for service in SERVICES], self.grpc_server, self.gate)
        self.health_port: int | None = None
        if settings.health_port is not None:
            small = settings.model_copy(update={"max_message_bytes": MAX_REQUEST_BYTES})
            self._health_server = grpc.aio.server(options=options(small))
            self.health.add_to(self._health_server)
            self.health_port = _listen(self._health_server, "health_port", host, settings.health_port, None)

    async def start(self) -> None:
        """Answers calls from now on; does nothing if it does so already."""
        if not self._started:
            self._started = True
            self.authenticator.start()
            await self.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self.set_alive(True)
            await self.grpc_server.start()
            if self.health_port is not None:
                await self._health_server.start()

    def serve(self, service: str, methods: Mapping[str, Run]) -> None:
        """Answers the calls of a service, given by its full name, from now on.

        Args:
            methods: all of them, by their names in the protocol.
        """
        from draftwood_service.rpc.parsing import Parser  # takes long to import

        descriptor = next(known for known in SERVICES if known.full_name == service)
        assert methods.keys() == {method.name for method in descriptor.methods}
        for method in descriptor.methods:
            parser = Parser(GetMessageClass(method.input_type))
            self._served[method.full_name] = ServedMethod(parser, methods[method.name])

    async def close(self) -> None:
        """Ends what `start` began. Live calls have `STOP_SECONDS` to end."""
        await self.grpc_server.stop(STOP_SECONDS)
        await self.authenticator.close()
        if self.health_port is not None:
            await self._health_server.stop(STOP_SECONDS)

    async def set_health(self, status: object) -> None:
        for name in ("", *(service.full_name for service in SERVICES)):
            await self.health.set(name, status)

    async def set_alive(self, alive: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        await self.health.set(LIVENESS, answer.SERVING if alive else answer.NOT_SERVING)


def _listen(server: grpc.aio.Server, key: str, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The port that the server listens on. Raises InvalidInputError."""
    address = f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InvalidInputError(key, port, f"cannot listen on {address}") from error


def _streams(settings: Settings) -> int:
    """Of a connection, at once."""
    return settings.max_running + settings.max_waiting + OTHER_STREAMS


def options(settings: Settings) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", _streams(settings)),
        # A message that nobody reads yet, such as that of a caller who is not known, fills its stream's window and no
        # more: 64 KiB. With estimates of the bandwidth a window may grow to as many MiB as a message has.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_time_ms", round(1000 * settings.keepalive)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),  # this one counts in gRPC 1.85; the default is a minute
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # pings go on while a request waits and nothing is written
    ]
    if settings.max_connection_age:
        options += [
            ("grpc.max_connection_age_ms", round(1000 * settings.max_connection_age)),
            ("grpc.max_connection_age_grace_ms", round(1000 * settings.max_timeout)),
        ]
    return options


def server_credentials(settings: ListenSettings) -> grpc.ServerCredentials | None:
    """The credentials of the settings' certificate; None without one.

    With `tls_client_ca` only clients with a certificate of one of these authorities are served.

    Raises:
        InvalidInputError: a file cannot be read, or has no PEM, or the key is not that of the certificate.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    files = _Files(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    require_pem(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
    return grpc.dynamic_ssl_server_credentials(
        files.configuration(),
        files.renewed,  # type: ignore[arg-type]  # gRPC takes None for "not changed", which its types leave out
        require_client_authentication=settings.tls_client_ca is not None,
    )


class _Files:
    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._lock = threading.Lock()
        self._stamps_served = self._stamps()

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(_read("tls_key", self._key), _read("tls_cert", self._cert))],
            None if self._client_ca is None else _read("tls_client_ca", self._client_ca),
        )

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificate if its files changed since the last call; called by gRPC at each handshake, on its threads.

        gRPC 1.85 puts what this returns in the place of what handshakes on other threads use, without a lock: that can
        end those with "missing selected ALPN property", and the process. So it is returned once, to one thread.
        """
        with self._lock:
            try:
                stamps = self._stamps()
                if stamps == self._stamps_served:
                    return None
                configuration = self.configuration()
            except (OSError, InvalidInputError):
                return None  # only some of the files are renewed yet; a later handshake reads them all
            self._stamps_served = stamps
            return configuration

    def _stamps(self) -> tuple[int, ...]:
        paths = (self._cert, self._key, self._client_ca)
        return tuple(path.stat().st_mtime_ns for path in paths if path is not None)


def _read(key: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInputError(key, path, f"cannot be read: {error.strerror}") from None
