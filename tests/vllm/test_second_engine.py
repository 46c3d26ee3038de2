"""vLLM's second model runner with our speculator, on the CPU: `make test-vllm`. Its kernels are interpreted.

Two engines, without drafts and with, schedule asynchronously and have the same requests.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.memory.servers import Valkey
from tests.vllm.engine import Engine, request, running_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
COUNT = 40
PROMPT = [1, *range(10, 40), 10, 11]
PARAMETERS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.1},
    "stops": {"min_tokens": 4, "stop_token_ids": [5, 6, 7]},
}


def mixed() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Requests that join over time, with tenants and without, and when some of them are aborted."""
    random_, requests = random.Random(5), []
    texts = [[random_.randrange(10, 4000) for _ in range(30)] for _ in range(4)]
    for number in range(COUNT):
        prompt = [1, *random_.choice(texts)[: random_.randrange(1, 30)]]
        prompt += [random_.randrange(10, 4000) for _ in range(random_.randrange(60))]
        options: dict[str, Any] = {"draftwood_tenant": random_.choice("ab")} if random_.random() < 0.8 else {}
        options |= {"draftwood": "off"} if random_.random() < 0.1 else {}
        requests.append(request(str(number), prompt, number // 2, random_.randrange(1, 40), **options))
    return requests, {str(number): number // 2 + 6 for number in range(0, COUNT, 10)}


def parametrized(name: str) -> list[dict[str, Any]]:
    return [request(f"{name} {i}", [*PROMPT, 20 + i], 0, 12, **PARAMETERS[name]) for i in range(2)]


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """What the second runner without drafts answers."""
    with running_engine(drafts=False, driver="second_driver.py") as engine:
        requests, aborts = mixed()
        return {
            "mixed": engine.run(*requests, aborts=aborts),
            "one": engine.run(request("one", PROMPT, 0, 40)),
            **{name: engine.run(*parametrized(name)) for name in PARAMETERS},
        }


@pytest.fixture(scope="module")
def store() -> Iterator[Valkey]:
    with Valkey() as server:
        yield server


@pytest.fixture(scope="module")
def engine(plain: dict[str, Any], store: Valkey) -> Iterator[Engine]:
    """With drafts, once the other one has ended."""
    with running_engine(driver="second_driver.py", DRAFTWOOD_STORE=store.url) as engine:
        yield engine


def test_no_fallback_is_logged(engine: Engine) -> None:
    state = engine.state()
    assert (state["runner"], state["asynchronous"], state["off"]) == (
        "vllm.v1.worker.gpu.model_runner",
        True,
        False,
    )
    assert "drafts on the device take" in engine.log
    for said in ("does not yet support", "first model runner", "without drafts", "scheduling is disabled"):
        assert said not in engine.log


def test_answers_are_those_without_drafts(plain: dict[str, dict[str, Any]], engine: Engine) -> None:
    """In float32, with chunks, preemptions and aborts."""
    requests, aborts = mixed()
    expected, found = plain["mixed"], engine.run(*requests, aborts=aborts)
    both = expected["outputs"].keys() & found["outputs"].keys()
    assert len(both) > COUNT * 0.85
    assert {name for name in both if expected["outputs"][name] != found["outputs"][name]} == set()
    assert sum(found["drafted"].values()) > COUNT
    assert found["preemptions"] > 0
    state = engine.state()
    assert (state["sessions"], state["rows"], state["off"]) == (0, 0, False)


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_vllm_offers_works_with_drafts(plain: dict[str, dict[str, Any]], engine: Engine, name: str) -> None:
    assert engine.run(*parametrized(name))["outputs"] == plain[name]["outputs"]


def test_sampled_answers_complete(engine: Engine) -> None:
    run = engine.run(*(request(f"s{i}", PROMPT, 0, 12, temperature=0.9, n=2) for i in range(2)))
    assert [[len(tokens) for tokens in run["outputs"][f"s{i}"]] for i in range(2)] == [[12, 12]] * 2


def test_a_tenants_answers_are_drafted_for_its_next_request_and_for_no_other(
    plain: dict[str, dict[str, Any]], engine: Engine
) -> None:
    found = []
    for number, tenant in enumerate(["acme", "acme", "other", ""]):
        run = engine.run(request(f"t{number}", PROMPT, 0, 40, draftwood_tenant=tenant))
        assert run["outputs"][f"t{number}"] == plain["one"]["outputs"]["one"]
        engine.state()
        found.append((tenant, run["steps"] < 30))  # of 40 tokens
    assert found == [("acme", False), ("acme", True), ("other", False), ("", False)]


def test_another_replica_drafts_from_what_this_one_wrote(
    plain: dict[str, dict[str, Any]], engine: Engine, store: Valkey
) -> None:
    """The last test of this engine. The first request brings the memory."""
    engine.run(request("writes", PROMPT, 0, 40, draftwood_tenant="shared"))
    assert engine.state()["waiting"] == 0
    with running_engine(driver="second_driver.py", DRAFTWOOD_STORE=store.url) as other:
        for name in ("brings", "drafts"):
            run = other.run(request(name, PROMPT, 0, 40, draftwood_tenant="shared", draftwood_learn=0))
            assert run["outputs"][name] == plain["one"]["outputs"]["one"]
        assert run["drafted"]["drafts"] > 20
        assert other.state()["learned"] == 0
