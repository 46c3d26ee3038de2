"""The health service (grpc.health.v1). Anybody may call it, so what its callers can hold is bounded."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from draftwood_model_runner.errors import DraftwoodError
from draftwood_service.auth import Role
from draftwood_service.rpc.access import Gate
from draftwood_service.rpc.calls import MessageReader, abort, counted

MAX_REQUEST_BYTES = 1024
"""Of a server that has no other service."""
MAX_NAME = 256
"""Bytes of the name of a service."""
MAX_WATCHES = 1024
MAX_WATCHES_OF_CONNECTION = 16
_AT_ONCE = 4
"""Requests of a connection that are read at once: each may have as many bytes as those of other services."""
_READ_SECONDS = 5.0

_Context = grpc.aio.ServicerContext[Any, Any]
V1 = "grpc.reflection.v1.ServerReflection"
"""Its messages are those of v1alpha, with other names of their types, which are not sent."""
_METHOD = "ServerReflectionInfo"


class Health(health.aio.HealthServicer):  # type: ignore[misc]
    """What health says of each service, and the calls that ask."""

    def __init__(self) -> None:
        super().__init__()
        self._reader = MessageReader(_AT_ONCE, _READ_SECONDS)
        self._watches = Counter[str]()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Lets a server answer."""
        encode = health_pb2.HealthCheckResponse.SerializeToString
        # Requests are streams to gRPC: it would read any other before it calls, however many there are.
        methods: dict[str, Any] = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check, response_serializer=encode),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch, response_serializer=encode),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods),))

    async def _check(self, messages: AsyncIterator[bytes], context: _Context) -> Any:
        return await self.Check(await self._request(messages, context), context)

    async def _watch(self, messages: AsyncIterator[bytes], context: _Context) -> None:
        request = await self._request(messages, context)
        if self._watches.total() >= MAX_WATCHES:
            # By this status gRPC's clients take the server for healthy, and nobody loses it by the watches of others.
            await _abort(context, grpc.StatusCode.UNIMPLEMENTED, f"{MAX_WATCHES} watches are open; call Check")
        if self._watches[context.peer()] >= MAX_WATCHES_OF_CONNECTION:
            text = f"this connection has {MAX_WATCHES_OF_CONNECTION} watches, which is the limit; end one of them"
            await _abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        with counted(self._watches, context.peer()):
            await self.Watch(request, context)

    async def _request(self, messages: AsyncIterator[bytes], context: _Context) -> health_pb2.HealthCheckRequest:
        try:
            request = health_pb2.HealthCheckRequest.FromString(await self._reader.read(messages, context.peer()))
        except DraftwoodError as error:
            await abort(context, error, "health", uuid.uuid4().hex)
            raise asyncio.CancelledError from error
        except DecodeError:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "request: not a serialized HealthCheckRequest")
        if len(request.service.encode()) > MAX_NAME:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, f"service: has more than {MAX_NAME} bytes")
        return request


async def _abort(context: _Context, code: grpc.StatusCode, text: str) -> NoReturn:
    await context.abort(code, text)
    raise AssertionError


def enable_reflection(services: Iterable[str], server: grpc.aio.Server, gate: Gate) -> None:
    """Adds reflection of the services, given by their full names, and of the health service, for all who may call."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflect = reflection.aio.ReflectionServicer(names).ServerReflectionInfo

    async def answer(
        requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[reflection_pb2.ServerReflectionResponse]:
        try:
            await gate.admit(context, _METHOD, Role.CALLER)
        except DraftwoodError as error:
            request_id = uuid.uuid4().hex
            gate.note(error, context, _METHOD, request_id)
            await abort(context, error, _METHOD, request_id)
            return
        async for response in reflect(requests, context):
            yield response

    method = grpc.stream_stream_rpc_method_handler(
        answer,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(name, {_METHOD: method}) for name in (reflection.SERVICE_NAME, V1)]
    server.add_generic_rpc_handlers(tuple(handlers))
