"""What the engine of a service is loaded with."""

from __future__ import annotations

from pathlib import Path

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.request import StopParams
from draftwood_service.engine.loading import loaded
from draftwood_service.settings import Settings
from draftwood_strategies import create
from draftwood_strategies.mixing.hybrid import HybridStrategy
from tests.model_runner.sequences import make_sequence

TOKENS = 300


def test_strategies_draft_from_the_text_that_the_model_wrote(tmp_path: Path) -> None:
    settings = Settings(own_text_tokens=TOKENS, model_cache_folder=tmp_path)
    with loaded(settings, lambda: None, "") as found:
        engine, strategy = found.engine, create("hybrid")
        assert isinstance(engine, Engine)
        assert isinstance(strategy, HybridStrategy)
        assert not engine.has_work
        prompt = engine.model.tokenizer.encode_chat([{"role": "user", "content": "Where is my parcel?"}])
        engine.add(make_sequence("q", prompt, StopParams(8), strategy=strategy, max_draft_nodes=8))
        while engine.has_work:
            engine.step()
        assert strategy.mixer.of_model.shape[0] > 0
        engine.close()
    assert [file.name for file in tmp_path.glob("own-text-*")] == [f"own-text-{found.info.fingerprint}-{TOKENS}.npy"]
