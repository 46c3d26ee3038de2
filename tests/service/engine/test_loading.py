"""What the engine of a service is loaded with."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import DraftwoodError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.request import StopParams
from draftwood_service.engine import loading
from draftwood_service.engine.loading import loaded
from draftwood_service.settings import Settings
from draftwood_strategies import create
from draftwood_strategies.device import strategy as device_strategy
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.mixing.hybrid import HybridStrategy
from tests.model_runner.sequences import make_sequence

TOKENS = 40


@pytest.mark.system
def test_strategies_draft_from_the_text_that_the_model_wrote(tmp_path: Path) -> None:
    settings = Settings(own_text_tokens=TOKENS, model_cache_folder=tmp_path)
    told: list[str] = []
    with loaded(settings, lambda: None, "", told.append) as found:
        engine, strategy = found.engine, create("hybrid")
        assert isinstance(engine, Engine)
        assert isinstance(strategy, HybridStrategy)
        assert not engine.has_work
        assert told == [engine.model.tokenizer.class_path]
        assert found.own_text is not None
        while not found.own_text.done:
            found.own_text.step()
        prompt = engine.model.tokenizer.encode_chat([{"role": "user", "content": "Where is my parcel?"}])
        engine.add(make_sequence("q", prompt, StopParams(8), strategy=strategy, max_draft_nodes=8))
        while engine.has_work:
            engine.step()
        assert strategy.mixture.model_table.shape[0] > 0
        engine.close()
    assert [file.name for file in tmp_path.glob("own-text-*")] == [f"own-text-{found.info.fingerprint}-{TOKENS}.npy"]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # else the engine's watchdog has it for all tests of this process


@pytest.mark.parametrize(
    ("options", "window", "problem"),
    [
        ({"kv_cache_tokens": 2095}, None, "kv_cache_tokens: 2095 .* one full context with its drafts needs 2096"),
        ({"max_context": 2049}, None, r"max_context: 2049 .* in \[2, 2048\]"),
        ({"kv_cache_tokens": 2096}, None, "has no tokenizer"),
        ({"kv_cache_tokens": 2095}, 32, "has no tokenizer"),
    ],
)
def test_what_the_configuration_of_a_model_forbids_is_told_before_its_weights_are_read(
    tmp_path: Path, options: dict[str, int], window: int | None, problem: str
) -> None:
    """There are none, and no tokenizer."""
    config = json.loads(Path(BUNDLED_MODEL, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window}))
    values = {"model": str(tmp_path), "model_cache": False, "max_draft_nodes": 48, **options}
    with (
        pytest.raises(DraftwoodError, match=problem),
        loaded(Settings.model_validate(values), lambda: None, "", lambda class_path: None),
    ):
        pass


class FakeModel(NamedTuple):
    """What device drafts need to know of a model."""

    runner_name: str
    device: str = "cuda:1"
    max_context: int = 300


def test_device_drafts_have_the_sizes_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[DeviceSizes, str]] = []
    monkeypatch.setattr(device_strategy, "drafts_on_device", lambda *given: asked.append(given))
    given = {"max_running": 5, "memory_tokens": 5000, "memory_bytes": 1 << 20, "max_draft_nodes": 200}
    for choice in ("off", "on"):
        loading.device_drafts(Settings.model_validate({"device_drafts": choice, **given}), FakeModel("cuda"))  # type: ignore[arg-type]
    assert asked == [(DeviceSizes(5, 300, 16, 5000, nodes=64, contexts=1 << 17), "cuda:1")]
    with capture_logs() as logs, loading.device_drafts(Settings(device_drafts="on"), FakeModel("torch")):  # type: ignore[arg-type]
        assert [log["log_level"] for log in logs] == ["warning"]
    assert len(asked) == 1
