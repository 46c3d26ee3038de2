"""`draftwood bench load`."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood_benchmarks.closed_loop import RequestResult, Window
from draftwood_benchmarks.load import peer_row, read_levels, row_of
from draftwood_benchmarks.peers.process import PeerState
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
    row = row_of(2, True, Window.joined([Window(2.0, 6, [slow]), Window(2.0, 3, [quick, failed()])]))
    assert set(row) == KEYS
    assert row["tokens_per_s"] == pytest.approx(9 / 4, abs=0.01)
    assert (row["ttft_p50"], row["ttft_p99"]) == (2000.0, 2980.0)
    assert (row["tpot_p50"], row["tpot_p99"]) == (625.0, 992.5)
    assert (row["errors"], row["requests"]) == (1, 3)
    assert row["acceptance_length"] == pytest.approx(10 / 7, abs=0.001)
    assert (row["tokens_per_s_min"], row["tokens_per_s_max"], row["vs_peer"]) == (1.5, 3.0, None)
    empty = row_of(1, False, Window(1.0, 0, [failed()]))
    assert empty["ttft_p99"] is empty["tpot_p99"] is empty["acceptance_length"] is None


def test_throughput_is_compared_with_the_peer() -> None:
    window, peer = Window(2.0, 6), Window(1.0, 6)
    assert row_of(2, False, window, peer)["vs_peer"] == 0.5
    row = peer_row(2, peer, peer, PeerState("openvino-genai", "none", True))
    assert set(row) == KEYS
    assert (row["engine"], row["tokens_per_s"], row["vs_peer"], row["ttft_p50"]) == ("openvino-genai", 6.0, 1.0, None)
    assert row["requests"] is None


def test_concurrencies_are_read_in_order_and_once() -> None:
    assert read_levels("8,1, 32,8") == [1, 8, 32]
    for text in ("", "0", "1,,2", "-1", "1.5", "9999"):
        with pytest.raises(InvalidValueError, match="concurrency"):
            read_levels(text)


def test_the_command_measures_a_real_service(
    tmp_path: Path, report_of: ReportOf, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "load.png"
    rows = report_of("load", "--concurrency", "1,2", "--max-tokens", "24", *SHORT, "--plot", str(picture))["rows"]
    assert [(row["concurrency"], row["drafting"]) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
    for row in rows:
        assert row["errors"] == 0
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"]
        assert (row["acceptance_length"] > 1.0) is row["drafting"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


def test_a_real_vocabulary_sampled(report_of: ReportOf) -> None:
    real = ("--vocabulary", "20000", "--sampled")
    report = report_of("load", *real, "--concurrency", "2", "--max-tokens", "8", *SHORT)
    assert (report["vocabulary"], report["sampled"]) == (20000, True)
    assert all(row["errors"] == 0 and row["acceptance_length"] >= 1.0 for row in report["rows"])


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
