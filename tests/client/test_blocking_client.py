"""Behaviour of the blocking client alone: streams in threads, channels, TLS."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    TlsConfig,
    Tokenization,
    UnavailableError,
)
from tests.client.conftest import QUICK
from tests.client.fake_server import FakeServer, answers, fails, hangs


def test_deltas_come_one_by_one(server: FakeServer) -> None:
    server.script = [answers("a", "b", "c", pause=0.05)]
    arrivals: list[float] = []
    with Client(server.target) as client, client.stream("x") as stream:
        assert stream.started is not None
        assert stream.started.request_id == server.requests[0].request_id
        assert stream.finished is None
        for _ in stream:
            arrivals.append(time.monotonic())
        assert stream.finished is not None
        assert stream.completion().text == "abc"
    assert arrivals[2] - arrivals[0] > 0.05
    assert not server.cancelled.is_set()


def test_leaving_the_with_cancels(server: FakeServer) -> None:
    server.script = [hangs("a")]
    with Client(server.target) as client:
        with client.stream("x") as stream:
            for delta in stream:
                assert delta.text == "a"
                break
        assert server.cancelled.wait(5)
        with pytest.raises(RequestCancelledError, match="the request was cancelled"):
            next(stream)


def test_a_forgotten_stream_is_cancelled(server: FakeServer) -> None:
    server.script = [hangs("a")]
    with Client(server.target) as client:
        stream = client.stream("x")
        next(stream)
        del stream
        gc.collect()
        assert server.cancelled.wait(5)


def test_another_thread_can_cancel(server: FakeServer) -> None:
    server.script = [hangs("a")]
    with Client(server.target) as client, client.stream("x") as stream:
        next(stream)
        timer = threading.Timer(0.05, stream.cancel)
        timer.start()
        with pytest.raises(RequestCancelledError):
            next(stream)
        timer.join()
    assert server.cancelled.wait(5)


def test_cancelling_ends_the_wait_for_a_retry(server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.UNAVAILABLE, "full", pushback="20000")]
    with Client(server.target, retry=RetryPolicy()) as client:
        stream = client.stream("x")
        timer = threading.Timer(0.1, stream.cancel)
        timer.start()
        begun = time.monotonic()
        with pytest.raises(RequestCancelledError):
            next(stream)
        timer.join()
        assert time.monotonic() - begun < 5
    assert len(server.requests) == 1


def test_refusals_are_raised_where_the_stream_is_entered(server: FakeServer) -> None:
    server.script = [fails(grpc.StatusCode.INVALID_ARGUMENT, "stop.max_tokens: 0 is not allowed")]
    with Client(server.target) as client:
        stream = client.stream("x", max_tokens=0)
        assert server.requests == []
        with pytest.raises(InvalidRequestError), stream:
            pytest.fail("entered")


def test_one_client_serves_many_threads(server: FakeServer) -> None:
    server.script = [answers("a", "b", pause=0.01)]
    with Client(server.target) as client, ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda number: client.generate(str(number)).text, range(20)))
    assert texts == ["ab"] * 20
    assert sorted(request.text for request in server.requests) == sorted(map(str, range(20)))


def test_unary_calls(server: FakeServer) -> None:
    server.unavailable_calls = 1
    with Client(server.target, retry=QUICK) as client:
        assert client.tokenize("äb") == Tokenization((228, 98), ("ä", "b"))
        assert client.tokenize([{"role": "user", "content": "b"}]).tokens[-1] == "b"
        assert client.detokenize([228, 98]) == "äb"
        info = client.model_info()
    assert (info.model, info.strategies, info.eos_token_ids) == ("fake", ("none", "trie"), (2,))
    assert (info.dtype, info.weights) == ("bfloat16", "int8")


def test_waits_until_the_server_is_ready(server: FakeServer) -> None:
    server.unavailable_calls = 3
    with Client(server.target, retry=RetryPolicy(max_attempts=1)) as client:
        assert client.wait_until_ready(10).model == "fake"
        server.unavailable_calls = 10**6
        with pytest.raises(DeadlineError, match=r"not ready within 2 s: the model is loading"):
            client.wait_until_ready(2)


def test_waits_for_a_server_that_is_not_there_yet() -> None:
    late = FakeServer()  # has its port, and does not listen before it is entered
    with ThreadPoolExecutor(1) as pool, Client(late.target) as client:
        waiting = pool.submit(client.wait_until_ready, 20)
        time.sleep(0.3)
        assert not waiting.done()
        with late:
            assert waiting.result(20).model == "fake"


def test_headers_token_and_tenant_go_with_each_request(server: FakeServer) -> None:
    tokens = iter(["one", "two"])
    with Client(server.target, tenant="acme", token=lambda: next(tokens), metadata={"X-Trace": "t"}) as client:
        client.generate("x")
        client.generate("x", tenant="other")
    assert [request.tenant for request in server.requests] == ["acme", "other"]
    assert [one["authorization"] for one in server.metadata] == ["Bearer one", "Bearer two"]
    assert {one["x-trace"] for one in server.metadata} == {"t"}
    assert str(server.metadata[0]["user-agent"]).startswith("draftwood-python/")


def test_an_api_key_goes_with_each_request(server: FakeServer) -> None:
    with Client(server.target, api_key="dw_k") as client:
        client.generate("x")
    assert [one["authorization"] for one in server.metadata] == ["Bearer dw_k"]


def test_the_clients_timeout_holds_unless_a_request_has_its_own(server: FakeServer) -> None:
    server.script = [answers("a", "b", pause=0.15)]
    with Client(server.target, timeout=0.1) as client:
        with pytest.raises(DeadlineError, match=r"0\.1 s"):
            client.generate("x")
        server.cancelled.wait(5)
        server.cancelled.clear()
        assert client.generate("x", timeout=float("inf")).text == "ab"


def test_a_closed_client_says_so(server: FakeServer) -> None:
    client = Client(server.target)
    client.close()
    client.close()
    with pytest.raises(ClientClosedError, match=f"Client\\('{server.target}'\\) is closed"):
        client.generate("x")


def test_messages_of_several_mebibytes_pass(server: FakeServer) -> None:
    server.script = [answers("x" * 15 * 2**20)]
    with Client(server.target) as client:
        assert len(client.generate("x").text) == 15 * 2**20


def test_tls_on_both_sides(tls_server: FakeServer, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with Client(tls_server.target, tls=TlsConfig.from_files(cert, cert, key)) as client:
        assert client.model_info(timeout=10).model == "fake"
    named = TlsConfig.from_files(cert, cert, key, server_name="elsewhere")
    with Client(tls_server.target, tls=named, retry=QUICK) as client, pytest.raises(UnavailableError):
        client.model_info(timeout=10)


async def test_tls_with_asyncio(tls_server: FakeServer, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    async with AsyncClient(tls_server.target, tls=TlsConfig.from_files(cert, cert, key)) as client:
        assert (await client.model_info(timeout=10)).model == "fake"


def test_plaintext_to_a_tls_port_is_an_error_and_not_a_hang(tls_server: FakeServer) -> None:
    with Client(tls_server.target, retry=QUICK) as client, pytest.raises(UnavailableError):
        client.model_info(timeout=10)


def test_deltas_have_draft_trees_if_they_are_asked_for(server: FakeServer) -> None:
    server.script = [answers("x", "y"), answers("x")]
    with Client(server.target) as client:
        trees = [delta.draft_trees for delta in client.stream("?", draft_trees=True)]
        assert [delta.draft_trees for delta in client.stream("?")] == [()]
    assert trees == [
        (DraftTree((7, 8), ("a", "x"), (-1, -1), ()),),
        (DraftTree((7, 8), ("a", "y"), (-1, -1), (1,)),),
    ]
