"""Clients in a closed loop, and what they ask."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import grpc
import pytest

from draftwood_benchmarks.closed_loop import Questions, RequestResult, closed_loop
from draftwood_benchmarks.load import MeasuredPeers, State, Windows
from draftwood_benchmarks.peers.process import PeerModel, running_peer
from draftwood_client import UnavailableError
from draftwood_client.errors import ErrorDetails
from tests.benchmarks.conftest import UsePeer
from tests.client.fake_server import FakeServer


def failed() -> RequestResult:
    return RequestResult(5.0, error=UnavailableError(ErrorDetails(grpc.StatusCode.UNAVAILABLE, "gone")))


async def test_a_closed_loop_ends_when_there_is_nothing_more_to_ask() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        requests = [*islice(questions.plain(), 5)]
        window = await closed_loop(server.target, 2, iter(requests), math.inf)
    assert len(window.results) == 5
    assert all(result.error is None and result.tokens > 0 for result in window.results)
    assert 0 < window.seconds < 60
    assert 0 < window.tokens <= sum(result.tokens for result in window.results)
    assert {request.options["drafting"] for request in requests} == {False}


async def test_no_tenant_is_asked_a_question_twice_and_each_has_learned_first() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        assert not [*questions.drafted()]
        await questions.prepare(5)
        learned = [(request.tenant, request.text) for request in server.requests]
    requests = [(request.options["tenant"], request.prompt) for request in questions.drafted()]
    assert len(requests) == len(set(requests)) == 6
    tenants = {tenant for tenant, _ in requests}
    assert len(tenants) == 2
    assert sorted(learned) == sorted((tenant, text) for tenant in tenants for text in ("d", "e"))


MODEL = PeerModel("folder", "float32", 1)
LEARNING = """
import json, sys
known, asked = {}, set()
for line in sys.stdin:
    request = json.loads(line)
    memory = request.get("memory", "")
    if request["op"] == "load":
        drafts = request["drafts"]
        answer = {"version": "1"}
    elif request["op"] == "learn":
        known[memory] = known.get(memory, 0) + len(request["prompts"])
        answer = {"seconds": 1.0}
    else:
        assert not memory or memory not in asked, "a window knows the answers of another"
        assert bool(memory) == (drafts == "suffix")
        asked.add(memory)
        answer = {"tokens": 10 + 10 * known.get(memory, 0), "seconds": 1.0, "steps": 10}
        answer["requests"] = [[0.5, 2.0, 1, 5], [0.25, 0.0, 1, 1]]
    print(json.dumps(answer), flush=True)
"""
"""Writes more tokens for each prompt that the request's memory knows."""


@pytest.mark.parametrize("others", [[[5], [6]], []])
def test_each_window_begins_with_a_memory_of_its_own(use_peer: UsePeer, others: list[list[int]]) -> None:
    use_peer(LEARNING)
    with running_peer("vllm", MODEL) as plain, running_peer("vllm", replace(MODEL, drafts="suffix")) as suffix:
        peers, windows = MeasuredPeers([plain, suffix], [[1], [2]], others, 8, 1.0, streams=4), Windows()
        for _ in range(2):
            peers.measure(4, windows)
    expected = {State("vllm", "none"): (20, 20), State("vllm", "suffix", False): (20, 20)}
    if others:
        expected[State("vllm", "suffix")] = (60, 20)
    assert {state: (window.tokens, window.steps) for (_, state), window in windows.items()} == expected
    cold = windows[4, State("vllm", "suffix", False)]
    assert cold.rates == [10.0, 10.0]
    assert [result.ttft for result in cold.results] == [0.5, 0.25] * 2
    assert [result.tpot for result in cold.results] == [0.5, None] * 2
