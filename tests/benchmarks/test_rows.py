"""The rows of `draftwood bench speed` and `step`."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.contenders import Contender
from draftwood_benchmarks.peers.process import Answer
from draftwood_benchmarks.speed import label, rows_of, table_of
from draftwood_benchmarks.step import critical_length
from draftwood_benchmarks.step import rows_of as rows_of_curve
from draftwood_strategies.draft_engine.step_times import StepTimeCurve

KEYS = {
    "engine", "strategy", "warm", "again", "sampled", "sampled_vs_greedy",
    "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "vs_peer",
    "acceptance_length", "nodes_per_step", "vs_transformers", "vs_plain",
    "identical", "identical_share", "identical_to", "identical_to_plain",
}  # fmt: skip


def of(engine: str, strategy: str, *rounds: list[Answer], **states: bool) -> Contender:
    return Contender(engine, strategy, rounds=[*rounds], **states)


def answer(seconds: float, tokens: tuple[int, ...] = (1, 2), steps: int = 2, nodes: int = 0) -> Answer:
    return Answer([*tokens], seconds, steps, nodes)


GENERATE = of("transformers", "none", [answer(2.0)])
PLAIN = of("draftwood", "none", [answer(1.0)])


def test_rows_compare_totals_and_answers() -> None:
    reference = of("transformers", "none", [answer(2.0), answer(2.0, (3, 4))])
    plain = of("draftwood", "none", [answer(1.0), answer(1.0, (3, 4))])
    warm = of("draftwood", "trie", [answer(0.25, steps=1, nodes=6), answer(0.25, (3, 9), 1, 4)], warm=True)
    rows = rows_of([reference, plain, warm])
    assert all(set(row) == KEYS for row in rows)
    assert [row["tokens_per_s"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_transformers"] for row in rows] == [1.0, 2.0, 8.0]
    assert [row["vs_plain"] for row in rows] == [0.5, 1.0, 4.0]
    assert [row["identical"] for row in rows] == [True, True, False]
    assert (rows[2]["identical_share"], rows[2]["identical_to_plain"]) == (0.5, 0.5)
    assert (rows[2]["acceptance_length"], rows[2]["nodes_per_step"]) == (2.0, 5.0)
    assert [label(row) for row in rows] == ["HF generate", "drafting off", "trie, warm"]
    assert "x peer" not in {column.header for column in table_of(rows, "").columns}


def test_rows_show_the_spread_of_rounds_and_the_speed_relative_to_the_fastest_peer_that_knew_no_more() -> None:
    generate = of("transformers", "none", [answer(2.0)], [answer(2.0)])
    peer = of("openvino-genai", "none", [answer(1.0)], [answer(3.0)])
    plain = of("draftwood", "none", [answer(2.0)], [answer(6.0)])
    fast = [[answer(0.25)], [answer(0.25)]]
    rows = rows_of([generate, peer, plain])
    assert [row["vs_peer"] for row in rows] == [1.0, 1.0, 0.5]
    assert [(row["tokens_per_s_min"], row["tokens_per_s_max"]) for row in rows[1:]] == [(0.67, 2.0), (0.33, 1.0)]
    assert label(rows[1]) == "openvino-genai"
    assert "x peer" in {column.header for column in table_of(rows, "").columns}
    faster = of("llama.cpp", "none", *fast)
    assert [row["vs_peer"] for row in rows_of([generate, peer, faster, plain])[1:]] == [0.125, 1.0, 0.062]
    knowing = of("vllm", "suffix", *fast, warm=True)
    assert [row["vs_peer"] for row in rows_of([generate, peer, knowing, plain])[1:]] == [1.0, 1.0, 0.5]
    again = rows_of([generate, peer, plain, of("draftwood", "trie", *fast, warm=True, again=True)])[3]
    assert (again["vs_peer"], label(again)) == (None, "trie, asked again")


def test_a_quantized_model_is_compared_with_itself_without_drafts() -> None:
    plain = of("draftwood", "none", [answer(1.0, (1, 7))])
    warm = of("draftwood", "trie", [answer(1.0, (1, 7))], warm=True)
    rows = rows_of([GENERATE, plain, warm], quantized=True)
    assert [row["identical"] for row in rows] == [False, True, True]
    assert {row["identical_to"] for row in rows} == {"drafting off"}
    assert "identical to those of drafting off" in str(table_of(rows, "").caption)
    assert {row["identical_to"] for row in rows_of([GENERATE, plain, warm])} == {"transformers' generate"}


def test_sampled_answers_are_compared_with_sampled_ones_and_their_speed_with_greedy_ones() -> None:
    peer = of("openvino-genai", "none", [answer(2.0)])
    warm = of("draftwood", "trie", [answer(0.5)], warm=True)
    sampled = of("draftwood", "none", [answer(2.0, (3, 4))], sampled=True)
    sampled_warm = of("draftwood", "trie", [answer(0.625, (3, 4))], warm=True, sampled=True)
    rows = rows_of([GENERATE, peer, PLAIN, warm, sampled, sampled_warm])
    assert [row["sampled_vs_greedy"] for row in rows] == [None, None, None, None, 0.5, 0.8]
    assert [row["vs_plain"] for row in rows[2:]] == [1.0, 2.0, 1.0, 3.2]
    assert [row["vs_peer"] for row in rows[2:]] == [2.0, 4.0, None, None]
    assert [row["vs_transformers"] for row in rows[2:]] == [2.0, 4.0, None, None]
    assert [row["identical_to"] for row in rows[3:]] == ["transformers' generate", "drafting off", "drafting off"]
    assert all(row["identical"] for row in rows)
    assert [label(row) for row in rows[4:]] == ["drafting off, sampled", "trie, warm, sampled"]
    assert "greedy" in {column.header for column in table_of(rows, "").columns}
    assert "greedy" not in {column.header for column in table_of(rows[:4], "").columns}


@pytest.mark.parametrize(
    ("milliseconds", "critical"),
    [
        ({1: 10.0, 8: 10.0, 16: 18.0}, 11),  # one millisecond a token above 8: 12.0 at 10 is not above
        ({1: 10.0, 2: 20.0}, 2),
        ({1: 10.0, 64: 11.9}, None),
    ],
)
def test_the_critical_length_is_the_first_that_takes_a_fifth_longer(
    milliseconds: dict[int, float], critical: int | None
) -> None:
    assert critical_length(StepTimeCurve({n: ms / 1024 for n, ms in milliseconds.items()})) == critical


def test_rows_of_steps_are_in_milliseconds_and_against_one_token() -> None:
    assert rows_of_curve(StepTimeCurve({1: 0.010, 4: 0.015})) == [
        {"tokens": 1, "ms": 10.0, "ratio": 1.0},
        {"tokens": 4, "ms": 15.0, "ratio": 1.5},
    ]
