"""Models that draft beside the model, as operators and callers meet them: what starts, what is said, the answers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.servers import running_server
from draftwood_client import Client, InvalidRequestError
from draftwood_model_runner import engine as engine_module
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.engine.loading import loaded
from draftwood_service.rpc.bound import BoundServer
from draftwood_service.rpc.server import RunningServer
from draftwood_service.settings import Settings
from draftwood_service.telemetry import opened_telemetry
from draftwood_strategies import create, strategy_names
from draftwood_strategies.registry import know_offered
from tests.draft_models import write_fewer_layers, write_untrained_head
from tests.service.engine_thread import EngineThread
from tests.service.fakes import FakeModel

QUESTIONS = read_questions()[0][:3]

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A smaller model, and a head that is not one for the bundled model."""
    folder = tmp_path_factory.mktemp("drafters")
    return write_fewer_layers(folder / "two-layers", 2), write_untrained_head(folder / "untrained")


@pytest.fixture(autouse=True)
def nothing_known_elsewhere() -> Iterator[None]:
    yield
    know_offered([])
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # else an engine's watchdog has it for all tests of this process


def refused(*flags: str) -> str:
    """The line of a server that does not start."""
    command = [sys.executable, "-m", "draftwood_service", "--port", "0", "--log-level", "error", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    [line] = done.stderr.splitlines()
    return line.removeprefix("draftwood serve: ")


def test_a_server_with_a_draft_model(drafters: tuple[str, str], tmp_path: Path) -> None:
    """A tenant and an arm use it; without it the same file keeps the server from starting."""
    arms = [
        {"id": "control", "drafting": {"strategy": "trie"}},
        {"id": "smaller", "drafting": {"strategy": "draft_model", "options": {"depth": 3}}},
    ]
    content = {
        "tenants": [{"name": "tenants/acme", "drafting": {"strategy": "draft_model"}}],
        "experiments": [
            {"name": "experiments/x", "tenants": ["globex"], "arms": arms, "state": "EXPERIMENT_STATE_RUNNING"}
        ],
    }
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump(content))
    flags = ["--tenants-file", str(tmp_path / "tenants.yaml"), "--model-cache-folder", str(tmp_path / "cache")]
    chosen = ["--draft-model", drafters[0], "--strategy", "draft_model"]
    with running_server(*flags, *chosen) as target, Client(target, tenant="acme") as client:
        info = client.model_info()
        assert [(each.strategy, each.name, each.parameters) for each in info.draft_models] == [
            ("draft_model", "two-layers", 2_655_488)
        ]
        assert info.default_strategy == "draft_model"
        assert {"draft_model", "hybrid"} <= {*info.strategies}
        for options in ({}, {"temperature": 0.8, "seed": 7}):
            asked: dict[str, Any] = {"max_tokens": 60, **options}
            for question in QUESTIONS:
                plain = client.chat(question, drafting=False, **asked)
                assert client.chat(question, **asked).text == plain.text
                assert client.chat(question, strategy="hybrid", learn=False, **asked).text == plain.text
        with Client(target, tenant="globex") as other:
            plain = other.chat(QUESTIONS[0], drafting=False, max_tokens=8)
            answers = [other.chat(QUESTIONS[0], max_tokens=8) for _ in range(24)]
        assert {answer.text for answer in answers} == {plain.text}
        chosen_by_arm = {(answer.arm, answer.drafting.strategy) for answer in answers}
        assert chosen_by_arm == {("control", "trie"), ("smaller", "draft_model")}
        with pytest.raises(InvalidRequestError, match="head is there if `draftwood serve` has --draft-head"):
            client.chat(QUESTIONS[0], strategy="head")
    line = refused(*flags)
    assert line.startswith("--tenants-file")
    assert line.endswith("draft_model is there if `draftwood serve` has --draft-model")


def test_a_model_that_does_not_fit_is_one_line_and_no_server(drafters: tuple[str, str], tmp_path: Path) -> None:
    _, head = drafters
    line = refused("--draft-head", head, "--model-cache-folder", str(tmp_path / "cache"))
    problem = "it must hold 15% of the model's own tokens most probable, not 0.0%: it is not one for this model"
    assert line == f"--draft-head: '{head}' is not allowed; {problem}"
    larger = write_fewer_layers(tmp_path / "larger", 6)
    line = refused("--draft-model", larger, "--model-cache-folder", str(tmp_path / "cache"))
    assert line.startswith(f"--draft-model: '{larger}' is not allowed; it must be smaller than the model: it has 5.9 m")


def test_the_engine_offers_what_it_has_tried(drafters: tuple[str, str], tmp_path: Path) -> None:
    values = {"own_text_tokens": 0, "model_cache_folder": tmp_path, "draft_model": drafters[0]}

    def load(**others: object) -> set[str]:
        settings = Settings.model_validate(values | others)
        with loaded(settings, lambda: None, "", lambda class_path: None) as found:
            names = {facts.strategy for facts in found.info.draft_models}
            assert isinstance(found.engine, Engine)
            assert names == {*strategy_names()} & {"head", "draft_model"}
            assert {*create("hybrid").parts} == {"trie", *names}  # type: ignore[attr-defined]
            found.engine.close()
        assert not {"head", "draft_model"} & {*strategy_names()}
        return names

    assert load() == {"draft_model"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "LEAST_AGREED", 0.0)
        assert load(draft_head=drafters[1]) == {"head", "draft_model"}
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr("draftwood_model_runner.loading.draft_models.bundled_head", lambda model: drafters[1])
        assert load() == {"draft_model"}
    assert ["without its draft head" in log["event"] for log in logs if log["log_level"] == "warning"] == [True]


async def test_a_default_whose_model_the_engine_left_out_is_no_server() -> None:
    know_offered(["head"])  # by the settings
    settings = Settings(port=0, draft_head="/a/head", strategy="head")
    bound = BoundServer(settings, opened_telemetry(settings))
    bridge = EngineBridge(EngineThread(lambda: pytest.fail("it was not to be started")), max_running=1, max_waiting=1)
    try:
        with pytest.raises(InvalidValueError, match=r"strategy: 'head' is not allowed; .*--draft-head"):
            RunningServer(bound, FakeModel(), bridge)
    finally:
        await bound.close()
