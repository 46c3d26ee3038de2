"""Replaying recorded outputs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks import replay_studies
from benchmarks.replay import Recording, TraceError, accepted_length, read_trace, replay, replay_command
from strategies import DraftTree, Feedback, NoDrafts, TrieStrategy
from strategies.draft import Int32Array


def recording(prompt: list[int], output: list[int]) -> Recording:
    return np.array(prompt, np.int32), np.array(output, np.int32)


class Foreteller:
    """Drafts a chain of the next whole numbers, and remembers what it was told."""

    top_k = 0

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.last = 0
        self.closed = 0

    def start(self, prompt: Int32Array) -> Foreteller:
        return self

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.of(np.arange(self.last + 1, self.last + 1 + budget))

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self.told.append(accepted.tolist())
        self.last = int(accepted[-1])

    def close(self) -> None:
        self.closed += 1


def write_trace(path: Path, rows: int) -> Path:
    text = "".join(
        json.dumps({"prompt_ids": [1, i], "output_ids": [*range(10, 40), i]}) + "\n" for i in range(2, 2 + rows)
    )
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_the_accepted_length_is_the_longest_path_that_the_output_follows() -> None:
    tree = DraftTree.of([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], [0.9, 0.8, 0.7, 0.6, 0.5])
    for continuation, length in (([6, 8, 9, 1], 3), ([6, 8], 2), ([5, 7], 1), ([4], 0), ([], 0)):
        assert accepted_length(tree, np.array(continuation, np.int32)) == length


def test_a_replay_counts_steps_as_the_engine_would() -> None:
    """The first token is the prefill's; a step writes what was accepted and one token more; the end cuts it off."""
    strategy = Foreteller()
    result = replay(strategy, [recording([1], [3, 4, 5, 6, 90, 91, 92])], budget=2)
    assert strategy.told == [[3], [4, 5, 6], [90], [91, 92]]
    assert (result.steps, result.tokens, result.accepted) == (3, 6, 4)
    assert result.acceptance_length == 2.0
    assert result.expected == 6.0
    assert strategy.closed == 1


def test_without_drafts_every_step_writes_one_token() -> None:
    result = replay(NoDrafts(), [recording([1, 2], [3, 4, 5]), recording([1], [9])], budget=8)
    assert (result.steps, result.tokens, result.acceptance_length) == (2, 2, 1.0)
    assert result.bytes_per_token == 0.0
    assert replay(NoDrafts(), [], budget=8).acceptance_length == 1.0


def test_memory_grows_over_the_recordings() -> None:
    output = list(range(100, 150))
    strategy = TrieStrategy()
    once = replay(strategy, [recording([1, 2], output)], budget=16)
    again = replay(strategy, [recording([1, 3], output)], budget=16)
    assert once.acceptance_length == 1.0
    assert again.acceptance_length > 8.0
    assert strategy.tokens == 100


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_traces_are_read_up_to_the_limit(tmp_path: Path, name: str) -> None:
    path = write_trace(tmp_path / name, rows=5)
    assert len(list(read_trace(path))) == 5
    prompt, output = list(read_trace(path, limit=2))[1]
    assert prompt.tolist() == [1, 3]
    assert output.dtype == np.int32


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not a recording"),
        ('{"prompt_ids": [1]}', "output_ids"),
        ('{"prompt_ids": [1], "output_ids": []}', "output_ids must be a list"),
        ('{"prompt_ids": [-1], "output_ids": [1]}', "prompt_ids must be a list"),
        ('{"prompt_ids": ["a"], "output_ids": [1]}', "not a recording"),
        ("[1, 2]", "not a recording"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=message) as caught:
        list(read_trace(path))
    assert "bad.jsonl" in str(caught.value)


def test_a_file_that_is_not_there_or_no_gzip_is_a_trace_error(tmp_path: Path) -> None:
    (tmp_path / "no.gz").write_text("plain")
    for path in (tmp_path / "absent.jsonl", tmp_path / "no.gz"):
        with pytest.raises(TraceError, match=path.name):
            list(read_trace(path))


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
        "trace", "strategy", "budget", "acceptance_length", "draft_us", "learn_us_per_token", "bytes_per_token"
    }  # fmt: skip
    assert rows[1]["acceptance_length"] > rows[0]["acceptance_length"] > 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("absent.jsonl",), "absent.jsonl"),
        (("--strategy", "tire", "TRACE"), "tire"),
        (("--learn", "all", "TRACE"), "all"),
        (("--budget", "0", "TRACE"), "--budget"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    trace = write_trace(tmp_path / "mine.jsonl", rows=1)
    code, output = run(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert code == 2
    assert message in output


def test_the_studies_write_grids_and_capacity_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_studies, "DECODING_LENGTHS", (2, 8))
    monkeypatch.setattr(replay_studies, "BRANCH_LENGTHS", (1, 8))
    monkeypatch.setattr(replay_studies, "CAPACITIES", (64, 4096))
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
