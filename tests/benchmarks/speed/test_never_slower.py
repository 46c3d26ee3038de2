"""What drafting costs where it can bring nothing, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

from draftwood_benchmarks.commands import bench


def test_all_cases_are_measured_beside_drafting_off(tmp_path: Path) -> None:
    figures = tmp_path / "never-slower.json"
    arguments = ["--streams", "4", "--answer-tokens", "24", "--prompt-tokens", "64", "--rounds", "2"]
    assert bench(["never-slower", *arguments, "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    cases = [(row["case"], row["streams"]) for row in rows]
    assert cases == [("random text", 1), ("one-token answers", 1), ("random text", 4)]
    for row in rows:  # on a busy machine a ratio of two short windows says little
        assert row["off_tokens_per_s"] > 0
        assert 0.2 < row["vs_off"] < 5.0
    assert rows[1]["drafted"] == 0
