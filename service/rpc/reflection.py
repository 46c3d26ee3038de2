"""Server reflection under both of its names: tools ask for v1 first, and grpcio-reflection has only v1alpha."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1 = "grpc.reflection.v1.ServerReflection"
"""Its messages are those of v1alpha, with other names of their types, which are not sent."""


def enable_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Adds reflection of the services, given by their full names, and of the health service."""
    names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(V1, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))
