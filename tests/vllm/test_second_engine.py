"""Our drafts in vLLM's second model runner, alone and beside vLLM's own drafters, on the CPU: `make test-vllm`.

Its kernels are interpreted. Drafters are small: the bundled model without its last layer, which is often right, and an
EAGLE-3 head that never is. All engines schedule asynchronously, and answer what one without any drafts answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.memory.servers import Valkey
from tests.vllm import drafters
from tests.vllm.engine import Engine, assert_same, mixed, request, running_engine, with_parameters

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]
COUNT = 40
PROMPT = [1, *range(10, 40), 10, 11]
PARAMETERS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "penalties": {"presence_penalty": 0.7, "repetition_penalty": 1.1},
    "stops": {"min_tokens": 4, "stop_token_ids": [5, 6, 7]},
}
Runs = dict[str, dict[str, Any]]
started = partial(running_engine, driver="second_driver.py")


def speculation(method: str, folder: Path, **others: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(folder), "num_speculative_tokens": 4, **others}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters.shortened(tmp_path_factory.mktemp("model"), 5)


@pytest.fixture(scope="module")
def plain() -> Runs:
    """What the second runner answers without drafts."""
    with started(drafts=False) as engine:
        requests, aborts = mixed(COUNT, 2, 40)
        return {
            "mixed": engine.run(*requests, aborts=aborts),
            "one": engine.run(request("one", PROMPT, 0, 40)),
            **{name: engine.run(*with_parameters(name, **params)) for name, params in PARAMETERS.items()},
        }


@pytest.fixture(scope="module")
def expected(plain: Runs) -> list[list[int]]:
    """The answer to `PROMPT`."""
    found: list[list[int]] = plain["one"]["outputs"]["one"]
    return found


@pytest.fixture(scope="module")
def their_steps(model: Path) -> int:
    """Steps of the answer to `PROMPT` with vLLM's drafter alone."""
    with started(drafts=False, options=speculation("draft_model", model)) as engine:
        return int(engine.run(request("one", PROMPT, 0, 40))["steps"])


@pytest.fixture(scope="module")
def alone(plain: Runs, running: Valkey) -> Iterator[Engine]:
    with started(DRAFTWOOD_STORE=running.url) as engine:
        yield engine


@pytest.fixture(scope="module")
def beside(plain: Runs, their_steps: int, model: Path) -> Iterator[Engine]:
    with started(options=speculation("draft_model", model) | {"num_gpu_blocks_override": 14}) as engine:
        yield engine


@pytest.fixture(params=["alone", "beside"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


def test_answers_are_those_without_drafts(plain: Runs, engine: Engine) -> None:
    """In float32, with chunks, preemptions and aborts. Nothing is said of a fallback."""
    requests, aborts = mixed(COUNT, 2, 40)
    found = engine.run(*requests, aborts=aborts)
    assert_same(plain["mixed"], found, COUNT)
    assert found["preemptions"] > 0
    assert sum(found["drafted"].values()) > COUNT / 2
    state = engine.state()
    assert (state["sessions"], state["rows"], state["off"]) == (0, 0, False)
    assert (state["runner"], state["asynchronous"]) == ("vllm.v1.worker.gpu.model_runner", True)
    assert "drafts on the device take" in engine.log
    for said in ("does not yet support", "first model runner", "without drafts", "scheduling is disabled"):
        assert said not in engine.log


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_vllm_offers_works_with_drafts(plain: Runs, engine: Engine, name: str) -> None:
    assert engine.run(*with_parameters(name, **PARAMETERS[name]))["outputs"] == plain[name]["outputs"]


def test_sampled_answers_complete(engine: Engine) -> None:
    run = engine.run(*(request(f"s{i}", PROMPT, 0, 12, temperature=0.9, n=2) for i in range(2)))
    assert [[len(tokens) for tokens in run["outputs"][f"s{i}"]] for i in range(2)] == [[12, 12]] * 2


def test_a_tenants_answers_are_drafted_for_its_next_request_and_for_no_other(
    expected: list[list[int]], alone: Engine
) -> None:
    asked = [("acme", False), ("acme", True), ("other", False), ("", False)]
    found = [
        (tenant, alone.drafts_fast(f"t{number}", PROMPT, tenant, expected)) for number, (tenant, _) in enumerate(asked)
    ]
    assert found == asked


def test_another_replica_drafts_from_what_this_one_wrote(
    expected: list[list[int]], alone: Engine, running: Valkey
) -> None:
    """Its first request brings the memory. At its end it sends what it learned last."""
    alone.run(request("writes", PROMPT, 0, 40, draftwood_tenant="shared"))
    assert alone.state()["waiting"] == 0
    with started(DRAFTWOOD_STORE=running.url) as other:
        for name in ("brings", "drafts"):
            run = other.run(request(name, PROMPT, 0, 40, draftwood_tenant="shared", draftwood_learn=0))
            assert run["outputs"][name] == expected
            assert other.state()["learned"] == 0
        assert run["drafted"]["drafts"] > 20
        other.run(request("the last one", PROMPT, 0, 40, draftwood_tenant="last"))
    assert any(running.client.scan_iter("dw:{t:last}:3:*"))


def test_a_tenant_whose_memory_knows_more_takes_ours_and_others_take_theirs(
    expected: list[list[int]], their_steps: int, beside: Engine
) -> None:
    """A request without ours has theirs, also for a tenant whose memory knows the answer. When ours has failed, theirs
    goes on. The last test of this engine."""

    def ask(name: str, tenant: str, **options: Any) -> tuple[int, int]:
        """Its steps, and its drafted tokens of ours."""
        run = beside.run(request(name, PROMPT, 0, 40, draftwood_tenant=tenant, **options))
        assert run["outputs"][name] == expected
        return run["steps"], run["drafted"].get(name, 0)

    found = []
    for number, tenant in enumerate(["acme", "acme", "other"]):
        steps, drafted = ask(f"t{number}", tenant)
        found.append((tenant, steps < their_steps, drafted > 10))
        beside.state()
    assert found == [("acme", False, False), ("acme", True, True), ("other", False, False)]
    assert ask("off", "acme", draftwood="off") == (their_steps, 0)
    beside.call("break_ours")
    assert ask("after", "acme")[0] == their_steps
    assert beside.log.count("goes on without drafts of Draftwood") == 1


def test_a_drafter_that_is_never_right_costs_no_step(plain: Runs, expected: list[list[int]], tmp_path: Path) -> None:
    """EAGLE-3, with hidden states of the model; and after a failure of theirs, ours goes on."""
    with started(options=speculation("eagle3", drafters.eagle3(tmp_path))) as engine:
        for name in ("first", "second"):
            run = engine.run(request(name, PROMPT, 0, 40, draftwood_tenant="acme"))
            assert run["outputs"][name] == expected
            engine.state()
        assert run["steps"] < plain["one"]["steps"] / 3
        engine.call("break_theirs")
        after = engine.run(request("after", PROMPT, 0, 40, draftwood_tenant="acme"))
        assert after["outputs"]["after"] == expected
        assert after["steps"] <= run["steps"]
        assert engine.log.count("goes on without its own drafts") == 1


def test_drawn_drafts_complete(model: Path) -> None:
    """Those that are verified by their probabilities; `test_versions` has their distribution."""
    with started(options=speculation("draft_model", model, draft_sample_method="probabilistic")) as engine:
        for name in ("first", "second"):
            run = engine.run(request(name, PROMPT, 0, 40, temperature=0.1, seed=1, draftwood_tenant="acme"))
            assert len(run["outputs"][name][0]) == 40
            engine.state()
        assert run["drafted"]["second"] > 0
        assert "goes on without" not in engine.log
