"""The server: bound, started, serving, draining, stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from model_runner.errors import InvalidInputError
from service.auth import Authenticator
from service.engine.bridge import EngineBridge
from service.engine.recovery import EngineRecovery
from service.errors import LoadingError, ShuttingDownError
from service.listening import require_free
from service.rpc.access import Gate
from service.rpc.calls import Call, Method, handlers
from service.rpc.generation import SERVICE, GenerationServicer
from service.rpc.memory import SERVICE as MEMORY_SERVICE
from service.rpc.memory import MemoryServicer
from service.rpc.reflection import enable_reflection
from service.rpc.tls import server_credentials
from service.serving import ServedModel, Serving
from service.settings import Settings

_log = structlog.get_logger(__name__)

_STREAMS_SHARE = 0.75
"""The part of the grace in which live calls may finish; the rest is for their status and the end of the engine."""
_BEFORE_AWAY = 0.1
"""The part of it that passes between NOT_SERVING and GOAWAY. A call that arrives in the moment of GOAWAY ends with
CANCELLED, by gRPC itself: until then clients that watch health have gone, and others are refused with UNAVAILABLE."""
_STATUS_SECONDS = 1.0
"""For cut-off streams to send their status. Not tuned."""
_STOP_SECONDS = 0.5
"""For calls that do not end by themselves, such as health watches, at the stop. Not tuned."""
_LEAST_ENGINE_SECONDS = 1.0
"""For the engine to end by itself, however little is left of the grace. Not tuned."""


_SERVICES = (SERVICE, MEMORY_SERVICE)


class BoundServer:
    """A bound port. It is bound before the model is loaded, so that an address in use is reported at once.

    Once started, health is NOT_SERVING and every other call is refused with `LoadingError`, until a `RunningServer`
    takes over.

    Raises:
        InvalidInputError: the server cannot listen on the address, with the reason.
    """

    def __init__(self, settings: Settings) -> None:
        require_free(settings)
        self.settings = settings
        self.grpc_server = grpc.aio.server(options=_options(settings))
        self.health = health.aio.HealthServicer()
        self.authenticator = Authenticator(settings)
        self.gate = Gate(self.authenticator)
        self.handlers = [_Handlers(service, self.gate) for service in _SERVICES]
        self._started = False
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.port = _listen(self.grpc_server, "port", host, settings.port, server_credentials(settings))
        self.address = f"{host}:{self.port}"
        self.grpc_server.add_generic_rpc_handlers(tuple(self.handlers))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc_server)
        if settings.reflection:
            enable_reflection([service.full_name for service in _SERVICES], self.grpc_server, self.gate)
        self.health_port: int | None = None
        if settings.health_port is not None:
            self._health_server = grpc.aio.server(options=_options(settings))
            health_pb2_grpc.add_HealthServicer_to_server(self.health, self._health_server)
            self.health_port = _listen(self._health_server, "health_port", host, settings.health_port, None)

    async def start(self) -> None:
        """Answers calls from now on; does nothing if it does so already."""
        if not self._started:
            self._started = True
            self.authenticator.start()
            await self.set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
            await self.grpc_server.start()
            if self.health_port is not None:
                await self._health_server.start()

    async def close(self) -> None:
        """Ends the health port, and the look at changed credentials."""
        await self.authenticator.close()
        if self.health_port is not None:
            await self._health_server.stop(_STOP_SECONDS)

    async def set_health(self, status: object) -> None:
        for name in ("", *(service.full_name for service in _SERVICES)):
            await self.health.set(name, status)


class _Handlers(grpc.GenericRpcHandler):
    """The methods of a service; until there are any, each call is refused."""

    def __init__(self, service: ServiceDescriptor, gate: Gate) -> None:
        async def refuse(request: Any, call: Call) -> None:
            raise LoadingError()

        self._service = service
        self._gate = gate
        self._handlers = handlers(service, {method.name: refuse for method in service.methods}, gate)

    def use(self, methods: Mapping[str, Method]) -> None:
        self._handlers = handlers(self._service, methods, self._gate)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._handlers.service(handler_call_details)


class RunningServer:
    """Serves a model until it is stopped.

    Attributes:
        recovery: starts an engine anew that has died; once it has failed, what is left to do is to stop.

    Args:
        bridge: to the engine of this model, started. The server closes it.
    """

    def __init__(self, bound: BoundServer, model: ServedModel, bridge: EngineBridge) -> None:
        settings = bound.settings
        self.address = bound.address
        self.port = bound.port
        self.health_port = bound.health_port
        self._settings = settings
        self._bound = bound
        self._stopping: asyncio.Task[None] | None = None
        self.bridge = bridge
        self.recovery = EngineRecovery(bridge, settings.engine_restarts, self._set_serving)
        self._servicer = GenerationServicer(Serving.of(model, settings), self.bridge, settings)
        memory = MemoryServicer(bridge, model, settings)
        of_memory = {name: _counted(method, bridge) for name, method in memory.methods.items()}
        methods = (self._servicer.methods, of_memory)
        for of_service, its_methods in zip(bound.handlers, methods, strict=True):
            of_service.use(its_methods)

    async def start(self) -> None:
        """Starts serving."""
        await self._bound.start()
        if not self.bridge.stopped:
            await self._set_serving(True)

    async def stop(self, grace: float | None = None) -> None:
        """Drains and stops; further calls wait for the same stop.

        Health becomes NOT_SERVING, requests that wait and new ones end with UNAVAILABLE, and a little later the port is
        closed and clients are told to go elsewhere (GOAWAY). Requests that run, and calls to MemoryService, may finish
        or end so as well; then the engine is closed. All of it takes `grace` seconds at most (None: the settings'
        `drain_grace`), and one more for an engine that does not end.
        """
        if self._stopping is None:
            seconds = self._settings.drain_grace if grace is None else grace
            self._stopping = asyncio.create_task(self._stop(seconds))
        await asyncio.shield(self._stopping)

    async def _stop(self, grace: float) -> None:
        await self._bound.health.enter_graceful_shutdown()
        await self.recovery.close()
        self.bridge.drain()
        _log.info("draining", live=self.bridge.live, grace_seconds=grace)
        deadline = time.monotonic() + grace
        idle = await self.bridge.wait_idle(_BEFORE_AWAY * grace)
        going_away = asyncio.create_task(self._bound.grpc_server.stop(_STOP_SECONDS if idle else grace))
        if not await self.bridge.wait_idle((_STREAMS_SHARE - _BEFORE_AWAY) * grace):
            _log.warning("drain grace is over", aborted=self.bridge.live)
            self.bridge.fail_live(ShuttingDownError)
            await self.bridge.wait_idle(_STATUS_SECONDS)
        await asyncio.gather(self._bound.grpc_server.stop(_STOP_SECONDS), going_away)
        await self._bound.close()
        await self.bridge.close(max(deadline - time.monotonic(), _LEAST_ENGINE_SECONDS))
        self._servicer.close()
        _log.info("stopped")

    async def _set_serving(self, serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        await self._bound.set_health(answer.SERVING if serving else answer.NOT_SERVING)


def _counted(method: Method, bridge: EngineBridge) -> Method:
    """The same method, as a call that a drain waits for."""

    async def run(request: Any, call: Call) -> Any:
        with bridge.other_call():
            return await method(request, call)

    return run


def _listen(server: grpc.aio.Server, key: str, host: str, port: int, credentials: grpc.ServerCredentials | None) -> int:
    """The port that the server listens on. Raises InvalidInputError."""
    address = f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise InvalidInputError(key, port, f"cannot listen on {address}") from error


def _options(settings: Settings) -> list[tuple[str, int]]:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
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
