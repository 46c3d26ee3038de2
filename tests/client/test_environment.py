"""What the environment and single calls set: address, credentials, TLS, deadline, headers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from draftwood_client import AdminClient, ArgumentValueError, AsyncClient, Client, DeadlineError, MemoryClient
from draftwood_client.connection import DEFAULT_TIMEOUT, Connection
from draftwood_client.environment import ALL
from tests.certificates import make_certificate
from tests.client.fake_server import FakeServer, hangs


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALL:
        monkeypatch.delenv(name, raising=False)


def test_address_tenant_and_key_come_from_the_environment(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_TARGET", server.target)
    monkeypatch.setenv("DRAFTWOOD_TENANT", "acme")
    monkeypatch.setenv("DRAFTWOOD_API_KEY", "secret")
    with Client() as client, Client(tenant="other", token="mine") as other:
        assert (client.chat("x").tenant, other.chat("x").tenant) == ("acme", "other")
    with Client(metadata={"Authorization": "Basic b"}) as client:
        client.chat("x")
    assert [headers["authorization"] for headers in server.metadata] == ["Bearer secret", "Bearer mine", "Basic b"]


def test_a_key_of_the_environment_is_not_sent_in_clear_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTWOOD_API_KEY", "secret")
    with pytest.raises(ArgumentValueError, match=r"^DRAFTWOOD_API_KEY: would be sent to example.org:1 in clear text"):
        Client("example.org:1")
    monkeypatch.setenv("DRAFTWOOD_TLS", "1")
    assert Connection.of("example.org:1").tls is not None
    with pytest.raises(ArgumentValueError, match=r"^DRAFTWOOD_API_KEY: would be sent"):
        Client("example.org:1", tls=False)
    monkeypatch.setenv("DRAFTWOOD_TOKEN", "another")
    with pytest.raises(ArgumentValueError, match=r"^DRAFTWOOD_TOKEN: cannot be combined with DRAFTWOOD_API_KEY"):
        Client()


def test_certificates_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    for name in ("DRAFTWOOD_TLS_CA", "DRAFTWOOD_CLIENT_CERT"):
        monkeypatch.setenv(name, str(certificate))
    monkeypatch.setenv("DRAFTWOOD_CLIENT_KEY", str(key))
    cert, pair = certificate.read_bytes(), (key.read_bytes(), certificate.read_bytes())
    credentials = grpc.ssl_server_credentials([pair], root_certificates=cert, require_client_auth=True)
    with FakeServer(credentials=credentials) as server, Client(server.target) as client:
        assert client.chat("x").text == "Hello, wörld!"


@pytest.mark.parametrize(
    ("name", "value"), [("DRAFTWOOD_TIMEOUT", "soon"), ("DRAFTWOOD_TIMEOUT", "-1"), ("DRAFTWOOD_TLS", "maybe")]
)
def test_wrong_variables_are_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    for client in (Client, AsyncClient, AdminClient, MemoryClient):
        with pytest.raises(ArgumentValueError, match=f"^{name}: '{value}' is not allowed"):
            client()


def test_there_is_a_deadline_unless_it_is_switched_off(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def deadline(arguments: dict[str, Any], call: dict[str, Any]) -> object:
        with Client(server.target, **arguments) as client:
            client.chat("x", **call)
        left = server.seconds_left[-1]
        return None if left is None else pytest.approx(left, abs=8)  # so long may it take to connect

    assert DEFAULT_TIMEOUT == 600
    assert deadline({}, {}) == DEFAULT_TIMEOUT
    assert deadline({"timeout": 30}, {}) == 30
    assert deadline({"timeout": 30}, {"timeout": 20}) == 20
    for off in (None, math.inf):
        assert deadline({"timeout": off}, {}) is None
        assert deadline({"timeout": 30}, {"timeout": off}) is None
    monkeypatch.setenv("DRAFTWOOD_TIMEOUT", "40")
    assert deadline({}, {}) == 40
    assert deadline({"timeout": None}, {}) is None
    monkeypatch.setenv("DRAFTWOOD_TIMEOUT", "inf")
    assert deadline({}, {}) is None
    monkeypatch.setenv("DRAFTWOOD_TIMEOUT", "0.2")
    server.script = [hangs()]
    with pytest.raises(DeadlineError, match=r"no complete answer within 0\.2 s"):
        deadline({}, {})


def test_bulk_calls_have_no_deadline_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Connection.of("x:1").bulk_timeout is None
    assert Connection.of("x:1", timeout=5).bulk_timeout == 5
    monkeypatch.setenv("DRAFTWOOD_TIMEOUT", "7")
    assert Connection.of("x:1").bulk_timeout == 7


def test_a_call_has_headers_of_its_own(server: FakeServer) -> None:
    tokens = iter(["t", "u"])
    with Client(server.target, metadata={"X-A": "client", "x-b": "client"}, token=lambda: next(tokens)) as client:
        client.complete("x", metadata={"X-B": "call"})
        client.complete("x")
        client.model_info(metadata={"authorization": "Basic own"})
    first, again, second = server.metadata
    assert (again["authorization"], again["x-b"]) == ("Bearer u", "client")
    assert str(first["user-agent"]).startswith("draftwood-python/")
    assert (first["x-a"], first["x-b"], first["authorization"]) == ("client", "call", "Bearer t")
    assert (second["x-b"], second["authorization"]) == ("client", "Basic own")
