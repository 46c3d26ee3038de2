"""The plug-in in vLLM's engine: `make test-vllm`. Two engines, without drafts and with, have the same requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.engine import Engine, assert_same, mixed, request, running_engine, with_parameters

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
COUNT = 500
RANDOM = random.Random(11)
PROMPT = [1, *(RANDOM.randrange(10, 4000) for _ in range(40)), 77]
PARAMETERS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "stops": {"min_tokens": 10, "stop_token_ids": [5, 6, 7]},
    "bad words": {"bad_words": ["the"]},
    "structured output": {"regex": "[0-9]{4}-[0-9]{2}", "ignore_eos": False},
}


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """What the engine without drafts answers."""
    with running_engine(drafts=False) as engine:
        requests, aborts = mixed(COUNT, 0.5, 60)
        return {
            "mixed": engine.run(*requests, aborts=aborts),
            "one": engine.run(request("one", PROMPT, 0, 40)),
            **{name: engine.run(*with_parameters(name, **params)) for name, params in PARAMETERS.items()},
        }


@pytest.fixture(scope="module")
def engine(plain: dict[str, Any]) -> Iterator[Engine]:
    """With drafts, once the other one has ended."""
    with running_engine() as engine:
        yield engine


def test_answers_are_those_without_drafts(plain: dict[str, dict[str, Any]], engine: Engine) -> None:
    """500 requests in float32 that join, are read in chunks, preempted and resumed, hit the prefix cache, move to other
    rows and are aborted, at random."""
    requests, aborts = mixed(COUNT, 0.5, 60)
    expected, found = plain["mixed"], engine.run(*requests, aborts=aborts)
    for run in (expected, found):
        assert run["preemptions"] > 10
        assert run["rows_moved"] > 10
        assert run["cached"] > 100
    assert_same(expected, found, COUNT)
    assert sum(found["drafted"].values()) > COUNT
    state = engine.state()
    assert (state["sessions"], state["failures"], state["off"]) == (0, {}, False)


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_vllm_offers_works_with_drafts(plain: dict[str, dict[str, Any]], engine: Engine, name: str) -> None:
    for _ in ("cold", "warm"):
        assert engine.run(*with_parameters(name, **PARAMETERS[name]))["outputs"] == plain[name]["outputs"]
        engine.state()


def test_a_tenants_answers_are_drafted_for_its_next_request_and_for_no_other(
    plain: dict[str, dict[str, Any]], engine: Engine
) -> None:
    expected = plain["one"]["outputs"]["one"]
    asked = [("acme", False), ("acme", True), ("other", False), ("", False), ("", False), ("acme", True)]
    found = [
        (tenant, engine.drafts_fast(f"t{number}", PROMPT, tenant, expected)) for number, (tenant, _) in enumerate(asked)
    ]
    assert found == asked


def test_sampled_answers_complete(engine: Engine) -> None:
    """Without seeds: vLLM's CPU build fails for a seeded request whose prompt is read in chunks, with drafts or not."""
    run = engine.run(*(request(f"s{i}", PROMPT, 0, 24, temperature=0.9, n=2) for i in range(4)))
    assert [[len(tokens) for tokens in run["outputs"][f"s{i}"]] for i in range(4)] == [[24, 24]] * 4


def test_a_memory_whose_thread_dies_costs_no_request_nor_draft(
    plain: dict[str, dict[str, Any]], engine: Engine
) -> None:
    """The last test of this engine. What is known of a tenant is drafted from, and learned, in this process."""
    expected = plain["one"]["outputs"]["one"]
    engine.drafts_fast("c0", PROMPT, "crash", expected)
    engine.call("crash")
    for number in range(1, 4):
        run = engine.run(request(f"c{number}", PROMPT, 0, 40, draftwood_tenant="crash"))
        assert run["outputs"][f"c{number}"] == expected
        assert run["drafted"][f"c{number}"] > 15
    new = [engine.run(request(f"n{i}", PROMPT, 0, 40, draftwood_tenant="new")) for i in range(2)]
    assert [run["outputs"][f"n{i}"] for i, run in enumerate(new)] == [expected] * 2
    for name, params in PARAMETERS.items():
        assert engine.run(*with_parameters(name, **params))["outputs"] == plain[name]["outputs"]
    assert engine.state()["off"] is False
