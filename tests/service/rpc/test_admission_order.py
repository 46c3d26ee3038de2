"""Cheap limits, then reading, then all limits, then places that others lose: a request passes them in this order.

What a caller is told of a limit, and what is given back when a request ends.
"""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import AsyncClient, QuotaExceededError
from draftwood_model_runner.request import GrammarKind
from draftwood_strategies.arrays import Int32Array
from tests.memory.servers import Valkey
from tests.service.fakes import FakeGrammars, FakeModel, Served, answer, refusal, serving, until
from tests.service.rpc.test_endings import reason

PLACES = 10


def ask(tenant: str = "", tokens: int = 4, text: str = "ab", **fields: Any) -> pb.GenerateRequest:
    stop = pb.StopOptions(max_tokens=tokens)
    return pb.GenerateRequest(text=text, tenant=tenant, stop=stop, **fields)


async def filled(served: Served, tenant: str) -> list[Any]:
    """Requests of a tenant that hold all places; the engine stands still."""
    served.engine.gate.clear()
    calls: list[Any] = [served.stub.GenerateStream(ask(tenant)) for _ in range(PLACES)]
    for call in calls:
        assert (await call.read()).HasField("started")
    return calls


INVALID = [
    ask("b", text="x" * 5000),
    ask("b", text=""),
    ask("b", format=pb.OutputFormat(regex="x")),
    ask("b", drafting=pb.DraftOptions(strategy="magic")),
]


async def test_invalid_requests_and_those_above_a_limit_end_nobody_elses() -> None:
    async with serving(max_running=2, max_waiting=PLACES - 2, tokens_per_minute=200) as served:
        calls = await filled(served, "a")
        for _ in range(12):
            for request in INVALID:
                assert (await served.answer(request)).status.code() is grpc.StatusCode.INVALID_ARGUMENT
            for request in (ask("c", text="x" * 200), ask("c", 300)):
                assert reason((await served.answer(request)).status) == "QUOTA_EXCEEDED"
        assert served.server.bridge.live == PLACES
        valid: Any = served.stub.GenerateStream(ask("b"))
        assert (await valid.read()).HasField("started")
        served.engine.gate.set()
        ended = [await answer(call) for call in calls]
        assert [reason(one.error) for one in ended if one.error is not None] == ["QUEUE_FULL"]
        assert (await answer(valid)).finished


class CountingGrammars(FakeGrammars):
    """Takes every grammar's trial, and counts them."""

    def __init__(self) -> None:
        self.tried = 0

    def check(self, kind: GrammarKind, text: str) -> None:
        self.tried += 1


LONG = "x" * 10_000


@pytest.mark.parametrize(
    ("limits", "request_"),
    [
        ({"requests_per_minute": 1}, ask(text=LONG, format=pb.OutputFormat(regex="x"))),
        ({"tokens_per_minute": 6}, ask(text=LONG, tokens=1)),
        ({"tokens_per_minute": 50}, ask(text=LONG, tokens=60)),
        ({"tokens_per_minute": 50}, pb.GenerateRequest(text=LONG, stop=pb.StopOptions(max_tokens=2**31 - 1))),
    ],
)
async def test_nothing_is_read_for_a_tenant_above_its_limit(
    limits: dict[str, Any], request_: pb.GenerateRequest
) -> None:
    grammars = CountingGrammars()
    async with serving(model=FakeModel(grammars=grammars), **limits) as served:
        assert (await served.answer(ask())).finished
        read = len(served.model.tokenizer.encoded_on)
        for _ in range(5):
            assert reason((await served.answer(request_)).status) == "QUOTA_EXCEEDED"
        assert len(served.model.tokenizer.encoded_on) == read
        assert grammars.tried == 0


async def test_what_is_invalid_or_finds_no_place_does_not_count() -> None:
    async with serving(max_running=1, max_waiting=0, requests_per_minute=2, tokens_per_minute=100) as served:
        for _ in range(5):
            for request in INVALID:
                assert (await served.answer(request)).status.code() is grpc.StatusCode.INVALID_ARGUMENT
        served.engine.gate.clear()
        running: Any = served.stub.GenerateStream(ask("b"))
        await running.read()
        await until(lambda: served.server.bridge.live == 1)
        for _ in range(5):
            assert reason((await served.answer(ask("b"))).status) == "QUEUE_FULL"
        served.engine.gate.set()
        assert (await answer(running)).finished
        assert (await served.answer(ask("b"))).finished
        assert reason((await served.answer(ask("b"))).status) == "QUOTA_EXCEEDED"


async def test_a_request_that_is_cancelled_while_it_is_read_counts_for_nothing() -> None:
    async with serving(concurrency=1, requests_per_minute=1) as served:
        tokenizer, go_on, reading = served.model.tokenizer, threading.Event(), threading.Event()
        encode = tokenizer.encode

        def slow(text: str) -> Int32Array:
            if text == LONG:
                reading.set()
                go_on.wait(20)
            return encode(text)

        tokenizer.encode = slow  # type: ignore[method-assign]
        call = served.stub.GenerateStream(ask(text=LONG))
        await until(reading.is_set)
        assert reason((await served.answer(ask())).status) == "QUOTA_EXCEEDED"
        call.cancel()
        await served.assert_idle()
        assert (await served.answer(ask())).finished
        go_on.set()


async def test_tokenize_and_detokenize_are_limited_apart_from_requests() -> None:
    async with serving(requests_per_minute=1) as served:
        for _ in range(5):
            assert len((await served.stub.Tokenize(pb.TokenizeRequest(text="abc"))).token_ids) == 3
            assert (await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, 98]))).text == "ab"
        read = len(served.model.tokenizer.encoded_on)
        for call in (
            served.stub.Tokenize(pb.TokenizeRequest(text=LONG)),
            served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[97, 98])),
        ):
            error = await refusal(call)
            assert (error.code(), reason(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
            assert "text_calls_per_minute" in str(error.details())
        assert len(served.model.tokenizer.encoded_on) == read
        # a single token's text is always told: the gateway asks for those of log-probabilities
        assert (await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[97]))).text == "a"
        assert (await served.answer(ask())).finished


async def test_the_client_raises_a_typed_error_and_does_not_retry() -> None:
    async with serving(tokens_per_minute=10) as served, AsyncClient(served.server.address) as client:
        await client.generate("ab", max_tokens=8)
        for tokens, retryable in ((1, True), (100, False)):
            with pytest.raises(QuotaExceededError) as caught:
                await client.generate("ab", max_tokens=tokens)
            assert caught.value.violations[0].field == "tokens_per_minute"
            assert caught.value.retryable is retryable
            assert (caught.value.retry_after is not None) is retryable


async def test_ended_requests_give_back_their_place_and_tokens() -> None:
    async with serving(concurrency=1, tokens_per_minute=1000) as served:
        for _ in range(5):
            assert (await served.answer(ask())).finished
        served.engine.gate.clear()
        running = served.stub.GenerateStream(ask(tokens=900))
        await running.read()
        assert (await served.answer(ask())).status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        running.cancel()
        served.engine.gate.set()
        await served.assert_idle()
        served.engine.sequence_error = ValueError("broken")
        assert (await served.answer(ask(tokens=800))).status.code() is grpc.StatusCode.INTERNAL
        served.engine.sequence_error = None
        assert (await served.answer(ask(tokens=800))).finished


async def test_servers_of_one_store_share_the_limits() -> None:
    with Valkey() as store:
        settings: dict[str, Any] = {"store": store.url, "requests_per_minute": 1}
        async with serving(**settings) as one, serving(**settings) as two:
            assert (await answer(one.stub.GenerateStream(ask()))).finished
            assert (await answer(two.stub.GenerateStream(ask()))).status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
