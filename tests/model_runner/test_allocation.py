"""How much KV memory an engine has by default, and what the log says of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.execution import allocate


class _Factory:
    """Has memory for whatever is asked for."""

    name, exact, window, kv_bytes_per_token = "fake", False, None, 1000

    def default_kv_tokens(self, context: int, sequences: int) -> int:
        return context * sequences

    def runner(self, kv_tokens: int, threads: int | None = None, sequences: int | None = None) -> Any:
        return type("Runner", (), {"pages": kv_tokens // 16, "page_size": 16})()


@dataclass
class _Model:
    max_context: int
    device: str = "cpu"
    weights: str = "bfloat16"
    parameters: int = 500_000_000
    factory: Any = field(default_factory=_Factory)
    drafters: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("max_context", "device", "max_running", "contexts"),
    [
        pytest.param(1000, "cpu", 8, 8, id="short contexts, all whole"),
        pytest.param(8000, "cpu", 8, 5, id="eight of 4096 tokens"),
        pytest.param(32_000, "cpu", 8, 2, id="rounded up to whole contexts"),
        pytest.param(32_000, "cpu", 1, 1, id="one full context at least"),
        pytest.param(131_072, "cpu", 8, 1, id="one very long context"),
        pytest.param(32_000, "cuda:0", 8, 8, id="all of them on a GPU"),
    ],
)
def test_the_default_is_a_usual_context_for_each_running_request(
    max_context: int, device: str, max_running: int, contexts: int
) -> None:
    model: Any = _Model(max_context, device)
    config = EngineConfig(max_running=max_running, max_draft_nodes=48)
    runner, _, running = allocate(model, config)
    assert runner.pages * runner.page_size == contexts * (max_context + 48) // 16 * 16
    assert running == max_running


@pytest.mark.parametrize(
    ("weights", "told"), [("bfloat16", ", 1.00 GB"), ("float32", ", 2.00 GB"), ("int4", ", 0.25 GB"), ("torchao", "")]
)
def test_the_log_says_what_the_model_takes(weights: str, told: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model: Any = _Model(4000, weights=weights)
    allocate(model, EngineConfig(kv_cache_tokens=160_000))
    assert f"memory: 500 million weights ({weights}){told}; KV cache of 160000 tokens, 0.16 GB" in caplog.text
