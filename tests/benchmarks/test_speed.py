"""`draftwood bench speed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood_benchmarks.commands import bench
from draftwood_strategies import DraftTree, Feedback, registry
from draftwood_strategies.arrays import Int32Array
from tests.benchmarks.conftest import ECHO, ReportOf, UsePeer
from tests.benchmarks.test_rows import KEYS


@pytest.fixture
def run(report_of: ReportOf) -> ReportOf:
    def speed(*arguments: str) -> dict[str, Any]:
        report = report_of("speed", "--threads", "1", "--rounds", "1", *arguments)
        assert all(set(row) == {*KEYS, "prompts"} for row in report["rows"])
        return report

    return speed


def test_all_contenders_answer_the_same_prompts(
    tmp_path: Path, run: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["where is my order 5521?", "how do I cancel order 1?", "where is my order 5521?", "x " * 3000]
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in texts))
    found = run(
        "--prompts", str(prompts), "--limit", "2", "--warm", "1", "--max-tokens", "60",
        "--strategy", "trie", "--shape", "320x7x5x768", "--dtype", "float32",
    )  # fmt: skip
    rows = found["rows"]
    assert [(row["engine"], row["strategy"], row["warm"], row["again"]) for row in rows] == [
        ("transformers", "none", False, False),
        ("transformers", "prompt-lookup", False, False),
        ("draftwood", "none", False, False),
        ("draftwood", "trie", False, False),
        ("draftwood", "trie", True, False),
        ("draftwood", "trie", True, True),
    ]
    assert all(row["identical"] for row in rows if row["strategy"] != "prompt-lookup")
    assert [rows[i]["acceptance_length"] for i in (0, 2)] == [1.0, 1.0]
    assert all(row["acceptance_length"] >= 1.0 and row["tokens_per_s"] > 0 for row in rows)
    assert rows[4]["acceptance_length"] > 1.2 * rows[3]["acceptance_length"]  # it knows the answer to the first prompt
    assert rows[5]["acceptance_length"] > 2 * rows[3]["acceptance_length"]  # it knows the answers to both
    out = capsys.readouterr().out
    assert "1 prompts are left out" in out
    assert "HF prompt lookup" in out


def test_random_text_is_sampled_and_the_same_with_and_without_drafts(run: ReportOf) -> None:
    rows = run("--text", "random", "--limit", "2", "--max-tokens", "20", "--strategy", "trie")["rows"]
    assert [(row["engine"], row["strategy"]) for row in rows] == [("draftwood", "none"), ("draftwood", "trie")]
    assert all(row["identical"] and row["vs_transformers"] is None for row in rows)


def test_a_real_vocabulary_greedy_and_sampled(run: ReportOf) -> None:
    model = ("--shape", "320x7x5x768", "--vocabulary", "20000", "--dtype", "float32")
    options = ("--sampled", "--strategy", "hybrid", "--limit", "1", "--warm", "2", "--max-tokens", "16")
    found = run(*model, *options)
    ours = [row for row in found["rows"] if row["engine"] == "draftwood"]
    cases = [("none", False, False), ("hybrid", False, False), ("hybrid", True, False), ("hybrid", True, True)]
    assert [(row["strategy"], row["warm"], row["again"], row["sampled"]) for row in ours] == [
        (*case, sampled) for sampled in (False, True) for case in cases
    ]
    assert all(row["identical"] for row in ours)
    assert [row["sampled_vs_greedy"] is not None for row in ours] == [False] * 4 + [True] * 4
    assert found["vocabulary"] == 20000


def test_a_peer_answers_the_same_prompts(run: ReportOf, use_peer: UsePeer) -> None:
    use_peer(ECHO)
    found = run(
        "--peer", "openvino-genai", "--rounds", "2", "--limit", "2", "--warm", "0", "--max-tokens", "8",
        "--strategy", "trie",
    )  # fmt: skip
    peer = found["rows"][2]
    assert (peer["engine"], peer["strategy"], peer["vs_peer"], peer["identical_share"]) == (
        "openvino-genai", "none", 1.0, 0.0,
    )  # fmt: skip
    assert all(row["vs_peer"] > 0 and row["identical"] for row in found["rows"][3:])
    assert found["rounds"] == 2
    assert found["busy"] is None or 0.0 <= found["busy"] <= 1.0


def test_a_strategy_that_breaks_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        top_k = 0

        def start(self, prompt: Int32Array) -> Broken:
            return self

        def propose(self, budget: int) -> DraftTree:
            if budget == 48:  # that of the benchmark, not of the warm-up
                raise RuntimeError("no luck today")
            return DraftTree.of([1])

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(registry._factories, "broken", Broken)
    status = bench(["speed", "--strategy", "broken", "--limit", "1", "--warm", "0", "--max-tokens", "8"])
    assert status == 1
    assert "strategy 'broken' was switched off: propose raised RuntimeError: no luck today" in capsys.readouterr().err


def test_all_cases_are_measured_beside_drafting_off(report_of: ReportOf) -> None:
    arguments = ("--streams", "4", "--answer-tokens", "24", "--prompt-tokens", "64", "--rounds", "2")
    rows = report_of("never-slower", *arguments)["rows"]
    cases = [(row["case"], row["streams"]) for row in rows]
    assert cases == [("random text", 1), ("one-token answers", 1), ("random text", 4)]
    for row in rows:  # on a busy machine a ratio of two short windows says little
        assert row["off_tokens_per_s"] > 0
        assert 0.2 < row["vs_off"] < 5.0
    assert rows[1]["drafted"] == 0
