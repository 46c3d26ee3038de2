"""A peer's windows: each kind of drafts, cold and warm, with a memory of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwood_benchmarks.load.peers import MeasuredPeers, PeerState
from draftwood_benchmarks.peers.process import PeerModel, running_peer
from tests.benchmarks.peers.fake import UsePeer

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
    elif request["op"] == "generate":
        answer = {"tokens": [1], "seconds": 0.5}
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
        peers = MeasuredPeers([plain, suffix], [[1], [2]], others, 8, 1.0, most=4)
        for _ in range(2):
            peers.measure(4)
    found = {state: (one.tokens, one.steps) for (_, state), one in peers.found.items()}
    expected = {PeerState("vllm", "none", True): (20, 20), PeerState("vllm", "suffix", False): (20, 20)}
    if others:
        expected[PeerState("vllm", "suffix", True)] = (60, 20)
    assert found == expected
    window = peers.fastest(4)
    assert window is not None
    assert (window.tokens, window.rates) == ((60, [30.0, 30.0]) if others else (20, [10.0, 10.0]))
    assert [one.ttft for one in window.results] == [0.5, 0.25] * 2
    assert [one.tpot for one in window.results] == [0.5, None] * 2
