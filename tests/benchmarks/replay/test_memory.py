"""`draftwood bench memory`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.replay.memory import row_of, synthetic
from draftwood_model_runner.errors import DraftwoodError
from tests.benchmarks.replay.traces import write_trace


def test_made_up_text_is_the_same_in_every_run_and_has_phrases() -> None:
    first, again = synthetic(40), synthetic(40)
    assert all(
        np.array_equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    texts = [tuple(output.tolist()) for _, output in first]
    triples = [text[at : at + 3] for text in texts for at in range(len(text) - 2)]
    assert len(set(triples)) < 0.8 * len(triples)


def test_the_memory_holds_what_was_asked_for_of_outputs_first() -> None:
    row = row_of("trie", 5000, 8, [synthetic(40)], measured=2)
    assert (row["tokens"], row["strategy"], row["budget"]) == (5000, "trie", 8)
    assert row["draft_us"] > 0
    assert row["learn_us_per_token"] > 0
    assert 4 < row["bytes_per_token"] < 200
    prompts = [(np.full(500, 7, np.int32), np.arange(k, k + 400, dtype=np.int32)) for k in range(5)]
    assert row_of("trie", 1500, 8, [prompts], measured=1)["tokens"] == 1500


def test_what_cannot_be_measured_is_refused() -> None:
    for name, tokens, message in (
        ("trie", 10**6, "fill a memory with"),
        ("recycling", 1000, "keeps no memory"),
        ("tire", 1000, "tire"),
    ):
        with pytest.raises(DraftwoodError, match=message):
            row_of(name, tokens, 8, [synthetic(10)], measured=2)


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = write_trace(tmp_path / "mine.jsonl", rows=60), tmp_path / "figures.json"
    arguments = ["--tokens", "1000", "--tokens", "1500", "--measured", "3", "--json", str(figures)]
    assert bench(["memory", str(trace), *arguments]) in (0, None)
    assert "1,500" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["rows"]
    assert [row["tokens"] for row in rows] == [1000, 1500]
    assert set(rows[0]) == {"tokens", "strategy", "budget", "draft_us", "learn_us_per_token", "bytes_per_token"}
    assert bench(["memory", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl" in capsys.readouterr().err
