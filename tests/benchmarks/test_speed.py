"""`draftwood bench speed`, `step` and `never-slower` on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.harness.report import BUSY
from draftwood_strategies import DraftTree, Feedback, registry
from draftwood_strategies.arrays import Int32Array
from tests.benchmarks.conftest import ECHO, ReportOf, UsePeer
from tests.benchmarks.test_rows import KEYS

SPEED = ("speed", "--threads", "1", "--strategy")


def test_all_contenders_answer_the_same_prompts_greedily_and_by_sampling(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["where is my order 5521?", "how do I cancel order 1?", "where is my order 5521?", "x " * 3000]
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in texts))
    options = ("--limit", "2", "--warm", "1", "--max-tokens", "60", "--rounds", "1", "--sampled")
    rows = report_of(*SPEED, "trie", "--prompts", str(prompts), *options)["rows"]
    assert all(set(row) == {*KEYS, "prompts"} and row["prompts"] == "prompts" for row in rows)
    ours = [("none", False, False), ("trie", False, False), ("trie", True, False), ("trie", True, True)]
    assert [(row["engine"], row["strategy"], row["warm"], row["again"], row["sampled"]) for row in rows] == [
        ("transformers", "none", False, False, False),
        ("transformers", "prompt-lookup", False, False, False),
        *(("draftwood", *case, sampled) for sampled in (False, True) for case in ours),
    ]
    assert all(row["identical"] for row in rows if row["strategy"] != "prompt-lookup")
    assert all(row["acceptance_length"] >= 1.0 and row["tokens_per_s"] > 0 for row in rows)
    assert [rows[i]["acceptance_length"] for i in (0, 2)] == [1.0, 1.0]
    cold, warm, again = (row["acceptance_length"] for row in rows[3:6])
    assert warm > 1.2 * cold, "it knows the answer to the first prompt"
    assert again > 2 * cold, "it knows the answers to both"
    out = capsys.readouterr().out
    assert "1 prompts are left out" in out
    assert "HF prompt lookup" in out


def test_a_peer_answers_the_same_prompts(report_of: ReportOf, use_peer: UsePeer) -> None:
    use_peer(ECHO)
    options = ("--rounds", "2", "--limit", "2", "--warm", "0", "--max-tokens", "8", "--budget", "4")
    found = report_of(*SPEED, "trie", "--peer", "openvino-genai", *options)
    peer = found["rows"][2]
    assert (peer["engine"], peer["strategy"], peer["vs_peer"], peer["identical_share"]) == (
        "openvino-genai", "none", 1.0, 0.0,
    )  # fmt: skip
    assert all(row["vs_peer"] > 0 and row["identical"] for row in found["rows"][3:])
    assert (found["rounds"], found["budget"]) == (2, 4)
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
    assert bench([*SPEED, "broken", "--limit", "1", "--warm", "0", "--max-tokens", "8"]) == 1
    assert "strategy broken was switched off: propose raised RuntimeError: no luck today" in capsys.readouterr().err


def test_random_text_and_short_answers_are_measured_beside_drafting_off(report_of: ReportOf) -> None:
    arguments = ("--streams", "4", "--answer-tokens", "24", "--prompt-tokens", "64", "--rounds", "2")
    rows = report_of("never-slower", *arguments)["rows"]
    cases = [(row["case"], row["streams"]) for row in rows]
    assert cases == [("random text", 1), ("one-token answers", 1), ("random text", 4)]
    for row in rows:  # on a busy machine a ratio of two short windows says little
        assert row["off_tokens_per_s"] > 0
        assert 0.2 < row["vs_off"] < 5.0
    assert rows[1]["drafted"] == 0


def test_steps_are_measured_by_their_tokens(report_of: ReportOf, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of("step", "--threads", "1", "--context", "500", "--largest", "20", "--seconds", "0.5")
    rows = report["rows"]
    assert [row["tokens"] for row in rows] == [1, 2, 4, 8, 12, 16, 20]
    assert all(row.keys() == {"tokens", "ms", "ratio"} and row["ms"] > 0 for row in rows)
    assert report["context"] == 500
    out = " ".join(capsys.readouterr().out.split())
    assert "Critical decoding length" in out
    assert ("BUSY MACHINE" in out) == (report["busy"] >= BUSY)
