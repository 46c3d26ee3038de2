"""What the channel does by itself: it spreads requests over servers that are ready, and notices broken connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from draftwood_client import AsyncClient, Client, UnavailableError
from draftwood_client.connection import Connection
from draftwood_service.rpc.bound import options
from draftwood_service.settings import Settings
from tests.client.fake_server import FakeServer, hangs
from tests.system.rollout.names import NAME, NameServer
from tests.system.rollout.replicas import free_port


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def served(server: FakeServer, client: Client) -> bool:
    """Sends a request; whether it came to `server`."""
    before = len(server.requests)
    client.generate("x")
    return len(server.requests) > before


def addresses(*servers: FakeServer) -> str:
    return "ipv4:" + ",".join(server.target for server in servers)


def test_requests_go_round_the_servers_that_are_ready(server: FakeServer) -> None:
    with FakeServer() as other:
        other.set_ready(False)
        with Client(addresses(server, other)) as client:
            for _ in range(6):
                client.generate("x")
            assert (len(server.requests), len(other.requests)) == (6, 0)
            other.set_ready(True)
            until(lambda: served(other, client))
            server.set_ready(False)
            until(lambda: served(other, client) and served(other, client))
            before = len(server.requests)
            for _ in range(6):
                client.generate("x")
            assert len(server.requests) == before


def test_no_ready_server_among_several_is_said(server: FakeServer) -> None:
    server.set_ready(False)
    with Client(addresses(server)) as client, pytest.raises(UnavailableError) as caught:
        client.generate("x")
    assert str(caught.value) == f"no server of {addresses(server)} is ready"
    assert server.requests == []


def test_a_single_server_tells_itself_that_it_is_not_ready(server: FakeServer) -> None:
    server.set_ready(False)
    server.unavailable_calls = 10
    with Client(server.target) as client, pytest.raises(UnavailableError, match="the model is loading"):
        client.model_info()


def test_an_answer_goes_on_when_its_server_is_not_ready_any_more(server: FakeServer) -> None:
    with FakeServer() as other:
        server.script = other.script = [hangs("a")]
        with Client(addresses(server, other)) as client, client.stream("x") as stream:
            next(stream)
            server.set_ready(False)
            other.set_ready(False)
            until(lambda: _refused(client))
            assert not server.cancelled.is_set()
            assert not other.cancelled.is_set()


def _refused(client: Client) -> bool:
    try:
        client.model_info()
    except UnavailableError:
        return True
    return False


@contextlib.contextmanager
def proxied(port: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The address of a proxy to `port`, and a function after which it passes nothing on, with its connections open."""
    broken = threading.Event()
    listening = socket.create_server(("127.0.0.1", 0))
    sockets, threads = [listening], []

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not broken.is_set():
                    target.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = listening.accept()[0], socket.create_connection(("127.0.0.1", port))
                sockets.extend(ends)
                for pair in (ends, ends[::-1]):
                    threads.append(threading.Thread(target=copy, args=pair))
                    threads[-1].start()

    threads.append(threading.Thread(target=accept))
    threads[0].start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}", broken.set
    finally:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(5)
        for one in sockets:
            one.close()


@pytest.mark.system
def test_a_silently_broken_connection_is_noticed_after_a_long_silence() -> None:
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    tolerant = [("grpc.http2.min_ping_interval_without_data_ms", 10)]
    with FakeServer(options=tolerant) as server, proxied(server.port) as (target, break_it):
        server.script = [hangs("a")]
        with Client(target, channel_options=quick, timeout=15) as client, client.stream("x") as stream:
            next(stream)
            time.sleep(4.0)  # as many pings without data, of which gRPC sends no more than two by default
            break_it()
            begun = time.monotonic()
            with pytest.raises(UnavailableError):
                next(stream)
            assert time.monotonic() - begun < 7


def test_pings_of_the_client_are_within_what_the_server_accepts() -> None:
    client = dict(Connection.of("a:1").options())
    server = dict(options(Settings(port=0)))
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.system
async def test_new_addresses_of_a_name_are_found_though_they_change_every_few_seconds() -> None:
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    names, port = NameServer({}), free_port(hosts)
    authority = await names.start()
    async with AsyncClient(f"dns://{authority}/{NAME}:{port}", timeout=20) as client:
        for host in hosts:
            names.hosts = {NAME: [host]}
            with FakeServer(address=f"{host}:{port}") as server:
                deadline = time.monotonic() + 15
                while not server.requests:
                    with contextlib.suppress(UnavailableError):
                        await client.generate("x")
                    assert time.monotonic() < deadline
    names.close()


@pytest.mark.system
async def test_a_request_outlasts_the_lookup_of_a_name_whose_only_server_was_replaced() -> None:
    hosts = ["127.0.0.1", "127.0.0.2"]
    names, port = NameServer({NAME: hosts[:1]}), free_port(hosts)
    authority = await names.start()
    async with AsyncClient(f"dns://{authority}/{NAME}:{port}", timeout=20) as client:
        with FakeServer(address=f"{hosts[0]}:{port}"):
            await client.generate("x")
        names.hosts[NAME] = hosts[1:]
        with FakeServer(address=f"{hosts[1]}:{port}") as server:
            await client.generate("x")
            assert len(server.requests) == 1
    names.close()
