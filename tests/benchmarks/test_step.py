"""`draftwood bench step`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.harness.machine import BUSY
from draftwood_benchmarks.step import critical_length, rows_of
from draftwood_strategies.budgeting.step_time import StepTimeCurve


@pytest.mark.parametrize(
    ("milliseconds", "critical"),
    [
        ({1: 10.0, 8: 10.0, 16: 18.0}, 11),  # one millisecond a token above 8: 12.0 at 10 is not above
        ({1: 10.0, 2: 20.0}, 2),
        ({1: 10.0, 64: 11.9}, None),
    ],
)
def test_the_critical_length_is_the_first_that_takes_a_fifth_longer(
    milliseconds: dict[int, float], critical: int | None
) -> None:
    assert critical_length(StepTimeCurve({n: ms / 1024 for n, ms in milliseconds.items()})) == critical


def test_rows_are_in_milliseconds_and_against_one_token() -> None:
    assert rows_of(StepTimeCurve({1: 0.010, 4: 0.015})) == [
        {"tokens": 1, "ms": 10.0, "ratio": 1.0},
        {"tokens": 4, "ms": 15.0, "ratio": 1.5},
    ]


def test_the_command_measures_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "step.json", tmp_path / "step.svg"
    arguments = ["--shape", "320x7x5x768", "--dtype", "float32", "--largest", "20", "--seconds", "0.5", "--batch", "3"]
    assert bench(["step", *arguments, "--threads", "1", "--json", str(report), "--plot", str(picture)]) == 0
    found = json.loads(report.read_text())
    assert [row["tokens"] for row in found["rows"]] == [1, 2, 4, 8, 12, 16, 20]
    assert all(set(row) == {"tokens", "ms", "ratio"} and row["ms"] > 0 for row in found["rows"])
    assert found["rows"][0]["ratio"] == 1.0
    assert found["batch"]["sequences"] == 3
    assert found["batch"]["ratio"] == pytest.approx(found["batch"]["ms"] / found["batch"]["ms_of_one"], rel=0.01)
    assert "<svg" in picture.read_text()
    out = " ".join(capsys.readouterr().out.split())
    assert "9M parameters, float32, cpu" in out
    assert "Critical decoding length" in out
    assert "fastest of up to 10 rounds, then smoothed" in out
    assert found["other_load"] is None or ("BUSY MACHINE" in out) == (found["other_load"] >= BUSY)


def test_a_real_vocabulary_and_context_with_sampled_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "step.json"
    arguments = ["--vocabulary", "20000", "--context", "1500", "--largest", "4", "--seconds", "0.5", "--batch", "2"]
    assert bench(["step", *arguments, "--sampled", "--threads", "1", "--json", str(report)]) == 0
    found = json.loads(report.read_text())
    assert (found["vocabulary"], found["context"]) == (20000, 1500)
    batch = found["batch"]
    assert batch["sampled_vs_greedy"] == pytest.approx(batch["ms"] / batch["sampled_ms"], rel=0.01)
    assert batch["sampled_vs_greedy_of_one"] == pytest.approx(batch["ms_of_one"] / batch["sampled_ms_of_one"], rel=0.01)
    assert "sampled against greedy steps" in " ".join(capsys.readouterr().out.split())
