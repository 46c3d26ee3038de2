"""`draftwood bench replay`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from draftwood_benchmarks.peers.process import ENVIRONMENTS
from draftwood_benchmarks.replay import studies
from draftwood_benchmarks.replay.command import replay_command
from tests.benchmarks.replay.traces import write_trace

REPOSITORY = Path(__file__).resolve().parents[3]


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(replay_command)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    return result.exit_code, result.output


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "mine.jsonl.gz", rows=4)
    figures = tmp_path / "figures.json"
    code, output = run(str(trace), "--budget", "4", "--budget", "16", "--limit", "3", "--json", str(figures))
    assert code == 0, output
    assert "mine" in output
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["trace"], row["strategy"], row["budget"]) for row in rows] == [
        ("mine", "trie", 4),
        ("mine", "trie", 16),
    ]
    assert set(rows[0]) == {
        "trace", "strategy", "budget", "acceptance_length", "draft_us", "learn_us_per_token", "bytes_per_token",
        "drafted_per_step",
    }  # fmt: skip
    assert rows[1]["acceptance_length"] > rows[0]["acceptance_length"] > 1.0


def test_chains_are_replayed_beside_those_of_suffix_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    trace, figures = write_trace(tmp_path / "mine.jsonl", rows=4), tmp_path / "figures.json"
    code, output = run(str(trace), "--budget", "16", "--chains", "3", "--cut", "0.05", "--json", str(figures))
    assert code == 0, output
    chains, *suffix = json.loads(figures.read_text())["rows"]
    assert chains["strategy"] == "trie"
    assert 1.0 < chains["acceptance_length"] <= 4.0
    assert 0.0 < chains["drafted_per_step"] <= 3.0
    if (ENVIRONMENTS / "vllm").exists():
        assert [row["strategy"] for row in suffix] == ["suffix"]
        assert 1.0 < suffix[0]["acceptance_length"] <= 4.0
        assert 0.0 < suffix[0]["drafted_per_step"] <= 3.0
    else:
        assert suffix == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent.jsonl",), "absent.jsonl"),
        (("--strategy", "tire", "TRACE"), "tire"),
        (("--learn", "all", "TRACE"), "all"),
        (("--budget", "0", "TRACE"), "--budget"),
        (("--chains", "0", "TRACE"), "--chains"),
        (("--chains", "4", "--cut", "1.5", "TRACE"), "--cut"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    trace = write_trace(tmp_path / "mine.jsonl", rows=1)
    code, output = run(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert code == 2
    assert message in output


def test_the_studies_write_grids_and_capacity_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "DECODING_LENGTHS", (2, 8))
    monkeypatch.setattr(studies, "BRANCH_LENGTHS", (1, 8))
    monkeypatch.setattr(studies, "CAPACITIES", (64, 4096))
    trace = write_trace(tmp_path / "mine.jsonl", rows=4)
    figures, picture = tmp_path / "studies.json", tmp_path / "studies.png"
    pytest.importorskip("matplotlib")
    code, output = run(str(trace), "--grid", "--json", str(figures), "--plot", str(picture))
    assert code == 0, output
    study = json.loads(figures.read_text())
    grid = study["grids"]["mine"]
    assert grid[1][1] > grid[1][0]
    assert grid[1][1] > grid[0][1]
    assert len(study["capacity_curves"]["mine"]) == 2
    assert picture.read_bytes().startswith(b"\x89PNG")
