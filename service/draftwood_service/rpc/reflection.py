"""Server reflection under both of its names: tools ask for v1 first, and grpcio-reflection has only v1alpha."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

from draftwood_model_runner.errors import DraftwoodError
from draftwood_service.auth import Role
from draftwood_service.rpc.access import Gate
from draftwood_service.rpc.calls import abort

V1 = "grpc.reflection.v1.ServerReflection"
"""Its messages are those of v1alpha, with other names of their types, which are not sent."""
_METHOD = "ServerReflectionInfo"


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
