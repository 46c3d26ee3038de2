"""`draftwood bench step`."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood_benchmarks.harness.report import BUSY
from draftwood_benchmarks.step import critical_length, rows_of
from draftwood_strategies.draft_engine.step_times import StepTimeCurve
from tests.benchmarks.conftest import ReportOf


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


def test_the_command_measures_writes_and_draws(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "step.svg"
    model = ("--shape", "320x7x5x768", "--vocabulary", "20000", "--dtype", "float32", "--threads", "1")
    arguments = ("--context", "1500", "--largest", "20", "--seconds", "0.5")
    report = report_of("step", *model, *arguments, "--plot", str(picture))
    rows = report["rows"]
    assert [row["tokens"] for row in rows] == [1, 2, 4, 8, 12, 16, 20]
    assert all(row.keys() == {"tokens", "ms", "ratio"} and row["ms"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1.0
    assert (report["vocabulary"], report["context"]) == (20000, 1500)
    assert "<svg" in picture.read_text()
    out = " ".join(capsys.readouterr().out.split())
    assert "Critical decoding length" in out
    assert ("BUSY MACHINE" in out) == (report["other_load"] >= BUSY)
