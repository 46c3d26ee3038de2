"""Our engine with drafts on a device: the tokens of transformers' own `generate`, and of no drafts."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import pytest

from draftwood_memory.config import Capacity
from draftwood_memory.resident import StrategyKey, make
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.runners.model_calls import setting
from draftwood_strategies import Strategy, create
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.launching import LAUNCHER, Launch
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.draft_engine import guard
from tests.model_runner.families import expected, served
from tests.model_runner.sequences import GREEDY, engine_of, make_sequence, run
from tests.strategies.fakes import Clock

SIZES = DeviceSizes(rows=3, row_tokens=128, tenants=2, tenant_tokens=512, nodes=16, contexts=1 << 12)
PROMPTS = ((1, 2, 3, 1, 2, 3), (4, 5), (1, 2, 3), (6, 7, 6, 7))
STOP = StopParams(12)


@pytest.fixture(autouse=True)
def drafts_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy takes too long for drafts that pay."""
    monkeypatch.setattr(guard, "time", Clock())


def written(strategies: SequenceOf[Strategy], sampling: SamplingParams, fails: bool = False) -> list[list[int]]:
    """What sequences of two tenants write side by side; there are more of them than rows.

    Args:
        fails: drafting is expected to be switched off for those with a row.
    """
    engine = engine_of(served("llama"), 16, max_running=4)
    options: dict[str, Any] = {"strategy_name": "trie", "max_draft_nodes": 12}
    sequences = [
        make_sequence(str(i), prompt, STOP, sampling, strategy=strategies[i % 2], tenant="ab"[i % 2], **options)
        for i, prompt in enumerate(PROMPTS)
    ]
    run(engine, *sequences)
    # The one that found no row is not switched off: it launches nothing.
    switched_off = sum(bool(sequence.stats.drafting_disabled_reason) for sequence in sequences)
    assert switched_off in ((SIZES.rows, len(PROMPTS)) if fails else (0,))
    accepted = sum(sequence.stats.accepted_tokens for sequence in sequences)
    assert (accepted > 0) is not fails
    return [sequence.output for sequence in sequences]


@pytest.mark.system
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("name", ["trie", "recycling", "hybrid", "mixed by the host"])
def test_the_tokens_are_those_of_generate(name: str, sampling: SamplingParams) -> None:
    answers = [expected("llama", prompt, sampling, STOP) for prompt in PROMPTS]
    with drafts_on_device(SIZES, "cpu"):
        if name == "mixed by the host":
            strategies = [create("hybrid", sources="trie,recycling,jacobi") for _ in range(2)]
        else:
            strategies = [make(StrategyKey(name), Capacity(tokens=1000, bytes=1 << 20)) for _ in range(2)]
            assert all(isinstance(strategy, DeviceStrategy) for strategy in strategies)
        for _ in range(2):
            assert written(strategies, sampling) == answers


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "module"),
    [
        *(("trie", module) for module in ("drafting", "learning", "appending")),
        ("hybrid", "mixing"),
        ("recycling", "mixture_learning"),
    ],
)
def test_a_kernel_that_fails_costs_the_drafts_alone(name: str, module: str) -> None:

    def failing(launched: Launch) -> None:
        if launched.module == module:
            raise RuntimeError("the device is lost")
        launched.run()

    with drafts_on_device(SIZES, "cpu"), setting(LAUNCHER, failing):
        strategies = [create(name) for _ in range(2)]
        answers = [expected("llama", prompt, GREEDY, STOP) for prompt in PROMPTS]
        assert written(strategies, GREEDY, fails=True) == answers
