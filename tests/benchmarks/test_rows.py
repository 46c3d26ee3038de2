"""The rows of `draftwood bench speed`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftwood_benchmarks.contenders import Tally
from draftwood_benchmarks.peers.process import Answer
from draftwood_benchmarks.speed import label, rows_of, table_of

KEYS = {
    "engine", "strategy", "warm", "again", "sampled", "sampled_vs_greedy",
    "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "vs_peer",
    "acceptance_length", "nodes_per_step", "vs_transformers", "vs_plain",
    "identical", "identical_share", "identical_to", "identical_to_plain",
}  # fmt: skip


def named(engine: str, strategy: str, warm: bool = False, sampled: bool = False, again: bool = False) -> Any:
    """A contender that is only a name."""
    return SimpleNamespace(engine=engine, strategy=strategy, warm=warm, sampled=sampled, again=again)


def tally(contender: Any, *answers: Answer) -> Tally:
    return Tally(contender, list(answers))


def test_rows_compare_totals_and_answers() -> None:
    reference = tally(named("transformers", "none"), Answer([1, 2], 2.0, 2, 0), Answer([3, 4], 2.0, 2, 0))
    plain = tally(named("draftwood", "none"), Answer([1, 2], 1.0, 2, 0), Answer([3, 4], 1.0, 2, 0))
    warm = tally(named("draftwood", "trie", True), Answer([1, 2], 0.25, 1, 6), Answer([3, 9], 0.25, 1, 4))
    rows = rows_of([reference, plain, warm])
    assert all(set(row) == KEYS for row in rows)
    assert [row["tokens_per_s"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_transformers"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_plain"] for row in rows] == [0.5, 1.0, 4.0]
    assert [row["identical"] for row in rows] == [True, True, False]
    assert (rows[2]["identical_share"], rows[2]["identical_to_plain"]) == (0.5, 0.5)
    assert (rows[2]["acceptance_length"], rows[2]["nodes_per_step"]) == (2.0, 5.0)
    assert [label(row) for row in rows] == ["HF generate", "drafting off", "trie, warm"]


def test_rows_show_the_spread_of_rounds_and_the_speed_relative_to_the_peer() -> None:
    peer = Tally(named("openvino-genai", "none"), [Answer([1, 2], 1.0, 2, 0), Answer([1, 2], 3.0, 2, 0)], rounds=2)
    plain = Tally(named("draftwood", "none"), [Answer([1, 2], 2.0, 2, 0), Answer([1, 2], 6.0, 2, 0)], rounds=2)
    rows = rows_of([peer, plain])
    assert [row["vs_peer"] for row in rows] == [1.0, 0.5]
    assert [(row["tokens_per_s_min"], row["tokens_per_s_max"]) for row in rows] == [(0.67, 2.0), (0.33, 1.0)]
    assert label(rows[0]) == "openvino-genai"
    faster = Tally(named("llama.cpp", "none"), [Answer([1, 2], 0.5, 2, 0)] * 2, rounds=2)
    assert [row["vs_peer"] for row in rows_of([peer, faster, plain])] == [0.25, 1.0, 0.125]
    knowing = Tally(named("vllm", "suffix", warm=True), [Answer([1, 2], 0.25, 2, 0)] * 2, rounds=2)
    assert [row["vs_peer"] for row in rows_of([peer, knowing, plain])] == [1.0, 1.0, 0.5]
    again = Tally(named("draftwood", "trie", warm=True, again=True), [Answer([1, 2], 0.25, 1, 0)] * 2, rounds=2)
    assert [row["vs_peer"] for row in rows_of([peer, plain, again])] == [1.0, 0.5, None]
    assert label(rows_of([peer, plain, again])[2]) == "trie, asked again"
    assert "x peer" in {column.header for column in table_of(rows, "").columns}
    assert "x peer" not in {column.header for column in table_of(rows_of([plain]), "").columns}


def test_a_quantized_model_is_compared_with_itself_without_drafts() -> None:
    reference = tally(named("transformers", "none"), Answer([1, 2], 2.0, 2, 0))
    plain = tally(named("draftwood", "none"), Answer([1, 7], 1.0, 2, 0))
    warm = tally(named("draftwood", "trie", True), Answer([1, 7], 1.0, 2, 0))
    rows = rows_of([reference, plain, warm], quantized=True)
    assert [row["identical"] for row in rows] == [False, True, True]
    assert {row["identical_to"] for row in rows} == {"drafting off"}
    assert "identical to those of drafting off" in str(table_of(rows, "").caption)
    assert {row["identical_to"] for row in rows_of([reference, plain, warm])} == {"transformers' generate"}


def test_without_transformers_drafting_off_is_the_judge() -> None:
    plain = tally(named("draftwood", "none"), Answer([1, 2], 1.0, 2, 0))
    cold = tally(named("draftwood", "trie"), Answer([1, 3], 1.0, 2, 0))
    rows = rows_of([plain, cold])
    assert [row["vs_transformers"] for row in rows] == [None, None]
    assert [row["identical"] for row in rows] == [True, False]


def test_sampled_answers_are_compared_with_sampled_ones_and_their_speed_with_greedy_ones() -> None:
    reference = tally(named("transformers", "none"), Answer([1, 2], 2.0, 2, 0))
    peer = tally(named("openvino-genai", "none"), Answer([1, 2], 2.0, 2, 0))
    plain = tally(named("draftwood", "none"), Answer([1, 2], 1.0, 2, 0))
    warm = tally(named("draftwood", "trie", True), Answer([1, 2], 0.5, 1, 6))
    sampled = tally(named("draftwood", "none", sampled=True), Answer([3, 4], 2.0, 2, 0))
    sampled_warm = tally(named("draftwood", "trie", True, sampled=True), Answer([3, 4], 0.625, 1, 4))
    rows = rows_of([reference, peer, plain, warm, sampled, sampled_warm])
    assert [row["sampled_vs_greedy"] for row in rows] == [None, None, None, None, 0.5, 0.8]
    assert [row["vs_plain"] for row in rows[2:]] == [1.0, 2.0, 1.0, 3.2]
    assert [row["vs_peer"] for row in rows[2:]] == [2.0, 4.0, None, None]
    assert [row["identical_to"] for row in rows[3:]] == ["transformers' generate", "drafting off", "drafting off"]
    assert all(row["identical"] for row in rows)
    assert [label(row) for row in rows[4:]] == ["drafting off, sampled", "trie, warm, sampled"]
    assert "greedy" in {column.header for column in table_of(rows, "").columns}
    assert "greedy" not in {column.header for column in table_of(rows[:4], "").columns}
