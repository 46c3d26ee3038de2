from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.runners.base import Predictions, StepBatch
from draftwood_model_runner.step_measuring import LevelShares, known_step_times, measure_steps
from draftwood_strategies.draft_engine.step_times import MeasuredStepTimes, StepTimeCurve


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
        times = measure_steps(runner, 4096, largest=49).times()
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
    times = measure_steps(runner, max_context, largest=49).times()
    assert times.at(65, 1) == pytest.approx(expected, rel=0.01)
    assert times.at(49, 1) == pytest.approx(0.059)
    assert np.diff(times.between(1, 64, 1)) == pytest.approx(0.001)


class _Starts:
    """Starts of an engine, whose step times are kept in a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
        self._monkeypatch = monkeypatch
        self.file = file

    def start(self, slower: float = 1.0, machine: str = "a CPU", largest: int = 49) -> int:
        """Expects the times of steps that take some times as long as usual; returns how many it ran to know them."""
        steps = _TimedRunner(self._monkeypatch, lambda tokens: slower * (0.01 + 0.001 * tokens))
        runner: Any = steps
        times = known_step_times(runner, 4096, largest, self.file, machine)
        assert [times.at(tokens, 1) for tokens in (1, 16, 49)] == pytest.approx(
            [slower * seconds for seconds in (0.011, 0.026, 0.059)]
        )
        return steps.count


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _Starts:
    return _Starts(monkeypatch, tmp_path / "step-times.json")


def test_what_a_start_measured_is_known_to_the_next(starts: _Starts) -> None:
    """A busy one scales what is known, and keeps it."""
    assert starts.start() > 40
    assert starts.start() < 40
    assert starts.start(slower=1.7) < 40
    assert starts.start() < 40
    assert [path.name for path in starts.file.parent.iterdir()] == ["step-times.json"]


def test_what_a_busy_start_measured_is_measured_again(starts: _Starts) -> None:
    starts.start(slower=1.7)
    assert starts.start() > 40
    assert starts.start() < 40


@pytest.mark.parametrize("other", [{"machine": "another CPU"}, {"largest": 65}])
def test_step_times_of_another_machine_or_of_narrower_steps_are_not_used(starts: _Starts, other: Any) -> None:
    starts.start()
    assert starts.start(**other) > 40


@pytest.mark.parametrize(
    "content",
    ["", "{}", '["a CPU, 49 tokens", {"seconds": {}}]', None],
    ids=["empty", "an object", "no sizes", "no times"],
)
def test_a_damaged_file_is_written_anew(starts: _Starts, content: str | None, caplog: pytest.LogCaptureFixture) -> None:
    starts.start()
    kept = starts.file.read_text(encoding="utf-8")
    starts.file.write_text(kept.replace("0.01", "-0.01") if content is None else content, encoding="utf-8")
    starts.start()
    assert "step times are measured again" in caplog.text
    assert starts.file.read_text(encoding="utf-8") == kept


def test_without_room_for_the_file_the_engine_starts(starts: _Starts, caplog: pytest.LogCaptureFixture) -> None:
    starts.file = starts.file.parent / "no folder" / "step-times.json"
    with caplog.at_level(logging.WARNING):
        starts.start()
    assert "step times are not kept" in caplog.text


def test_what_levels_cost_is_measured_by_rows_and_corrected_by_steps_of_as_many() -> None:
    """A node more of each of 8 sequences takes 4 ms of 24, of one 0.5 of 20.5."""
    times = MeasuredStepTimes(StepTimeCurve({1: 0.0205, 2: 0.021, 8: 0.024, 24: 0.032}))
    shares = LevelShares.measured(lambda rows: 0.002 + 0.00025 * rows, times, most_rows=8)
    assert shares.at() == shares.at(1) == pytest.approx((0.00225 + 0.0005) / 0.0205)
    assert shares.at(8) == pytest.approx((0.004 + 0.004) / 0.024)
    assert shares.at(1) < shares.at(6) < shares.at(8)
    alone, shares.rows = shares.at(1), 8
    shares.observe_level(0.02)  # no step of as many rows is known
    assert shares.at() == pytest.approx(0.008 / 0.024)
    for _ in range(100):
        shares.observe_step(8, 0.04)
        shares.observe_level(0.02)
    assert shares.at() == pytest.approx(0.5 + 0.004 / 0.024, rel=1e-3)
    assert shares.at(1) == alone
    shares.observe_level(10.0)  # a stall of the machine
    assert shares.at() < 0.6 + 0.004 / 0.024


def test_without_step_times_what_levels_cost_is_known_from_the_first_ones_on() -> None:
    shares = LevelShares()
    assert shares.at() == 0.0
    for _ in range(3):
        shares.observe_step(1, 0.04)
    shares.observe_level(0.01)
    assert shares.at(1) == shares.at(16) == 0.25
