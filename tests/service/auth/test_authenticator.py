"""Keys, tokens and certificates side by side: which one counts, when it ends, and what the log says of a refusal."""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.auth import IssuerUnavailableError, PermissionDeniedError, Principal, Role, UnauthenticatedError
from draftwood_service.auth.auth_file import ApiKeys, KeyEntry, new_key
from draftwood_service.auth.authenticator import Authenticator, CertificateNames
from draftwood_service.settings.groups import AuthSettings
from tests.service.auth.issuer import AUDIENCE, EC_KEY, ISSUER, public_keys, token, write_keys

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
    entry = {"id": key.split("_")[1], "tenant": "keys", "sha256": sha256_of(key), "created": "2026-01-01"}
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


def sha256_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_keys_tokens_and_certificates_at_once(key: str, auth_file: Path, issuer: dict[str, Any]) -> None:
    both = Authenticator(AuthSettings(auth_file=auth_file, **issuer))
    assert (await both.principal(key, None)).tenant == "keys"
    assert (await both.principal(token(), None)).tenant == "acme"
    assert (await both.principal(None, CERTIFICATE)).tenant == "certificates"
    # A bearer counts before the certificate, also one that is not valid.
    assert (await both.principal(token(), CERTIFICATE)).tenant == "acme"
    assert "token: " in await cause(both, "nonsense", CERTIFICATE)
    assert await cause(both, "dw_nonsense", CERTIFICATE) == "not an API key"


async def test_each_kind_alone_refuses_the_others(key: str, auth_file: Path, issuer: dict[str, Any]) -> None:
    keys, tokens = Authenticator(AuthSettings(auth_file=auth_file)), Authenticator(AuthSettings(**issuer))
    assert await cause(keys, token()) == "not an API key"
    assert (await cause(tokens, key)).startswith("token: ")
    assert await cause(tokens, None, CERTIFICATE) == "no credential"
    assert await cause(keys, None) == "no credential"
    assert await cause(keys, None, CertificateNames(("spiffe://other",), ("other",))) == "unknown certificate"


async def test_without_credentials_everybody_is_an_operator() -> None:
    opened = Authenticator(AuthSettings())
    assert opened.is_open
    for bearer, certificate in ((None, None), ("anything", CERTIFICATE)):
        found = await opened.principal(bearer, certificate)
        assert (found.name, found.role, found.tenant) == ("anyone", Role.OPERATOR, None)
    await opened.close()  # a server whose start failed never started it


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("keys: []", False),
        ("certificates: [{name: x, tenant: a}]", True),
        ("certificates: [{common_name: x, tenant: a}]", True),
        (None, False),
    ],
)
def test_certificates_are_asked_for_if_the_file_names_one(
    text: str | None, used: bool, tmp_path: Path, issuer: dict[str, Any]
) -> None:
    path = None if text is None else tmp_path / "auth.yaml"
    if path is not None:
        path.write_text(str(text))
    assert Authenticator(AuthSettings(auth_file=path, **issuer)).uses_certificates is used


async def test_keys_of_the_issuer_may_be_at_a_url(issuer: dict[str, Any]) -> None:
    tokens = Authenticator(AuthSettings(**issuer | {"jwt_jwks": "https://127.0.0.1:1/jwks"}))
    with capture_logs() as logs, pytest.raises(IssuerUnavailableError):
        await tokens.principal(token(), None)
    assert [line["url"] for line in logs] == ["https://127.0.0.1:1/jwks"]


async def test_alternative_names_count_before_common_ones(auth_file: Path) -> None:
    keys = Authenticator(AuthSettings(auth_file=auth_file))
    by_name = await keys.principal(None, CERTIFICATE)
    assert (by_name.name, by_name.role) == ("certificate:spiffe://acme/billing", Role.CALLER)
    by_common_name = await keys.principal(None, CertificateNames((), CERTIFICATE.common))
    assert (by_common_name.name, by_common_name.role) == ("certificate:ops.example", Role.OPERATOR)


async def test_keys_of_the_issuer_are_followed(tmp_path: Path, issuer: dict[str, Any]) -> None:
    write_keys(tmp_path / "jwks.json", public_keys("rsa"))
    tokens, of_rsa = Authenticator(AuthSettings(**issuer)), token()
    tokens.start()
    try:
        assert (await tokens.principal(of_rsa, None)).tenant == "acme"
        write_keys(tmp_path / "jwks.json", public_keys("ec"))
        for _ in range(2000):
            with suppress(UnauthenticatedError):
                assert await tokens.principal(token(EC_KEY, "ES256", "ec"), None)
                break
            await asyncio.sleep(0.01)
        with pytest.raises(UnauthenticatedError):
            await tokens.principal(of_rsa, None)
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


def test_what_a_role_does_not_allow_is_refused_with_the_reason() -> None:
    principal = Principal("key:x", Role.CALLER, "acme")
    principal.require(Role.CALLER, "Generate")
    with pytest.raises(PermissionDeniedError, match=r"^PurgeMemory requires the role tenant-admin$") as refused:
        principal.require(Role.TENANT_ADMIN, "PurgeMemory")
    assert (refused.value.principal, refused.value.tenant) == ("key:x", None)
    with pytest.raises(
        PermissionDeniedError, match=r"^the credential is for another tenant than the request$"
    ) as other:
        principal.tenant_for("beta")
    assert (other.value.principal, other.value.tenant) == ("key:x", "beta")


@pytest.mark.parametrize("tenant", ["a\n", "a" * 300])
def test_a_tenant_that_is_no_identifier_is_refused(tenant: str) -> None:
    for named in (
        lambda: Principal("x", Role.CALLER, tenant),
        lambda: Principal("x", Role.OPERATOR).tenant_for(tenant),
    ):
        with pytest.raises(InvalidValueError) as refused:
            named()
        assert refused.value.field == "tenant"
