from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from typer.testing import CliRunner, Result

from draftwood_client import AsyncClient, Client, Completion, Prompt, RetryPolicy
from draftwood_client.cli import build_app
from tests.certificates import make_certificate
from tests.client.fake_admin import FakeAdmin
from tests.client.fake_server import FakeServer

QUICK = RetryPolicy(max_attempts=3, initial_backoff=0.01, max_backoff=0.01)
"""Retries without noticeable waits."""
OWN_CONNECTION = {"grpc.use_local_subchannel_pool": 1}
"""Else a client shares a connection that an earlier test has left, to a server on the same port that was stopped."""


class Ask(Protocol):
    def __call__(self, prompt: Prompt = "hi", *, retry: RetryPolicy = QUICK, **options: Any) -> Completion:
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
    async def answer(prompt: Prompt, retry: RetryPolicy, **options: Any) -> Completion:
        async with connect(server.target, retry=retry, channel_options=OWN_CONNECTION) as client:
            completion: Completion = await client.generate(prompt, **options)
            return completion

    def ask(prompt: Prompt = "hi", *, retry: RetryPolicy = QUICK, **options: Any) -> Completion:
        return asyncio.run(answer(prompt, retry, **options))

    return ask


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key, used as authority, server and client certificate."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> Iterator[FakeServer]:
    """A server that requires the client certificate."""
    cert, key = (path.read_bytes() for path in certificate)
    credentials = grpc.ssl_server_credentials([(key, cert)], root_certificates=cert, require_client_auth=True)
    with FakeServer(credentials=credentials) as server:
        yield server
