"""Both clients: deltas one by one, every way to cancel, many streams at once; calls that are no streams."""

from __future__ import annotations

import asyncio
import gc
import threading
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
from tests.client.fake_server import WAIT_SECONDS, FakeServer, answers, fails, hangs


async def comes(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, WAIT_SECONDS)


async def test_deltas_come_one_by_one(connect: Connect, server: FakeServer) -> None:
    turns = threading.Semaphore(1)
    server.script = [answers("a", "b", "c", turns=turns)]
    async with connect(server.target) as client, client.stream("x") as stream:
        assert stream.started.request_id == server.requests[0].request_id
        assert stream.finished is None
        async for delta in stream:
            assert delta.draft_trees == []
            turns.release()
        assert stream.finished is not None
        assert (await stream.completion()).text == "abc"
    assert not server.cancelled.is_set()


async def test_deltas_have_draft_trees_if_they_are_asked_for(connect: Connect, server: FakeServer) -> None:
    server.script = [answers("x", "y")]
    async with connect(server.target) as client:
        trees = [delta.draft_trees async for delta in client.stream("?", draft_trees=True)]
    tree = DraftTree(token_ids=[7, 8], tokens=["a", "x"], parents=[-1, -1])
    other = DraftTree(token_ids=[7, 8], tokens=["a", "y"], parents=[-1, -1], accepted=[1])
    assert trees == [[tree], [other]]


async def test_a_stream_that_is_given_up_ends_on_the_server(connect: Connect, server: FakeServer) -> None:
    server.script = [hangs("a")]
    async with connect(server.target) as client:
        async with client.stream("x") as stream:
            assert (await anext(stream)).text == "a"
        assert await comes(server.cancelled), "left"
        with pytest.raises(RequestCancelledError, match="the request was cancelled"):
            await anext(stream)
        server.cancelled.clear()
        stream = client.stream("x")
        await anext(stream)
        del stream
        gc.collect()
        assert await comes(server.cancelled), "forgotten"
        server.cancelled.clear()
        stream = client.stream("x")
        await anext(stream)
        asyncio.get_running_loop().call_later(0.05, stream.cancel)  # by another than its reader
        with pytest.raises(RequestCancelledError):
            await anext(stream)
        assert await comes(server.cancelled), "cancelled"


async def test_cancelling_ends_the_wait_for_a_retry(connect: Connect, server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.UNAVAILABLE, "full", pushback="600000")]
    async with connect(server.target, retry=RetryPolicy()) as client:
        stream = client.stream("x")
        reading = asyncio.ensure_future(anext(stream))
        assert await comes(server.arrived)
        await asyncio.sleep(0.1)  # in which the refusal comes back, most likely
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            async with asyncio.timeout(WAIT_SECONDS):
                await reading
    assert len(server.requests) == 1


async def test_cancelling_the_task_or_closing_the_client_cancels_the_request(server: FakeServer) -> None:
    server.script = [hangs("a")]
    client = AsyncClient(server.target)
    task = asyncio.create_task(client.generate("x"))
    assert await comes(server.arrived)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await comes(server.cancelled)
    stream = client.stream("x")
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(RequestCancelledError):
        await reading
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
    server.script = [answers("a", "b")]
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
        assert (await client.wait_until_ready(WAIT_SECONDS)).model == "fake"
        server.unavailable_calls = 10**6
        with pytest.raises(DeadlineError, match=r"not ready within 1 s: the model is loading"):
            await client.wait_until_ready(1)


def test_waits_for_a_server_that_is_not_there_yet() -> None:
    late = FakeServer()  # has its port, and does not answer before it is entered
    with ThreadPoolExecutor(1) as pool, Client(late.target) as client:
        waiting = pool.submit(client.wait_until_ready, WAIT_SECONDS)
        time.sleep(0.3)
        assert not waiting.done()
        with late:
            assert waiting.result(WAIT_SECONDS).model == "fake"


def test_a_client_can_be_made_outside_of_the_loop_and_says_when_it_is_closed(server: FakeServer) -> None:
    made = AsyncClient(server.target)

    async def ask() -> str:
        async with made:
            return (await made.generate("x")).text

    assert asyncio.run(ask()) == "Hello, wörld!"
    client = Client(server.target)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError, match=f"Client\\('{server.target}'\\) is closed"):
        client.generate("x")
