from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from draftwood_client import AsyncClient, Client, Completion, Prompt, RetryPolicy
from draftwood_client.cli import build_app
from tests.client.fake_admin import FakeAdmin
from tests.client.fake_server import FakeServer

QUICK = RetryPolicy(max_attempts=3, initial_backoff=0.01, max_backoff=0.01)
"""Retries without noticeable waits."""
OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}
"""Else a client shares a connection that an earlier test has left, to a server on the same port that was stopped."""


Ask = Callable[..., Completion]
"""One whole answer of the fake server."""
Connect = Callable[..., Any]
"""A client of a target and options, with the interface of asyncio."""


class OnThreads:
    """A blocking client, a part of it or one of its streams with the interface of asyncio: its calls run on threads."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if name in ("tenants", "experiments"):
            return OnThreads(attribute)
        if name in ("stream", "list"):
            return lambda *args, **options: OnThreads(attribute(*args, **options))
        return partial(asyncio.to_thread, attribute) if callable(attribute) and name != "cancel" else attribute

    async def __aenter__(self) -> OnThreads:
        return OnThreads(await asyncio.to_thread(self._inner.__enter__))

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self._inner.__exit__, *error)

    def __aiter__(self) -> OnThreads:
        return self

    async def __anext__(self) -> Any:
        if (item := await asyncio.to_thread(next, self._inner, None)) is None:
            raise StopAsyncIteration
        return item


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Connect:
    if request.param == "async":
        return AsyncClient
    return lambda target, **options: OnThreads(Client(target, **options))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def admin() -> Iterator[FakeAdmin]:
    with FakeAdmin() as admin:
        yield admin


Cli = Callable[..., Result]


def invoke(*args: str, stdin: str | bytes | None = None, **env: str) -> Result:
    """Runs `draftwood`."""
    env = {"NO_COLOR": "1", "FORCE_COLOR": "", **env}
    return CliRunner().invoke(build_app(), [*args], input=stdin, env=env, catch_exceptions=False)


@pytest.fixture
def cli(server: FakeServer) -> Cli:
    return partial(invoke, DRAFTWOOD_TARGET=server.target)


@pytest.fixture
def run_admin(admin: FakeAdmin) -> Cli:
    """As `cli`, against the administrative services."""
    return partial(invoke, DRAFTWOOD_TARGET=admin.target)


@pytest.fixture
def ask(connect: Connect, server: FakeServer) -> Ask:
    async def answer(prompt: Prompt, **options: Any) -> Completion:
        async with connect(server.target, retry=QUICK, channel_options=OWN_CONNECTION) as client:
            completion: Completion = await client.generate(prompt, **options)
            return completion

    return lambda prompt="hi", **options: asyncio.run(answer(prompt, **options))


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nothing listens, and that no other process gets."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
