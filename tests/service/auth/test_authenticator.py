"""Keys, tokens and certificates side by side: which one counts, when it ends, and what the log says of a refusal.

Clients that are known by their certificates, and the port for probes that have none.
"""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

import draftwood_client
from draftwood.v1.generation_pb2 import GetModelInfoRequest
from draftwood.v1.generation_pb2_grpc import GenerationServiceStub
from draftwood_client import NO_RETRY, AsyncClient, PermissionDeniedError, TlsConfig, UnavailableError
from draftwood_service.auth import Role, UnauthenticatedError
from draftwood_service.auth.auth_file import ApiKeys, KeyEntry, new_key
from draftwood_service.auth.authenticator import Authenticator, CertificateNames
from draftwood_service.settings.groups import AuthSettings
from tests.certificates import make_certificate
from tests.service.auth.issuer import AUDIENCE, EC_KEY, ISSUER, public_keys, token, write_keys
from tests.service.fakes import serving

EXPIRES = datetime(2030, 1, 1, tzinfo=UTC)
CERTIFICATE = CertificateNames(("spiffe://acme/billing",), ("ops.example",))


async def cause(authenticator: Authenticator, bearer: str | None, certificate: CertificateNames | None = None) -> str:
    """What the log says of a refusal."""
    with pytest.raises(UnauthenticatedError, match=r"the call has no (valid )?credential: ") as refused:
        await authenticator.principal(bearer, certificate)
    return refused.value.cause


@pytest.fixture
def key() -> str:
    return new_key().key


@pytest.fixture
def auth_file(tmp_path: Path, key: str) -> Path:
    sha256 = hashlib.sha256(key.encode()).hexdigest()
    entry = {"id": key.split("_")[1], "tenant": "keys", "sha256": sha256, "created": "2026-01-01"}
    certificates = [
        {"name": "spiffe://acme/billing", "tenant": "certificates"},
        {"common_name": "ops.example", "role": "operator"},
    ]
    path = tmp_path / "auth.yaml"
    path.write_text(yaml.safe_dump({"keys": [entry], "certificates": certificates}))
    return path


@pytest.fixture
def issuer(tmp_path: Path) -> dict[str, Any]:
    jwks = write_keys(tmp_path / "jwks.json", public_keys())
    return {"jwt_jwks": str(jwks), "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}


async def test_a_bearer_counts_before_a_certificate_and_alternative_names_before_common_ones(
    key: str, auth_file: Path, issuer: dict[str, Any]
) -> None:
    both = Authenticator(AuthSettings(auth_file=auth_file, **issuer))
    for bearer, certificate, name, tenant in (
        (key, CERTIFICATE, f"key:{key.split('_')[1]}", "keys"),
        (token(), CERTIFICATE, "token:ann", "acme"),
        (None, CERTIFICATE, "certificate:spiffe://acme/billing", "certificates"),
        (None, CertificateNames((), CERTIFICATE.common), "certificate:ops.example", None),
    ):
        found = await both.principal(bearer, certificate)
        assert (found.name, found.tenant) == (name, tenant)
    assert "token: " in await cause(both, "nonsense", CERTIFICATE)
    assert await cause(both, "dw_nonsense", CERTIFICATE) == "not an API key"
    assert await cause(both, None, CertificateNames(("spiffe://other",), ("other",))) == "unknown certificate"


async def test_keys_alone_and_tokens_alone_refuse_the_others(key: str, auth_file: Path, issuer: dict[str, Any]) -> None:
    keys, tokens = Authenticator(AuthSettings(auth_file=auth_file)), Authenticator(AuthSettings(**issuer))
    assert [keys.uses_certificates, tokens.uses_certificates] == [True, False]
    assert await cause(keys, token()) == "not an API key"
    assert (await cause(tokens, key)).startswith("token: ")
    assert await cause(tokens, None, CERTIFICATE) == await cause(keys, None) == "no credential"


async def test_without_credentials_everybody_is_an_operator() -> None:
    opened = Authenticator(AuthSettings())
    assert opened.is_open
    for bearer, certificate in ((None, None), ("anything", CERTIFICATE)):
        found = await opened.principal(bearer, certificate)
        assert (found.name, found.role, found.tenant) == ("anyone", Role.OPERATOR, None)
    await opened.close()  # a server whose start failed never started it


async def test_keys_of_the_issuer_are_followed(tmp_path: Path, issuer: dict[str, Any]) -> None:
    write_keys(tmp_path / "jwks.json", public_keys("rsa"))
    tokens, of_rsa = Authenticator(AuthSettings(**issuer)), token()
    tokens.start()
    try:
        assert (await tokens.principal(of_rsa, None)).tenant == "acme"
        write_keys(tmp_path / "jwks.json", public_keys("ec"))
        async with asyncio.timeout(20):
            while True:
                try:
                    await tokens.principal(of_rsa, None)
                except UnauthenticatedError:
                    break
                await asyncio.sleep(0.01)
        assert await tokens.principal(token(EC_KEY, "ES256", "ec"), None)
    finally:
        await tokens.close()


def test_a_key_ends_at_its_time_and_refusals_differ_in_the_log_alone() -> None:
    new, other = new_key(), new_key()
    entry = KeyEntry(id=new.id, tenant="a", sha256=new.sha256, created=EXPIRES, expires=EXPIRES)
    keys, end = ApiKeys([entry]), EXPIRES.timestamp()
    assert keys.principal(new.key, end - 0.001).tenant == "a"
    wrong = new.key[:-1] + ("A" if new.key[-1] != "A" else "B")
    for bad, now, said in (
        (new.key, end, f"key {new.id} has expired"),
        (wrong, end - 1, f"wrong secret of key {new.id}"),
        (other.key, end - 1, "unknown API key"),
        (new.key + "x", end - 1, "not an API key"),
    ):
        with pytest.raises(UnauthenticatedError) as refused:
            keys.principal(bad, now)
        assert refused.value.cause == said
        assert str(refused.value) == str(UnauthenticatedError(""))


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

        def client_of(name: str) -> AsyncClient:
            return AsyncClient(target, tls=TlsConfig.from_files(server, *clients[name]), retry=NO_RETRY)

        async with client_of("billing") as billing:
            assert (await billing.generate("x", max_tokens=2)).tenant == "acme"
            with pytest.raises(PermissionDeniedError):
                await billing.generate("x", max_tokens=2, tenant="beta")
        async with client_of("ops") as ops:
            assert (await ops.generate("x", max_tokens=2, tenant="beta")).tenant == "beta"
        async with client_of("stranger") as stranger:
            with pytest.raises(draftwood_client.UnauthenticatedError, match="the call has no valid credential"):
                await stranger.model_info()
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
