"""The channel: it spreads requests over servers that are ready, notices broken connections, and is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator

import grpc
import psutil
import pytest

from draftwood_client import NO_RETRY, AsyncClient, Client, DraftwoodError, UnavailableError
from draftwood_client.connection import Connection
from draftwood_service.rpc.bound import options
from draftwood_service.settings import Settings
from tests.client.conftest import OWN_CONNECTION, Connect
from tests.client.fake_server import WAIT_SECONDS, FakeServer, answers, fails, hangs, reason
from tests.memory.servers import Proxy, wait_for
from tests.system.rollout.names import NAME, NameServer


def addresses(*servers: FakeServer) -> str:
    return "ipv4:" + ",".join(server.target for server in servers)


def test_requests_go_round_the_servers_that_are_ready(server: FakeServer) -> None:
    def ask(times: int) -> tuple[int, int]:
        """Requests to the server, and to the other."""
        before = len(server.requests), len(other.requests)
        for _ in range(times):
            client.generate("x")
        return len(server.requests) - before[0], len(other.requests) - before[1]

    def is_refused() -> bool:
        try:
            client.model_info()
        except UnavailableError as error:
            return str(error) == f"no server of {addresses(server, other)} is ready"
        return False

    with FakeServer() as other:
        other.set_ready(False)
        with Client(addresses(server, other)) as client:
            assert ask(6) == (6, 0)
            other.set_ready(True)
            wait_for(lambda: ask(1) == (0, 1), "a request to the other")
            server.set_ready(False)
            wait_for(lambda: ask(2) == (0, 2), "two requests to the other")
            assert ask(6) == (0, 6)
            other.script = [hangs("a")]
            with client.stream("x") as stream:
                next(stream)
                other.set_ready(False)
                wait_for(is_refused, "no server to be ready")
                assert not other.cancelled.is_set(), "an answer goes on"


def test_a_single_server_tells_itself_that_it_is_not_ready(server: FakeServer) -> None:
    server.set_ready(False)
    server.unavailable_calls = 10
    with Client(server.target) as client, pytest.raises(UnavailableError, match="the model is loading"):
        client.model_info()


@pytest.mark.system
async def test_a_silently_broken_connection_is_noticed_after_a_long_silence() -> None:
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 3000, "grpc.http2.ping_timeout_ms": 3000}
    tolerant = [("grpc.http2.min_ping_interval_without_data_ms", 10)]
    with FakeServer(options=tolerant) as server:
        server.script = [hangs("a")]
        async with (
            Proxy(server.port) as proxy,
            AsyncClient(f"127.0.0.1:{proxy.port}", channel_options=quick, timeout=WAIT_SECONDS / 2) as client,
            client.stream("x") as stream,
        ):
            await anext(stream)
            await asyncio.sleep(4.0)  # as many pings without data, of which gRPC sends no more than two by default
            assert not server.cancelled.is_set()
            proxy.open.clear()
            with pytest.raises(UnavailableError):  # not DeadlineError
                await anext(stream)


def test_pings_of_the_client_are_within_what_the_server_accepts() -> None:
    client = dict(Connection.of("a:1").options())
    server = dict(options(Settings(port=0)))
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.http2.max_pings_without_data"] == 0
    assert server["grpc.keepalive_permit_without_calls"] == 1


@pytest.mark.system
async def test_a_request_outlasts_the_lookup_of_a_name_whose_only_server_was_replaced_again_and_again() -> None:
    first = FakeServer()
    others = [FakeServer(address=f"{host}:{first.port}") for host in ("127.0.0.2", "127.0.0.3")]
    names = NameServer({})
    authority = await names.start()
    async with AsyncClient(f"dns://{authority}/{NAME}:{first.port}", timeout=WAIT_SECONDS) as client:
        for server in (first, *others):
            names.hosts = {NAME: [server.target.partition(":")[0]]}
            with server:
                await client.generate("x")
                assert len(server.requests) == 1
    names.close()


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
async def test_no_connection_is_left(connect: Connect, server: FakeServer) -> None:
    endings = {
        "finished": answers("a", "b"),
        "left": hangs("a"),
        "late": hangs("a"),
        "refused": fails(grpc.StatusCode.INVALID_ARGUMENT, "no", reason("INVALID_VALUE")),
        "broken": fails(grpc.StatusCode.INTERNAL, "oh", after=["a"]),
    }

    async def ask(ending: str) -> None:
        async with connect(server.target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
            with contextlib.suppress(DraftwoodError):
                async with client.stream("x", timeout=0.1 if ending == "late" else None) as stream:
                    async for _ in stream:
                        assert connections(server) == 1, ending
                        if ending == "left":
                            break

    for ending, behaviour in endings.items():
        server.script = [behaviour]
        await ask(ending)
        await asyncio.to_thread(wait_for, lambda: connections(server) == 0, f"the end of a connection, {ending}")
