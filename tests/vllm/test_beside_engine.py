"""Our drafts beside those of vLLM's own drafters, in its second model runner on the CPU: `make test-vllm`.

Drafters are small: the bundled model without its last layer, which is often right, and an EAGLE-3 head that never is.
Answers are compared with those without any drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import drafters
from tests.vllm.engine import Engine, request, running_engine
from tests.vllm.test_second_engine import COUNT, PARAMETERS, PROMPT, mixed, parametrized

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
DRIVER = "beside_driver.py"


def speculation(method: str, folder: Path, **others: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "model": str(folder), "num_speculative_tokens": 4, **others}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafters.shortened(tmp_path_factory.mktemp("model"), 5)


@pytest.fixture(scope="module")
def plain() -> dict[str, dict[str, Any]]:
    """What the second runner answers without drafts."""
    with running_engine(drafts=False, driver=DRIVER) as engine:
        requests, aborts = mixed()
        return {
            "mixed": engine.run(*requests, aborts=aborts),
            "one": engine.run(request("one", PROMPT, 0, 40)),
            **{name: engine.run(*parametrized(name)) for name in PARAMETERS},
        }


@pytest.fixture(scope="module")
def theirs(plain: dict[str, Any], model: Path) -> dict[str, dict[str, Any]]:
    """What vLLM does with its drafter alone."""
    with running_engine(drafts=False, driver=DRIVER, options=speculation("draft_model", model)) as engine:
        return {"one": engine.run(request("one", PROMPT, 0, 40))}


@pytest.fixture(scope="module")
def engine(theirs: dict[str, Any], model: Path) -> Iterator[Engine]:
    """With both, once the others have ended."""
    options = speculation("draft_model", model) | {"num_gpu_blocks_override": 14}
    with running_engine(driver=DRIVER, options=options) as engine:
        yield engine


def test_answers_are_those_without_drafts(plain: dict[str, dict[str, Any]], engine: Engine) -> None:
    """In float32, with chunks, preemptions and aborts."""
    requests, aborts = mixed()
    expected, found = plain["mixed"]["outputs"], engine.run(*requests, aborts=aborts)
    both = expected.keys() & found["outputs"].keys()
    assert len(both) > COUNT * 0.85
    assert {name for name in both if expected[name] != found["outputs"][name]} == set()
    assert found["preemptions"] > 0
    assert sum(found["drafted"].values()) > COUNT / 2
    state = engine.state()
    assert (state["sessions"], state["rows"], state["off"], state["asynchronous"]) == (0, 0, False, True)


@pytest.mark.parametrize("name", PARAMETERS)
def test_what_vllm_offers_works_with_both(plain: dict[str, dict[str, Any]], engine: Engine, name: str) -> None:
    assert engine.run(*parametrized(name))["outputs"] == plain[name]["outputs"]


def test_a_tenant_whose_memory_knows_more_takes_ours_and_others_take_theirs(
    plain: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], engine: Engine
) -> None:
    found = []
    for number, tenant in enumerate(["acme", "acme", "other"]):
        run = engine.run(request(f"t{number}", PROMPT, 0, 40, draftwood_tenant=tenant))
        assert run["outputs"][f"t{number}"] == plain["one"]["outputs"]["one"]
        engine.state()
        found.append((tenant, run["steps"] < theirs["one"]["steps"], run["drafted"][f"t{number}"] > 10))
    assert found == [("acme", False, False), ("acme", True, True), ("other", False, False)]


def test_sampled_answers_complete(engine: Engine) -> None:
    run = engine.run(*(request(f"s{i}", PROMPT, 0, 12, temperature=0.9, n=2) for i in range(2)))
    assert [[len(tokens) for tokens in run["outputs"][f"s{i}"]] for i in range(2)] == [[12, 12]] * 2


def test_a_request_without_our_drafts_has_theirs(
    plain: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], engine: Engine
) -> None:
    """Also for a tenant whose memory knows the answer."""
    run = engine.run(request("off", PROMPT, 0, 40, draftwood_tenant="acme", draftwood="off"))
    assert run["outputs"]["off"] == plain["one"]["outputs"]["one"]
    assert (run["steps"], run["drafted"]["off"]) == (theirs["one"]["steps"], 0)


def test_after_a_failure_of_ours_theirs_goes_on(
    plain: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], engine: Engine
) -> None:
    """The last test of this engine."""
    engine.call("break_ours")
    run = engine.run(request("after", PROMPT, 0, 40, draftwood_tenant="acme"))
    assert run["outputs"]["after"] == plain["one"]["outputs"]["one"]
    assert run["steps"] == theirs["one"]["steps"]
    assert engine.log.count("goes on without drafts of Draftwood") == 1


def test_a_drafter_that_is_never_right_costs_no_step(plain: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """EAGLE-3, with hidden states of the model; and after a failure of theirs, ours goes on."""
    head = drafters.eagle3(tmp_path)
    with running_engine(driver=DRIVER, options=speculation("eagle3", head)) as engine:
        for name in ("first", "second"):
            run = engine.run(request(name, PROMPT, 0, 40, draftwood_tenant="acme"))
            assert run["outputs"][name] == plain["one"]["outputs"]["one"]
        assert run["steps"] < plain["one"]["steps"] / 3
        engine.call("break_theirs")
        after = engine.run(request("after", PROMPT, 0, 40, draftwood_tenant="acme"))
        assert after["outputs"]["after"] == plain["one"]["outputs"]["one"]
        assert after["steps"] <= run["steps"]
        assert engine.log.count("goes on without its own drafts") == 1


def test_drawn_drafts_complete(model: Path) -> None:
    """Those that are verified by their probabilities; `test_versions` has their distribution."""
    options = speculation("draft_model", model, draft_sample_method="probabilistic")
    with running_engine(driver=DRIVER, options=options) as engine:
        for name in ("first", "second"):
            run = engine.run(request(name, PROMPT, 0, 40, temperature=0.1, seed=1, draftwood_tenant="acme"))
            assert len(run["outputs"][name][0]) == 40
        assert run["drafted"]["second"] > 0
        assert "goes on without" not in engine.log
