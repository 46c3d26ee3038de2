"""`draftwood bench speed`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.commands import bench
from benchmarks.contenders import Answer, Tally
from benchmarks.speed import label, rows_of
from strategies import DraftTree, Feedback, registry
from strategies.draft import Int32Array

KEYS = {
    "engine", "strategy", "warm", "tokens_per_s", "acceptance_length", "nodes_per_step", "vs_transformers", "vs_plain",
    "identical", "identical_share", "identical_to_plain",
}  # fmt: skip


class Written:
    """A contender that is only a name."""

    def __init__(self, engine: str, strategy: str, warm: bool = False) -> None:
        self.engine, self.strategy, self.warm = engine, strategy, warm

    def answer(self, prompt: Int32Array, index: int) -> Answer:
        raise NotImplementedError


def tally(contender: Written, *answers: Answer) -> Tally:
    return Tally(contender, list(answers))


def test_rows_compare_totals_and_answers() -> None:
    reference = tally(Written("transformers", "none"), Answer([1, 2], 2.0, 2, 0), Answer([3, 4], 2.0, 2, 0))
    plain = tally(Written("draftwood", "none"), Answer([1, 2], 1.0, 2, 0), Answer([3, 4], 1.0, 2, 0))
    warm = tally(Written("draftwood", "trie", True), Answer([1, 2], 0.25, 1, 6), Answer([3, 9], 0.25, 1, 4))
    rows = rows_of([reference, plain, warm])
    assert all(set(row) == KEYS for row in rows)
    assert [row["tokens_per_s"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_transformers"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_plain"] for row in rows] == [0.5, 1.0, 4.0]
    assert [row["identical"] for row in rows] == [True, True, False]
    assert (rows[2]["identical_share"], rows[2]["identical_to_plain"]) == (0.5, 0.5)
    assert (rows[2]["acceptance_length"], rows[2]["nodes_per_step"]) == (2.0, 5.0)
    assert [label(row) for row in rows] == ["HF generate", "drafting off", "trie, warm"]


def test_without_transformers_drafting_off_is_the_judge() -> None:
    plain = tally(Written("draftwood", "none"), Answer([1, 2], 1.0, 2, 0))
    cold = tally(Written("draftwood", "trie"), Answer([1, 3], 1.0, 2, 0))
    rows = rows_of([plain, cold])
    assert [row["vs_transformers"] for row in rows] == [None, None]
    assert [row["identical"] for row in rows] == [True, False]


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    report = tmp_path / "speed.json"
    assert bench(["speed", "--threads", "1", "--json", str(report), *arguments]) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert all(set(row) == KEYS for row in found["rows"])
    return found


def test_all_contenders_answer_the_same_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    texts = ["where is my order 5521?", "how do I cancel order 1?", "where is my order 99?", "x " * 3000]
    prompts.write_text("".join(json.dumps({"instruction": text}) + "\n" for text in texts))
    picture = tmp_path / "speed.png"
    found = run(
        tmp_path, "--prompts", str(prompts), "--limit", "2", "--warm", "1", "--max-tokens", "24",
        "--strategy", "trie", "--shape", "320x7x5x768", "--dtype", "float32", "--plot", str(picture),
    )  # fmt: skip
    rows = found["rows"]
    assert [(row["engine"], row["strategy"], row["warm"]) for row in rows] == [
        ("transformers", "none", False),
        ("transformers", "prompt-lookup", False),
        ("draftwood", "none", False),
        ("draftwood", "trie", False),
        ("draftwood", "trie", True),
    ]
    assert all(row["identical"] for row in rows if row["strategy"] != "prompt-lookup")
    assert [rows[i]["acceptance_length"] for i in (0, 2)] == [1.0, 1.0]
    assert all(row["acceptance_length"] >= 1.0 and row["tokens_per_s"] > 0 for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "1 prompts are left out" in out
    assert "HF prompt lookup" in out


def test_a_warm_memory_has_learned_the_answers_to_other_prompts(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("where is my order 5521?\nwhere is my order 5521?\n")
    found = run(
        tmp_path, "--prompts", str(prompts), "--limit", "1", "--warm", "1", "--max-tokens", "60", "--strategy", "trie"
    )
    cold, warm = found["rows"][-2:]
    assert warm["acceptance_length"] > 1.5 * cold["acceptance_length"]


def test_random_text_is_sampled_and_the_same_with_and_without_drafts(tmp_path: Path) -> None:
    found = run(tmp_path, "--text", "random", "--limit", "2", "--max-tokens", "20", "--strategy", "trie")
    assert [(row["engine"], row["strategy"]) for row in found["rows"]] == [("draftwood", "none"), ("draftwood", "trie")]
    assert all(row["identical"] and row["vs_transformers"] is None for row in found["rows"])


def test_a_strategy_that_breaks_is_no_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        top_k = 0

        def start(self, prompt: Int32Array) -> Broken:
            return self

        def propose(self, budget: int) -> DraftTree:
            if budget > 8:
                raise RuntimeError("no luck today")
            return DraftTree.of([1])

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(registry._factories, "broken", Broken)
    status = bench(["speed", "--strategy", "broken", "--limit", "1", "--warm", "0", "--max-tokens", "8"])
    assert status == 1
    assert "strategy 'broken' was switched off: propose raised RuntimeError: no luck today" in capsys.readouterr().err
