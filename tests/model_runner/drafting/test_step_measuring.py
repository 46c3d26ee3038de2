from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.drafting.step_measuring import measure_step_times
from draftwood_model_runner.runners.base import Predictions, StepBatch


class _TimedRunner:
    """Its steps take what `seconds` says of their tokens, on a clock of its own."""

    page_size, pages = 16, 1024

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        self._now = 0.0
        self.count = 0
        monkeypatch.setattr(time, "perf_counter", lambda: self._now)

    def step(self, batch: StepBatch, top_k: int) -> Predictions:
        self._now += self._seconds(batch.size)
        self.count += 1
        return Predictions(np.zeros((batch.size, 1), np.float32), np.zeros(batch.size, np.int32), None)


def test_a_model_with_long_steps_is_measured_by_few_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for scale in (0.001, 0.2):
        steps = _TimedRunner(monkeypatch, lambda tokens, scale=scale: scale * (1 + 0.01 * tokens))  # type: ignore[misc]
        runner: Any = steps
        times = measure_step_times(runner, 4096, largest=49)
        assert times.at(16, 1) == pytest.approx(scale * 1.16)
        counts.append(steps.count)
    assert counts[1] < 50 < counts[0]


@pytest.mark.parametrize(
    ("max_context", "padded", "expected"),
    [(512, True, 0.138), (512, False, 0.075), (128, True, 0.075)],
    ids=["blocks", "no blocks", "a context that no second block fits"],
)
def test_a_second_block_of_rows_is_found_to_cost_as_much_as_a_full_one(
    monkeypatch: pytest.MonkeyPatch, max_context: int, padded: bool, expected: float
) -> None:
    def seconds(tokens: int) -> float:
        return 0.01 + 0.001 * (64 * -(-tokens // 64) if padded and tokens > 64 else tokens)

    runner: Any = _TimedRunner(monkeypatch, seconds)
    times = measure_step_times(runner, max_context, largest=49)
    assert times.at(65, 1) == pytest.approx(expected, rel=0.01)
    assert times.at(49, 1) == pytest.approx(0.059)
    assert np.diff(times.between(1, 64, 1)) == pytest.approx(0.001)
