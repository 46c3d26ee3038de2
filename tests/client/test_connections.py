"""A connection is closed with its client, however its answers ended, without waiting for garbage collection."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator

import grpc
import psutil
import pytest

from draftwood_client import NO_RETRY, DraftwoodError
from tests.client.conftest import OWN_CONNECTION, Connect
from tests.client.fake_server import Behaviour, FakeServer, answers, fails, hangs, reason

CLIENTS = 5
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


def assert_none_is_left(server: FakeServer) -> None:
    deadline = time.monotonic() + 5
    while (left := connections(server)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == 0


@pytest.mark.usefixtures("_no_collection")
@pytest.mark.parametrize(("behaviour", "deadline"), ENDINGS)
async def test_none_is_left(connect: Connect, server: FakeServer, behaviour: Behaviour, deadline: float | None) -> None:
    async def ask() -> None:
        async with connect(server.target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
            with contextlib.suppress(DraftwoodError):
                async with client.stream("x", timeout=deadline) as stream:
                    async for _ in stream:
                        if deadline is None:
                            assert connections(server) == 1
                            break

    server.script = [behaviour]
    for _ in range(CLIENTS):
        await ask()
    await asyncio.to_thread(assert_none_is_left, server)
