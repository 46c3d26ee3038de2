"""`draftwood bench load`."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.closed_loop import RequestResult, Window
from draftwood_benchmarks.load import _OFF, _ON, LoadOptions, State, row_of, rows_of
from draftwood_model_runner.errors import InvalidValueError
from tests.benchmarks.conftest import ECHO, ReportOf, UsePeer
from tests.benchmarks.test_closed_loop import failed

KEYS = {
    "engine", "drafts", "warm", "concurrency", "drafting",
    "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "vs_peer",
    "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "errors", "requests",
    "seconds", "acceptance_length",
}  # fmt: skip
SHORT = ("--duration", "1", "--warm", "4", "--threads", "1")


def test_a_row_counts_tokens_of_the_window_and_latencies_of_the_requests() -> None:
    slow = RequestResult(sent_at=0.0, first_at=3.0, last_at=7.0, first_tokens=1, tokens=5, steps=5)
    quick = RequestResult(sent_at=1.0, first_at=2.0, last_at=3.0, first_tokens=1, tokens=5, steps=2)
    row = row_of(2, _ON, Window.joined([Window(2.0, 6, [slow]), Window(2.0, 3, [quick, failed()])]))
    assert set(row) == KEYS
    assert row["tokens_per_s"] == pytest.approx(9 / 4, abs=0.01)
    assert (row["ttft_p50"], row["ttft_p99"]) == (2000.0, 2980.0)
    assert (row["tpot_p50"], row["tpot_p99"]) == (625.0, 992.5)
    assert (row["errors"], row["requests"]) == (1, 3)
    assert row["acceptance_length"] == pytest.approx(10 / 7, abs=0.001)
    assert (row["tokens_per_s_min"], row["tokens_per_s_max"], row["vs_peer"]) == (1.5, 3.0, None)
    empty = row_of(1, _OFF, Window(1.0, 0, [failed()]))
    assert empty["ttft_p99"] is empty["tpot_p99"] is empty["acceptance_length"] is None


def test_throughput_is_compared_with_the_fastest_peer_of_the_same_concurrency() -> None:
    slow, fast = State("openvino-genai", "none"), State("vllm", "suffix")
    windows = {
        (2, _ON): Window(2.0, 12),
        (2, _OFF): Window(2.0, 6),
        (2, slow): Window(1.0, 3),
        (2, fast): Window(1.0, 6, steps=4),
        (1, _OFF): Window(1.0, 2),
    }
    rows = rows_of(windows)
    cases = [(row["concurrency"], row["engine"], row["drafting"], row["vs_peer"]) for row in rows]
    assert cases == [
        (1, "draftwood", False, None),
        (2, "vllm", True, 1.0),
        (2, "openvino-genai", False, 0.5),
        (2, "draftwood", False, 0.5),
        (2, "draftwood", True, 1.0),
    ]
    assert all(set(row) == KEYS for row in rows)
    assert (rows[1]["ttft_p50"], rows[1]["requests"], rows[1]["acceptance_length"]) == (None, None, 1.5)


def test_concurrencies_are_read_in_order_and_once() -> None:
    assert LoadOptions(concurrency="8,1, 32,8").levels == [1, 8, 32]
    for text in ("", "0", "1,,2", "-1", "1.5", "9999"):
        with pytest.raises(InvalidValueError, match="concurrency"):
            _ = LoadOptions(concurrency=text).levels


@pytest.mark.parametrize("sampled", [False, True])
def test_the_command_measures_a_real_service(
    sampled: bool, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--sampled"] * sampled
    report = report_of("load", "--concurrency", "1,2", "--max-tokens", "24", *SHORT, *options)
    rows = report["rows"]
    assert report["sampled"] is sampled
    assert [(row["concurrency"], row["drafting"]) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
    for row in rows:
        assert row["errors"] == 0
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"]
        assert (row["acceptance_length"] > 1.0) is row["drafting"]
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.slow
def test_a_peer_is_measured_beside_the_service(report_of: ReportOf, use_peer: UsePeer) -> None:
    use_peer(ECHO)
    peer = ("--peer", "openvino-genai")
    rows = report_of("load", *peer, "--concurrency", "2", "--max-tokens", "8", *SHORT)["rows"]
    assert [(row["engine"], row["drafting"]) for row in rows] == [
        ("openvino-genai", False), ("draftwood", False), ("draftwood", True),
    ]  # fmt: skip
    assert rows[0]["tokens_per_s"] == 2 * 2 * 136  # of the fake: a token per prompt and stream in half a second
    assert all(row["vs_peer"] > 0 for row in rows)
    assert all(0 < row["ttft_p50"] <= row["ttft_p99"] and row["requests"] > 1 for row in rows[1:])
