"""`draftwood gateway`: its options, whose credential requests have, and what it refuses to serve."""

from __future__ import annotations

import asyncio
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from draftwood_client.cli.options import ServerOptions
from draftwood_client.errors import ArgumentValueError
from draftwood_service.gateway.command import _opener, _shares_credential
from draftwood_service.gateway.command import gateway as run_gateway
from tests.service.fakes import FakeEngine, serving


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "{taken}"], "--port {taken}: address already in use\n"),
        (["--host", "no-such-host.invalid"], "--host no-such-host.invalid: "),
        (["--host", "0.0.0.0", "--api-key", "k"], "--host: 0.0.0.0 is not a loopback address, and whoever"),
        (["--http-tls-key", "{file}"], "--http-tls-cert: must be set, since --http-tls-key is set\n"),
        (["--http-tls-cert", "{file}"], "--http-tls-cert: '{file}' is no PEM certificate with that private key"),
        (["--http-tls-cert", "/no"], "--http-tls-cert: cannot read '/no': No such file or directory\n"),
        (["--check", "--tls-cert", "/no", "--tls-key", "/no"], "--tls-cert"),
        (["--server", "first"], "--server: 'first' must look like MODEL=HOST:PORT\n"),
        (["--server", "a b=h:1"], "--server: 'a b=h:1' must look like MODEL=HOST:PORT\n"),
        (["--server", "a=h:1", "--server", "a=h:2"], "--server: model 'a' is given twice\n"),
        (["--server", "a=h"], "--server: of model 'a': 'h' has no valid port; write it as host:port"),
        (["--server", "a=h:1", "--target", "h:2"], "--target: 'h:2' cannot be combined with --server\n"),
    ],
)
def test_a_wrong_option_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = {"taken": listening.getsockname()[1], "file": tmp_path / "file"}
        assert run_gateway(["--port", "0", *(argument.format(**words) for argument in arguments)]) in (1, 2)
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said.format(**words)}")
    assert error.count("\n") == 1


def test_check_says_what_the_gateway_would_do_and_asks_no_service(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_TARGET", "of-other-commands:1")
    servers = ["--server", "a=dns:///a-headless.serving:50051", "--server", "org/b=no-such-service.invalid:1"]
    options = ["--port", "0", "--check", "--host", "0.0.0.0", "--api-key", "k", "--share-credential"]
    assert run_gateway([*options, *servers]) == 0
    said = capsys.readouterr().out
    assert "address: http://0.0.0.0:0\n" in said
    assert "service of a: dns:///a-headless.serving:50051\nservice of org/b: no-such-service.invalid:1\n" in said
    assert "requests without a key: call with the gateway's own credential" in said


async def test_no_server_of_this_machine_is_shown_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Whichever of them it is."""
    async with serving(auth="open") as first, serving(FakeEngine()) as second:
        servers = [f"--server=a={first.server.address}", f"--server=b={second.server.address}"]
        status = await asyncio.to_thread(run_gateway, ["--host", "0.0.0.0", "--port", "0", *servers])
    assert status == 2
    assert capsys.readouterr().err.startswith("error: --host: ")


@pytest.mark.parametrize("credential", [{}, {"api_key": "k"}, {"token": "t"}, {"tls_cert": Path("c")}])
def test_requests_without_a_key_have_that_of_the_gateway_on_this_machine_or_when_asked_for(
    credential: dict[str, Any],
) -> None:
    server = ServerOptions(**credential)
    for host, allowed in (("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)):
        assert _shares_credential(server, host, allowed) is (True if credential else None)
    refused = credential and "tls_cert" not in credential  # a certificate is for the connection, too
    for host in ("0.0.0.0", "::", "gateway.example"):
        with pytest.raises(ArgumentValueError, match="--share-credential") if refused else nullcontext():
            assert _shares_credential(server, host, False) is (False if credential else None)


async def test_the_tenant_of_the_environment_is_not_that_of_the_gateways_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTWOOD_TENANT", "of the command line")
    async with serving() as served:
        for credential in (None, lambda: "key"):
            client = _opener(ServerOptions(target=served.server.address))(credential)
            assert (await client.complete("x", max_tokens=2)).tenant == "default"
            await client.close()
