"""`draftwood bench replay`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.peers import process
from draftwood_benchmarks.peers.sglang_replay import _accepted
from tests.benchmarks.replay.traces import write_trace

PEERS = Path(process.__file__).parent
COUNTING = """
class Engine:
    version = ""

    def __init__(self, request):
        pass

    def replay(self, recordings, **options):
        return {"steps": 20, "tokens": 53, "drafted": 30, "draft_us": 9.0}

    def memory(self, recordings):
        return {"bytes_per_token": 3000.0}
"""


def run(*arguments: str) -> int:
    return bench(["replay", *arguments])


def test_the_command_prints_a_table_and_writes_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "mine.jsonl.gz", rows=4)
    figures = tmp_path / "figures.json"
    assert run(str(trace), "--budget", "4", "--budget", "16", "--limit", "3", "--json", str(figures)) == 0
    assert "mine" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["rows"]
    assert [(row["trace"], row["strategy"], row["budget"]) for row in rows] == [
        ("mine", "trie", 4),
        ("mine", "trie", 16),
    ]
    assert set(rows[0]) == {
        "trace", "known", "strategy", "budget", "acceptance_length", "draft_us", "learn_us_per_token",
        "bytes_per_token", "drafted_per_step",
    }  # fmt: skip
    assert rows[1]["acceptance_length"] > rows[0]["acceptance_length"] > 1.0


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_the_drafts_of_a_peer_are_replayed_beside_ours(
    peer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs of the peers run in their environments; here each counts nothing."""
    (tmp_path / "counting.py").write_text(COUNTING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        process, "command_of", lambda *names: [sys.executable, str(PEERS / "serve_peer.py"), "counting"]
    )
    trace, figures = write_trace(tmp_path / "mine.jsonl", rows=4), tmp_path / "figures.json"
    arguments = ["--budget", "16", "--json", str(figures), "--peer", peer]
    assert run(str(trace), *arguments, *(["--chains", "3", "--cut", "0.05"] if peer == "vllm" else [])) == 0
    rows = json.loads(figures.read_text())["rows"]
    found = [(row["strategy"], row["known"], row["budget"]) for row in rows]
    if peer == "vllm":
        assert found == [("trie", "nothing", 16), ("suffix", "nothing", 3)]
        assert 0.0 < rows[0]["drafted_per_step"] <= 3.0
    else:
        assert found == [(name, known, 16) for known in ("nothing", "half") for name in ("trie", "sglang")]
        assert [row["bytes_per_token"] for row in rows[1::2]] == [3000.0, 3000.0]
    assert 1.0 < rows[0]["acceptance_length"] <= (4.0 if peer == "vllm" else 16.0)
    assert rows[1]["acceptance_length"] == 2.65


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("absent.jsonl",), 2, "absent.jsonl"),
        (("--strategy", "tire", "TRACE"), 2, "tire"),
        (("--learn", "all", "TRACE"), 2, "all"),
        (("--budget", "0", "TRACE"), 2, "--budget"),
        (("--chains", "0", "TRACE"), 2, "--chains"),
        (("--chains", "4", "--cut", "1.5", "TRACE"), 2, "--cut"),
        (("--peer", "vllm", "TRACE"), 2, "give --chains"),
        (("--peer", "sglang", "TRACE"), 1, "run `make peers`"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    tmp_path: Path,
    arguments: tuple[str, ...],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process, "ENVIRONMENTS", tmp_path)
    trace = write_trace(tmp_path / "mine.jsonl", rows=1)
    assert run(*(str(trace) if argument == "TRACE" else argument for argument in arguments)) == status
    assert message in capsys.readouterr().err


def test_the_longest_path_is_accepted() -> None:
    mask = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]])
    assert _accepted([9, 1, 2, 3, 4], mask, [3, 4, 5]) == 2
    assert _accepted([9, 1, 2, 3, 4], mask, [1, 2]) == 2
    assert _accepted([9, 1, 2, 3, 4], mask, [2, 1]) == 0
