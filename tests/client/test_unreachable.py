"""What a client says when it does not reach a server: one sentence, with gRPC's own words behind it."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from draftwood_client import NO_RETRY, AsyncAdminClient, AsyncClient, Client, StatusError, TlsConfig, UnimplementedError
from draftwood_client.target import unreachable
from tests.certificates import make_certificate

Certificates = tuple[tuple[Path, Path], tuple[Path, Path]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """That of the servers, and another."""
    folder = tmp_path_factory.mktemp("certificates")
    return make_certificate(folder, "server"), make_certificate(folder, "other")


@pytest.fixture(scope="module")
def ports(certificates: Certificates) -> Iterator[dict[str, int]]:
    """Of servers that have none of Draftwood's methods, and of one that speaks no gRPC."""
    (certificate, key), (other, _) = certificates
    pair = [(key.read_bytes(), certificate.read_bytes())]
    server = grpc.server(ThreadPoolExecutor(1))
    client_certificates = grpc.ssl_server_credentials(pair, other.read_bytes(), require_client_auth=True)
    numbers = {
        "plain": server.add_insecure_port("127.0.0.1:0"),
        "tls": server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials(pair)),
        "mtls": server.add_secure_port("127.0.0.1:0", client_certificates),
    }
    server.start()
    web = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer, args=[web], daemon=True).start()
    with socket.socket() as closed:  # nobody else gets its port
        closed.bind(("127.0.0.1", 0))
        yield numbers | {"web": web.getsockname()[1], "closed": closed.getsockname()[1]}
    web.shutdown(socket.SHUT_RDWR)  # ends the wait of its thread
    web.close()
    server.stop(None).wait()


def _answer(web: socket.socket) -> None:
    try:
        while True:
            connection, _ = web.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
    except OSError:
        return


CASES = [
    # the server, TLS of the client, what it says
    ("closed", None, "nothing listens there; check host and port"),
    ("web", None, "what listens there does not speak gRPC; check the port"),
    ("plain", "server", "what listens there does not use TLS; leave out TLS, or check the port"),
    ("tls", None, "the server closed the connection; if it requires TLS, use --tls or --tls-ca"),
    ("tls", "other", "an authority that this client does not trust; name the authority's PEM file with --tls-ca"),
    ("tls", "named", "the server's certificate is for another host; connect to that host, or name it"),
    ("tls", "junk", "a PEM file is invalid, or the private key is of another certificate"),
    ("mtls", "server", "the server closed the connection; if it requires a client certificate, name one"),
]


@pytest.mark.parametrize(("server", "tls", "problem"), CASES)
def test_what_went_wrong_is_one_sentence_with_the_words_of_grpc(
    server: str,
    tls: str | None,
    problem: str,
    ports: dict[str, int],
    certificates: Certificates,
) -> None:
    (trusted, _), (other, _) = certificates
    configs: dict[str | None, TlsConfig | bool] = {
        None: False,
        "server": TlsConfig.from_files(trusted),
        "other": TlsConfig.from_files(other),
        "named": TlsConfig.from_files(trusted, server_name="draftwood.example"),
        "junk": TlsConfig(root_certificates=b"junk"),
    }
    target = f"127.0.0.1:{ports[server]}"
    with Client(target, tls=configs[tls], retry=NO_RETRY) as client, pytest.raises(StatusError) as caught:
        client.model_info(timeout=60)
    said, _, detail = str(caught.value).partition(" (gRPC: ")
    assert said.startswith(f"cannot connect to {target}: ")
    assert problem in said
    assert str(ports[server]) in detail
    assert detail.endswith(")")
    assert "\n" not in str(caught.value)


REFUSED = [
    # the server behind the second address, whether the client uses TLS, what it says; nothing listens at the first
    ("plain", True, "what listens there does not use TLS; leave out TLS, or check the port"),
    ("tls", False, "the server closed the connection; if it requires TLS, use --tls or --tls-ca (`tls`)"),
    ("tls", True, "nothing listens at one of its addresses; connect to 127.0.0.1, which answers"),
    ("closed", True, "nothing listens there; check host and port, and that the server runs"),
]


@pytest.mark.parametrize(("server", "tls", "problem"), REFUSED)
def test_an_address_that_refuses_does_not_hide_what_another_says(
    server: str, tls: bool, problem: str, ports: dict[str, int]
) -> None:
    target = f"ipv4:127.0.0.1:{ports['closed']},127.0.0.1:{ports[server]}"
    refused = f"ipv4:127.0.0.1:{ports['closed']}: Failed to connect to remote host: Connection refused"
    said = unreachable(target, tls, f"last error: UNKNOWN: {refused}")
    assert said == f"cannot connect to {target}: {problem} (gRPC: {refused})"


async def test_the_event_loop_goes_on_while_addresses_are_tried(
    ports: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, turned = asyncio.get_running_loop(), threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(60)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    target = f"127.0.0.1:{ports['closed']}"
    async with AsyncClient(target, retry=NO_RETRY) as client, AsyncAdminClient(target) as admin:
        for call in (client.model_info(), client.complete("x"), admin.tenants.get("acme")):
            turned.clear()
            with pytest.raises(StatusError, match="nothing listens there"):
                await call


def test_a_server_without_the_method_and_a_host_that_nobody_knows(ports: dict[str, int]) -> None:
    with Client(f"127.0.0.1:{ports['plain']}") as client, pytest.raises(UnimplementedError) as caught:
        client.model_info()
    assert "is no Draftwood server, or an older one" in str(caught.value)
    with Client("no-such-host.invalid:1", retry=NO_RETRY) as client, pytest.raises(StatusError) as unknown:
        client.model_info()
    assert str(unknown.value).startswith("cannot connect to no-such-host.invalid:1: the host's name cannot be resolved")
