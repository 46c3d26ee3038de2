"""Calls of both clients that are no streams of answers; headers, deadlines, TLS, and the end of a client."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from draftwood_client import AsyncClient, Client, ClientClosedError, DeadlineError, RetryPolicy, Tokenization
from tests.client.conftest import QUICK, Connect
from tests.client.fake_server import FakeServer


async def test_unary_calls(connect: Connect, server: FakeServer) -> None:
    server.unavailable_calls = 1
    async with connect(server.target, retry=QUICK) as client:
        assert await client.tokenize("äb") == Tokenization(token_ids=[228, 98], tokens=["ä", "b"])
        assert (await client.tokenize([{"role": "user", "content": "b"}])).tokens[-1] == "b"
        assert await client.detokenize([228, 98]) == "äb"
        info = await client.model_info()
    assert (info.model, [*info.strategies], [*info.eos_token_ids]) == ("fake", ["none", "trie"], [2])
    assert (info.dtype, info.weights) == ("bfloat16", "int8")


async def test_waits_until_the_server_is_ready(connect: Connect, server: FakeServer) -> None:
    server.unavailable_calls = 3
    async with connect(server.target, retry=RetryPolicy(max_attempts=1)) as client:
        assert (await client.wait_until_ready(10)).model == "fake"
        server.unavailable_calls = 10**6
        with pytest.raises(DeadlineError, match=r"not ready within 1 s: the model is loading"):
            await client.wait_until_ready(1)


def test_waits_for_a_server_that_is_not_there_yet() -> None:
    late = FakeServer()  # has its port, and does not listen before it is entered
    with ThreadPoolExecutor(1) as pool, Client(late.target) as client:
        waiting = pool.submit(client.wait_until_ready, 20)
        time.sleep(0.3)
        assert not waiting.done()
        with late:
            assert waiting.result(20).model == "fake"


def test_can_be_made_outside_of_the_loop(server: FakeServer) -> None:
    client = AsyncClient(server.target)

    async def ask() -> str:
        async with client:
            return (await client.generate("x")).text

    assert asyncio.run(ask()) == "Hello, wörld!"


def test_a_closed_client_says_so(server: FakeServer) -> None:
    client = Client(server.target)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError, match=f"Client\\('{server.target}'\\) is closed"):
        client.generate("x")
