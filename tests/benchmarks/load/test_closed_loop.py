"""Clients in a closed loop, and what they ask."""

from __future__ import annotations

import math

import grpc

from draftwood_benchmarks.load.closed_loop import RequestResult, closed_loop
from draftwood_benchmarks.load.questions import Questions, take_from
from draftwood_client import UnavailableError
from draftwood_client.errors import ErrorDetails
from tests.client.fake_server import FakeServer


def failed() -> RequestResult:
    return RequestResult(5.0, error=UnavailableError(ErrorDetails(grpc.StatusCode.UNAVAILABLE, "gone")))


def test_latencies_are_those_of_the_first_tokens_and_of_each_later_one() -> None:
    result = RequestResult(sent_at=10.0, first_at=10.5, last_at=12.5, first_tokens=3, tokens=11, steps=4)
    assert result.ttft == 0.5
    assert result.tpot == 0.25
    assert RequestResult(sent_at=10.0, first_at=10.5, last_at=10.5, first_tokens=3, tokens=3).tpot is None
    assert failed().ttft is None


async def test_a_closed_loop_ends_when_there_is_nothing_more_to_ask() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        requests = [questions.plain() for _ in range(5)]
        window = await closed_loop(server.target, 2, take_from(requests), math.inf)
    assert len(window.results) == 5
    assert all(result.error is None and result.tokens > 0 for result in window.results)
    assert 0 < window.seconds < 60
    assert 0 < window.tokens <= sum(result.tokens for result in window.results)
    assert {request.options["drafting"] for request in requests} == {False}


async def test_no_tenant_is_asked_a_question_twice_and_each_has_learned_first() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        assert questions.drafted() is None
        await questions.prepare(5)
        learned = [(request.tenant, request.text) for request in server.requests]
    requests = []
    while (request := questions.drafted()) is not None:
        requests.append((request.options["tenant"], request.prompt))
    assert len(requests) == len(set(requests)) == 6
    tenants = {tenant for tenant, _ in requests}
    assert len(tenants) == 2
    assert sorted(learned) == sorted((tenant, text) for tenant in tenants for text in ("d", "e"))
