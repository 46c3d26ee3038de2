"""`draftwood bench abuse`, and its bars."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from draftwood_benchmarks.abuse.attack import Statuses
from draftwood_benchmarks.abuse.command import Row, _row
from draftwood_benchmarks.abuse.probes import Seen
from draftwood_benchmarks.commands import bench

FAIR = Row("fair", 5.0, 100.0, None, 0.0, "OK", {"OK": 3})
CALLS = Statuses(Counter({"INVALID_ARGUMENT": 2, "OK": 5}))


def test_a_row_within_all_bars() -> None:
    row = _row("x", Seen([0.01] * 10, [0.11] * 10), CALLS, 12.0, FAIR)
    assert row.missed == ()
    assert row.ttft_vs_fair == pytest.approx(1.1)
    assert row.status == "OK, INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("seen", "growth", "calls", "words"),
    [
        (Seen([0.06] * 10, [0.1]), 0.0, CALLS, "health"),
        (Seen([], [0.1]), 0.0, CALLS, "health"),
        (Seen([0.01], [0.13] * 10), 0.0, CALLS, "1.30 times"),
        (Seen([0.01], [0.1]), 300.0, CALLS, "300 MiB"),
        (Seen([0.01], [0.1], ["UnavailableError: full"]), 0.0, CALLS, "full"),
        (Seen([0.01], [0.1]), 0.0, replace(CALLS, untyped="INTERNAL: x"), "INTERNAL"),
    ],
)
def test_each_bar_can_be_missed(seen: Seen, growth: float, calls: Statuses, words: str) -> None:
    assert [words in line for line in _row("x", seen, calls, growth, FAIR).missed] == [True]


@pytest.mark.slow  # tests/security runs all attacks
@pytest.mark.timeout(120)
def test_an_attack_on_the_gateway(tmp_path: Path) -> None:
    report = tmp_path / "abuse.json"
    bench(["abuse", "--attack", "http-large-header", "--seconds", "1", "--threads", "1", "--json", str(report)])
    rows = json.loads(report.read_text())["rows"]
    assert [row["attack"] for row in rows] == ["http-fair", "http-large-header"]
    assert {*rows[1]["calls"]} <= {"431", "CLOSED"}
    assert rows[1]["neighbour_ttft_p99_ms"] > 0
    assert rows[1]["ttft_vs_fair"] > 0


@pytest.mark.slow  # tests/security runs all attacks
@pytest.mark.timeout(120)
def test_one_attack_on_a_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "abuse.json", tmp_path / "abuse.png"
    arguments = ["--attack", "long-role", "--seconds", "1", "--threads", "1"]
    bench(["abuse", *arguments, "--json", str(report), "--plot", str(picture)])  # a slow machine may miss a bar
    rows = json.loads(report.read_text())["rows"]
    assert [row["attack"] for row in rows] == ["fair", "long-role"]
    assert rows[1]["status"] == "INVALID_ARGUMENT"
    assert rows[1]["health_p99_ms"] > 0
    assert rows[1]["neighbour_ttft_p99_ms"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "long-role" in capsys.readouterr().out


def test_an_unknown_attack_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["abuse", "--attack", "nothing"]) == 2
    assert "many-messages" in capsys.readouterr().err
