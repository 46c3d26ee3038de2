"""The channel: it spreads requests over servers that are ready, notices broken connections, and is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest

from draftwood_client import NO_RETRY, AsyncClient, Client, DraftwoodError, UnavailableError
from draftwood_client.connection import Connection
from draftwood_service.rpc.bound import options
from draftwood_service.settings import Settings
from tests.client.conftest import OWN_CONNECTION, Connect
from tests.client.fake_server import Behaviour, FakeServer, answers, fails, hangs, reason
from tests.memory.servers import Proxy, wait_for
from tests.system.rollout.names import NAME, NameServer
from tests.system.rollout.replicas import free_port


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
            wait_for(lambda: served(other, client), "a request to the other")
            server.set_ready(False)
            wait_for(lambda: served(other, client) and served(other, client), "two requests to the other")
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
            wait_for(lambda: refused(client), "no server to be ready")
            assert not server.cancelled.is_set()
            assert not other.cancelled.is_set()


def refused(client: Client) -> bool:
    try:
        client.model_info()
    except UnavailableError:
        return True
    return False


@pytest.mark.system
async def test_a_silently_broken_connection_is_noticed_after_a_long_silence() -> None:
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 500, "grpc.http2.ping_timeout_ms": 500}
    tolerant = [("grpc.http2.min_ping_interval_without_data_ms", 10)]
    with FakeServer(options=tolerant) as server:
        server.script = [hangs("a")]
        async with (
            Proxy(server.port) as proxy,
            AsyncClient(f"127.0.0.1:{proxy.port}", channel_options=quick, timeout=15) as client,
            client.stream("x") as stream,
        ):
            await anext(stream)
            await asyncio.sleep(4.0)  # as many pings without data, of which gRPC sends no more than two by default
            proxy.open.clear()
            begun = time.monotonic()
            with pytest.raises(UnavailableError):
                await anext(stream)
            assert time.monotonic() - begun < 7


def test_pings_of_the_client_are_within_what_the_server_accepts() -> None:
    client = dict(Connection.of("a:1").options())
    server = dict(options(Settings(port=0)))
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.system
async def test_a_request_outlasts_the_lookup_of_a_name_whose_only_server_was_replaced_again_and_again() -> None:
    hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    names, port = NameServer({}), free_port(hosts)
    authority = await names.start()
    async with AsyncClient(f"dns://{authority}/{NAME}:{port}", timeout=20) as client:
        for host in hosts:
            names.hosts = {NAME: [host]}
            with FakeServer(address=f"{host}:{port}") as server:
                await client.generate("x")
                assert len(server.requests) == 1
    names.close()


ENDINGS = [
    pytest.param(answers("a", "b"), None, id="finished"),
    pytest.param(hangs("a"), None, id="left"),
    pytest.param(hangs("a"), 0.1, id="late"),
    pytest.param(fails(grpc.StatusCode.INVALID_ARGUMENT, "no", reason("INVALID_VALUE")), None, id="refused"),
    pytest.param(fails(grpc.StatusCode.INTERNAL, "oh", after=["a"]), None, id="broken"),
]


@pytest.fixture
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def connections(server: FakeServer) -> int:
    """Clients' ends of connections to the server."""
    ends = psutil.Process().net_connections(kind="tcp")
    return sum(bool(end.raddr) and end.raddr.port == server.port and end.status == "ESTABLISHED" for end in ends)


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize(("behaviour", "deadline"), ENDINGS)
async def test_no_connection_is_left(
    connect: Connect, server: FakeServer, behaviour: Behaviour, deadline: float | None
) -> None:
    async def ask() -> None:
        async with connect(server.target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
            with contextlib.suppress(DraftwoodError):
                async with client.stream("x", timeout=deadline) as stream:
                    async for _ in stream:
                        if deadline is None:
                            assert connections(server) == 1
                            break

    server.script = [behaviour]
    for _ in range(5):
        await ask()
    await asyncio.to_thread(wait_for, lambda: connections(server) == 0, "the end of all connections")
