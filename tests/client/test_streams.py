"""Both clients: deltas one by one, every way to cancel, many streams at once; calls that are no streams."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from draftwood_client import (
    AsyncClient,
    Client,
    ClientClosedError,
    DeadlineError,
    DraftTree,
    InvalidRequestError,
    RequestCancelledError,
    RetryPolicy,
    Tokenization,
)
from tests.client.conftest import QUICK, Connect
from tests.client.fake_server import FakeServer, answers, fails, hangs


async def saw_cancel(server: FakeServer) -> bool:
    return await asyncio.to_thread(server.cancelled.wait, 5)


async def test_deltas_come_one_by_one(connect: Connect, server: FakeServer) -> None:
    server.script = [answers("a", "b", "c", pause=0.05)]
    arrivals: list[float] = []
    async with connect(server.target) as client, client.stream("x") as stream:
        assert stream.started.request_id == server.requests[0].request_id
        assert stream.finished is None
        async for _ in stream:
            arrivals.append(time.monotonic())
        assert stream.finished is not None
        assert (await stream.completion()).text == "abc"
    assert arrivals[2] - arrivals[0] > 0.05
    assert not server.cancelled.is_set()


async def test_deltas_have_draft_trees_if_they_are_asked_for(connect: Connect, server: FakeServer) -> None:
    server.script = [answers("x", "y"), answers("x")]
    async with connect(server.target) as client:
        trees = [delta.draft_trees async for delta in client.stream("?", draft_trees=True)]
        assert [len(delta.draft_trees) async for delta in client.stream("?")] == [0]
    tree = DraftTree(token_ids=[7, 8], tokens=["a", "x"], parents=[-1, -1])
    other = DraftTree(token_ids=[7, 8], tokens=["a", "y"], parents=[-1, -1], accepted=[1])
    assert trees == [[tree], [other]]


async def test_leaving_the_with_cancels(connect: Connect, server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with connect(server.target) as client:
        async with client.stream("x") as stream:
            async for delta in stream:
                assert delta.text == "a"
                break
        assert await saw_cancel(server)
        with pytest.raises(RequestCancelledError, match="the request was cancelled"):
            await anext(stream)


async def test_a_forgotten_stream_is_cancelled(connect: Connect, server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with connect(server.target) as client:
        stream = client.stream("x")
        await anext(stream)
        del stream
        gc.collect()
        assert await saw_cancel(server)


async def test_another_can_cancel_the_stream_and_not_its_reader(connect: Connect, server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with connect(server.target) as client, client.stream("x") as stream:
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)
        with pytest.raises(RequestCancelledError):
            await anext(stream)
    assert await saw_cancel(server)


async def test_cancelling_ends_the_wait_for_a_retry(connect: Connect, server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.UNAVAILABLE, "full", pushback="20000")]
    async with connect(server.target, retry=RetryPolicy()) as client:
        stream = client.stream("x")
        asyncio.get_running_loop().call_later(0.1, stream.cancel)
        with pytest.raises(RequestCancelledError):
            async with asyncio.timeout(5):
                await anext(stream)
    assert len(server.requests) == 1


async def test_cancelling_the_task_cancels_the_request(server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with AsyncClient(server.target) as client:
        task = asyncio.create_task(client.generate("x"))
        assert await asyncio.to_thread(server.arrived.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await saw_cancel(server)


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


async def test_refusals_are_raised_where_the_stream_is_entered(connect: Connect, server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens: 0 is not allowed")]
    async with connect(server.target) as client:
        stream = client.stream("x", max_tokens=0)
        assert server.requests == []
        with pytest.raises(InvalidRequestError):
            async with stream:
                pytest.fail("entered")


async def test_one_client_serves_many_at_once(connect: Connect, server: FakeServer) -> None:
    server.script = [answers("a", "b", pause=0.01)]
    async with connect(server.target, tenant="acme") as client:
        completions = await asyncio.gather(*(client.generate(str(number)) for number in range(20)))
    assert {completion.text for completion in completions} == {"ab"}
    assert sorted(request.text for request in server.requests) == sorted(map(str, range(20)))
    assert {request.tenant for request in server.requests} == {"acme"}


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
