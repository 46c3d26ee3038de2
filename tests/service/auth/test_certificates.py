"""Clients that are known by their certificates, and the port for probes that have none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.v1.generation_pb2 import GetModelInfoRequest
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client import (
    NO_RETRY,
    AsyncClient,
    PermissionDeniedError,
    TlsConfig,
    UnauthenticatedError,
    UnavailableError,
)
from draftwood_service.auth.auth_file import new_key
from tests.certificates import make_certificate
from tests.service.fakes import serving

SPIFFE = "spiffe://acme.example/billing"


async def test_a_certificate_names_its_principal(tmp_path: Path) -> None:
    server, server_key = make_certificate(tmp_path, "server")
    clients = {
        "billing": make_certificate(tmp_path, "billing", SPIFFE),
        "ops": make_certificate(tmp_path, "ops"),
        "stranger": make_certificate(tmp_path, "stranger", "spiffe://acme.example/other"),
    }
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(b"".join(certificate.read_bytes() for certificate, _ in clients.values()))
    file = tmp_path / "auth.yaml"
    file.write_text(f"certificates:\n- {{name: '{SPIFFE}', tenant: acme}}\n- {{common_name: ops, role: operator}}\n")
    tls: dict[str, Any] = {"tls_cert": server, "tls_key": server_key, "tls_client_ca": authorities}
    async with serving(auth_file=file, health_port=0, **tls) as served:
        target = f"localhost:{served.server.port}"

        def client_of(name: str, api_key: str | None = None) -> AsyncClient:
            return AsyncClient(
                target, tls=TlsConfig.from_files(server, *clients[name]), retry=NO_RETRY, api_key=api_key
            )

        async with client_of("billing") as billing:
            assert (await billing.generate("x", max_tokens=2)).tenant == "acme"
            with pytest.raises(PermissionDeniedError):
                await billing.generate("x", max_tokens=2, tenant="beta")
        async with client_of("ops") as ops:
            assert (await ops.generate("x", max_tokens=2, tenant="beta")).tenant == "beta"
        async with client_of("stranger") as stranger:
            with pytest.raises(UnauthenticatedError, match="the call has no valid credential"):
                await stranger.model_info()
        async with client_of("ops", new_key().key) as wrong_key:  # a credential that is given counts
            with pytest.raises(UnauthenticatedError):
                await wrong_key.model_info()
        async with AsyncClient(target, tls=TlsConfig.from_files(server), retry=NO_RETRY) as without_certificate:
            with pytest.raises(UnavailableError):
                await without_certificate.model_info()

        probe = f"127.0.0.1:{served.server.health_port}"
        async with grpc.aio.insecure_channel(probe) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await GenerationServiceStub(channel).GetModelInfo(GetModelInfoRequest())
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
