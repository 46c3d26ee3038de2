"""The server: bound, started, serving, draining, stopped."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from model_runner.errors import InvalidInputError
from service.engine.bridge import EngineBridge
from service.errors import ShuttingDownError
from service.rpc.calls import handlers
from service.rpc.generation import SERVICE, GenerationServicer
from service.rpc.memory import SERVICE as MEMORY_SERVICE
from service.rpc.memory import MemoryServicer
from service.rpc.tls import server_credentials
from service.serving import ServedModel, Serving
from service.settings import Settings

_log = structlog.get_logger(__name__)

_STATUS_SECONDS = 1.0
"""For cut-off streams to send their status. Not tuned."""
_STOP_SECONDS = 0.5
"""For calls that do not end by themselves, such as health watches, at the stop. Not tuned."""


class BoundServer:
    """A bound port. It is bound before the model is loaded, so that an address in use is reported at once.

    Raises:
        InvalidInputError: the server cannot listen on the address, with the reason.
    """

    def __init__(self, settings: Settings) -> None:
        _require_free(settings)
        self.settings = settings
        self.grpc_server = grpc.aio.server(options=_options(settings))
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        credentials = server_credentials(settings)
        try:
            if credentials is None:
                self.port = self.grpc_server.add_insecure_port(f"{host}:{settings.port}")
            else:
                self.port = self.grpc_server.add_secure_port(f"{host}:{settings.port}", credentials)
        except RuntimeError as error:
            raise InvalidInputError("port", settings.port, f"cannot listen on {host}:{settings.port}") from error
        self.address = f"{host}:{self.port}"


class RunningServer:
    """Serves a model until it is stopped.

    Args:
        bridge: to the engine of this model, started. The server closes it.
    """

    def __init__(self, bound: BoundServer, model: ServedModel, bridge: EngineBridge) -> None:
        settings = bound.settings
        self.address = bound.address
        self.port = bound.port
        self._settings = settings
        self._server = bound.grpc_server
        self._health = health.aio.HealthServicer()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self.bridge = bridge
        bridge.on_stopped = self._engine_stopped
        self._servicer = GenerationServicer(Serving.of(model, settings), self.bridge, settings)
        memory_servicer = MemoryServicer(bridge, model, settings)
        self._server.add_generic_rpc_handlers(
            (handlers(SERVICE, self._servicer.methods), handlers(MEMORY_SERVICE, memory_servicer.methods))
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (SERVICE.full_name, MEMORY_SERVICE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self) -> None:
        """Starts serving."""
        await self._server.start()
        if not self.bridge.stopped:
            await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace: float | None = None) -> None:
        """Drains and stops; further calls wait for the same stop.

        Health becomes NOT_SERVING, no request is admitted any more, live ones get `grace` seconds (None: the settings'
        `drain_grace`), the others end with UNAVAILABLE, and the engine is closed.
        """
        if self._stopping is None:
            seconds = self._settings.drain_grace if grace is None else grace
            self._stopping = asyncio.create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace: float) -> None:
        await self._health.enter_graceful_shutdown()
        self.bridge.drain()
        _log.info("draining", live=self.bridge.live, grace_seconds=grace)
        if not await self.bridge.wait_idle(grace):
            _log.warning("drain grace is over", aborted=self.bridge.live)
            self.bridge.fail_live(ShuttingDownError)
            await self.bridge.wait_idle(_STATUS_SECONDS)
        await self._server.stop(_STOP_SECONDS)
        await self.bridge.close()
        self._servicer.close()
        _log.info("stopped")

    async def _set_health(self, status: object) -> None:
        for name in ("", SERVICE.full_name):
            await self._health.set(name, status)

    def _engine_stopped(self) -> None:
        task = asyncio.create_task(self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _options(settings: Settings) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", round(1000 * settings.keepalive)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    if settings.max_connection_age:
        options += [
            ("grpc.max_connection_age_ms", round(1000 * settings.max_connection_age)),
            ("grpc.max_connection_age_grace_ms", round(1000 * settings.max_timeout)),
        ]
    return options


def _require_free(settings: Settings) -> None:
    """Raises InvalidInputError, with the reason, if the server cannot listen on the address: gRPC reports no reason."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.getaddrinfo(settings.host, settings.port, family)  # `create_server` hides why a name is not resolved
        socket.create_server((settings.host, settings.port), family=family).close()
    except socket.gaierror as error:
        raise InvalidInputError("host", settings.host, str(error.strerror).lower()) from None
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        field, value = ("host", settings.host) if error.errno == errno.EADDRNOTAVAIL else ("port", settings.port)
        raise InvalidInputError(field, value, reason) from None
