"""What the engine of a service is loaded with."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import StopParams
from draftwood_service.engine import loading
from draftwood_service.engine.loading import loaded
from draftwood_service.settings import Settings
from draftwood_strategies import create, registry
from draftwood_strategies.mixing.hybrid import HybridStrategy
from tests.model_runner.sequences import make_sequence

TOKENS = 40


@pytest.mark.system
def test_strategies_draft_from_the_text_that_the_model_wrote(tmp_path: Path) -> None:
    settings = Settings(own_text_tokens=TOKENS, model_cache_folder=tmp_path)
    with loaded(settings, lambda: None, "") as found:
        engine, strategy = found.engine, create("hybrid")
        assert isinstance(engine, Engine)
        assert isinstance(strategy, HybridStrategy)
        assert not engine.has_work
        assert found.own_text is not None
        while not found.own_text.done:
            found.own_text.step()
        prompt = engine.model.tokenizer.encode_chat([{"role": "user", "content": "Where is my parcel?"}])
        engine.add(make_sequence("q", prompt, StopParams(8), strategy=strategy, max_draft_nodes=8))
        while engine.has_work:
            engine.step()
        assert strategy.mixer.of_model.shape[0] > 0
        engine.close()
    assert [file.name for file in tmp_path.glob("own-text-*")] == [f"own-text-{found.info.fingerprint}-{TOKENS}.npy"]
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # else the engine's watchdog has it for all tests of this process


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_the_log_tells_of_a_compilation_that_takes_long(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(loading, "_SILENT_SECONDS", 0.2)
    monkeypatch.setattr(registry, "strategy_names", lambda: ["trie"])
    monkeypatch.setattr(registry, "warm_up", lambda name: time.sleep(seconds))
    with capture_logs() as logs:
        loading._warm_up_strategies()
    assert ["being compiled" in one["event"] for one in logs] == [True] * (seconds > 0)
