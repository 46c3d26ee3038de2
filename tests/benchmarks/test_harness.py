"""What the benchmarks share: prompts and reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftwood_benchmarks.harness import report as machine
from draftwood_benchmarks.harness.prompts import read_prompts, split
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OtherLoad,
    OutputOptions,
    command,
    run_facts,
    table,
    warning,
)


def test_the_bundled_questions_begin_with_the_measured_ones() -> None:
    prompts = read_prompts(None)
    assert len(prompts) == 140
    assert prompts[0].startswith("hi, i ordered the wrong size")


def test_files_hold_json_lines_of_several_kinds_or_plain_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text(
        '{"instruction": "a", "response": "x"}\n{"text": "b"}\n\n{"prompt": "c"}\n{"turns": ["d", "e"]}\n'
        '{"question": "f", "answer": "g"}\n  plain text \n',
        encoding="utf-8",
    )
    assert read_prompts(path) == ["a", "b", "c", "d", "f", "plain text"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no lines"),
        ('hello\n{"instruction"', "line 2: not JSON"),
        ('{"answer": "x"}', "line 1: no text under any of instruction, text"),
        ('{"turns": []}', "line 1: no text"),
    ],
)
def test_a_file_without_prompts_says_where(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_text(content)
    with pytest.raises(BenchmarkError, match=message):
        read_prompts(path)


def test_the_measured_prompts_and_those_to_warm_up_with_are_apart() -> None:
    prompts = [np.full(4, number, np.int32) for number in range(10)]
    measured, others = split(prompts, 3, 5)
    assert [prompt[0] for prompt in measured] == [0, 1, 2]
    assert [prompt[0] for prompt in others] == [3, 4, 5, 6, 7]
    with pytest.raises(BenchmarkError, match="only 10"):
        split(prompts, 3, 8)


def test_a_table_shows_rows_and_what_they_lack() -> None:
    rows: list[dict[str, Any]] = [{"name": "a", "speed": 1.256}, {"name": "b", "speed": None}, {"name": "c"}]
    made = table("speeds", rows, {"": "{name}", "tok/s": "{speed:.2f}"}, texts=1)
    assert [[*column.cells] for column in made.columns] == [["a", "b", "c"], ["1.26", "-", "-"]]
    assert [column.justify for column in made.columns] == ["left", "right"]


def test_rows_and_more_are_written(tmp_path: Path) -> None:
    OutputOptions(tmp_path / "figures.json").report(table("", [], {}), [{"a": 1}], unit="ms")
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report == {"run": run_facts(), "rows": [{"a": 1}], "unit": "ms"}


def test_a_run_is_named_by_its_command_without_its_output_file_and_by_the_commit() -> None:
    arguments = ["bench", "speed", "--json", "a.json", "--limit", "2", "--prompts", "my file"]
    assert command(arguments) == command([*arguments[:2], "--json=a.json", *arguments[4:]])
    assert command(arguments) == "draftwood bench speed --limit 2 --prompts 'my file'"
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
