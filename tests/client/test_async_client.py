"""Behaviour of the asyncio client alone: tasks, event loops, cancellation of tasks and of requests."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest

from draftwood_client import (
    AsyncClient,
    ClientClosedError,
    DeadlineError,
    RequestCancelledError,
    RetryPolicy,
    Tokenization,
)
from tests.client.conftest import QUICK
from tests.client.fake_server import FakeServer, answers, fails, hangs


async def saw_cancel(server: FakeServer) -> bool:
    return await asyncio.to_thread(server.cancelled.wait, 5)


async def test_deltas_come_one_by_one(server: FakeServer) -> None:
    server.script = [answers("a", "b", "c", pause=0.05)]
    loop = asyncio.get_running_loop()
    arrivals: list[float] = []
    async with AsyncClient(server.target) as client, client.stream("x") as stream:
        assert stream.started is not None
        assert stream.finished is None
        async for _ in stream:
            arrivals.append(loop.time())
        assert stream.finished is not None
        assert (await stream.completion()).text == "abc"
    assert arrivals[2] - arrivals[0] > 0.05
    assert not server.cancelled.is_set()


async def test_leaving_the_with_cancels(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client:
        async with client.stream("x") as stream:
            async for delta in stream:
                assert delta.text == "a"
                break
        assert await saw_cancel(server)
        with pytest.raises(RequestCancelledError):
            await anext(stream)


async def test_a_forgotten_stream_is_cancelled(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client:
        stream = client.stream("x")
        await anext(stream)
        del stream
        gc.collect()
        assert await saw_cancel(server)


async def test_cancelling_the_task_cancels_the_request(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client:
        task = asyncio.create_task(client.generate("x"))
        assert await asyncio.to_thread(server.arrived.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await saw_cancel(server)


async def test_asyncio_timeouts_stay_asyncio_timeouts(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.generate("x")
        assert await saw_cancel(server)


async def test_another_task_can_cancel_the_stream_and_not_the_reader(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client, client.stream("x") as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(RequestCancelledError):
            await anext(stream)
    assert await saw_cancel(server)


async def test_cancelling_ends_the_wait_for_a_retry(server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.UNAVAILABLE, "full", pushback="20000")]
    async with AsyncClient(server.target, retry=RetryPolicy()) as client:
        stream = client.stream("x")
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        with pytest.raises(RequestCancelledError):
            async with asyncio.timeout(5):
                await anext(stream)
    assert len(server.requests) == 1


async def test_closing_the_client_ends_its_streams(server: FakeServer) -> None:
    server.script = [hangs("a")]
    client = AsyncClient(server.target)
    stream = client.stream("x")
    await anext(stream)
    asyncio.get_running_loop().call_later(0.05, lambda: tasks.append(asyncio.ensure_future(client.close())))
    tasks: list[asyncio.Future[None]] = []
    with pytest.raises(RequestCancelledError):
        await anext(stream)
    await asyncio.gather(*tasks)
    with pytest.raises(ClientClosedError, match="is closed"):
        await client.model_info()


async def test_many_requests_at_once(server: FakeServer) -> None:
    server.script = [answers("a", "b", pause=0.01)]
    async with AsyncClient(server.target, tenant="acme") as client:
        completions = await asyncio.gather(*(client.generate(str(number)) for number in range(20)))
    assert {completion.text for completion in completions} == {"ab"}
    assert {request.tenant for request in server.requests} == {"acme"}


async def test_unary_calls(server: FakeServer) -> None:
    server.unavailable_calls = 1
    async with AsyncClient(server.target, retry=QUICK) as client:
        assert await client.tokenize("äb") == Tokenization((228, 98), ("ä", "b"))
        assert await client.detokenize([228, 98]) == "äb"
        assert (await client.model_info()).model == "fake"


async def test_waits_until_the_server_is_ready(server: FakeServer) -> None:
    server.unavailable_calls = 3
    async with AsyncClient(server.target) as client:
        assert (await client.wait_until_ready(10)).model == "fake"
        server.unavailable_calls = 10**6
        with pytest.raises(DeadlineError, match=r"not ready within 2 s: the model is loading"):
            await client.wait_until_ready(2)


def test_can_be_made_outside_of_the_loop(server: FakeServer) -> None:
    client = AsyncClient(server.target)

    async def ask() -> str:
        async with client:
            return (await client.generate("x")).text

    assert asyncio.run(ask()) == "Hello, wörld!"
