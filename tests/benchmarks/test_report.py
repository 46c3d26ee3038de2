"""Reports of benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwood_benchmarks.harness import report as machine
from draftwood_benchmarks.harness.report import (
    OtherLoad,
    PictureOptions,
    command,
    percentile,
    run_facts,
    table,
    warning,
)
from draftwood_model_runner.errors import InvalidValueError


def test_percentiles_are_linear_between_ranks() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([0.0, 100.0], 99) == 99.0
    assert percentile([], 50) is None


def test_a_table_shows_rows_and_what_they_lack() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "speed": 1.256}, {"name": "b", "speed": None}, {"name": "c"}]
    made = table("speeds", rows, {"": "{name}", "tok/s": "{speed:.2f}"}, texts=1)
    assert [[*column.cells] for column in made.columns] == [["a", "b", "c"], ["1.26", "-", "-"]]
    assert [column.justify for column in made.columns] == ["left", "right"]


def test_rows_and_more_are_written_and_drawn(tmp_path: Path) -> None:
    output = PictureOptions(tmp_path / "figures.json", tmp_path / "figures.png")
    drawn: list[Any] = []

    def draw(axes: Any) -> None:
        axes.plot([1, 2], [3, 4])
        drawn.append(axes)

    output.draw(draw)
    output.report(table("", [], {}), [{"a": 1}], unit="ms")
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report == {"run": run_facts(), "rows": [{"a": 1}], "unit": "ms"}
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 1


def test_what_cannot_be_written_is_known_before_anything_is_measured() -> None:
    for name, path, message in (
        ("json_file", "/no/such/folder/a.json", "--json"),
        ("plot", "/no/such/folder/a.png", "--plot"),
        ("plot", "a.txt", ".png"),
    ):
        with pytest.raises(InvalidValueError, match=message):
            PictureOptions(**{name: Path(path)})


def test_a_run_is_named_by_its_command_without_its_output_files_and_by_the_commit() -> None:
    arguments = ["bench", "speed", "--json", "a.json", "--shape", "110m", "--plot=a.svg", "--prompts", "my file"]
    assert command(arguments) == "draftwood bench speed --shape 110m --prompts 'my file'"
    facts = run_facts()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert head.stdout.startswith(str(facts["commit"]).removesuffix("-dirty"))
    assert facts["cores"] >= 1


def test_the_share_is_of_cpu_time_that_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after, share in (
        ((100, 50, 20), (200, 100, 70), 0.0),
        ((100, 50, 20), (200, 120, 50), 0.4),
        ((100, 50, 20), (200, 50, 30), 0.0),
        ((100, 50, 20), (100, 50, 20), None),
    ):
        samples = iter([before, after])
        monkeypatch.setattr(machine, "_cpu_seconds", lambda samples=samples: next(samples))
        assert OtherLoad().share() == share


def test_what_this_process_works_is_no_other_load() -> None:
    """Nor is what its children work, those that have ended included."""
    work = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    before = machine._cpu_seconds()
    subprocess.run([sys.executable, "-c", work], check=True)
    total, _, ours = (now - then for now, then in zip(machine._cpu_seconds(), before, strict=True))
    assert 0.4 < ours <= total + 0.1


def test_a_busy_machine_is_named() -> None:
    assert warning(0.02) == ""
    assert "other processes took 31% of the CPU time" in warning(0.31)
    assert "unknown" in warning(None)
