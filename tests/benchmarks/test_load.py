"""`draftwood bench load`."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.closed_loop import Asked, Window, closed_loop
from benchmarks.commands import bench
from benchmarks.load import chance, read_levels, row_of
from benchmarks.load_questions import Questions, taker
from draftwood_client import UnavailableError
from draftwood_client.errors import ErrorDetails
from model_runner.errors import InvalidValueError
from tests.client.fake_server import FakeServer

KEYS = {
    "concurrency", "drafting", "tokens_per_s", "ttft_p50", "ttft_p99", "ttft_p99_vs_off",
    "ttft_p99_chance", "tpot_p50", "tpot_p99", "errors", "requests",
    "seconds", "acceptance_length",
}  # fmt: skip


def failed() -> Asked:
    import grpc

    return Asked(5.0, error=UnavailableError(ErrorDetails(grpc.StatusCode.UNAVAILABLE, "gone")))


def test_latencies_are_those_of_the_first_tokens_and_of_each_later_one() -> None:
    asked = Asked(sent_at=10.0, first_at=10.5, last_at=12.5, first_tokens=3, tokens=11, steps=4)
    assert asked.ttft == 0.5
    assert asked.tpot == 0.25
    assert Asked(sent_at=10.0, first_at=10.5, last_at=10.5, first_tokens=3, tokens=3).tpot is None
    assert failed().ttft is None


def test_a_row_counts_tokens_of_the_window_and_latencies_of_the_requests() -> None:
    slow = Asked(sent_at=0.0, first_at=3.0, last_at=7.0, first_tokens=1, tokens=5, steps=5)
    quick = Asked(sent_at=1.0, first_at=2.0, last_at=3.0, first_tokens=1, tokens=5, steps=2)
    plain = Window(2.0, 6, [slow])
    row = row_of(2, True, Window.joined([Window(2.0, 6, [slow]), Window(2.0, 3, [quick, failed()])]), plain)
    assert set(row) == KEYS
    assert row["tokens_per_s"] == pytest.approx(9 / 4, abs=0.01)
    assert (row["ttft_p50"], row["ttft_p99"], row["ttft_p99_vs_off"]) == (2000.0, 2980.0, 0.993)
    assert (row["tpot_p50"], row["tpot_p99"]) == (625.0, 992.5)
    assert (row["errors"], row["requests"]) == (1, 3)
    assert row["acceptance_length"] == pytest.approx(10 / 7, abs=0.001)


def test_a_window_without_answers_has_no_latencies() -> None:
    empty = Window(1.0, 0, [failed()])
    row = row_of(1, False, empty, empty)
    assert row["ttft_p99"] is row["ttft_p99_vs_off"] is row["ttft_p99_chance"] is None
    assert row["acceptance_length"] is None
    assert row["tokens_per_s"] == 0.0


def test_chance_tells_a_difference_from_noise() -> None:
    rng = np.random.default_rng(1)
    often = [chance([*rng.exponential(1.0, 80)], [*rng.exponential(1.0, 200)]) or 0.0 for _ in range(40)]
    assert 0.3 < np.mean(often) < 0.7
    assert (chance([*rng.exponential(2.0, 200)], [*rng.exponential(1.0, 200)]) or 1.0) < 0.05
    assert (chance([*rng.exponential(1.0, 200)], [*rng.exponential(2.0, 200)]) or 0.0) > 0.9
    assert chance([1.0] * 9, [1.0] * 9) == 1.0


def test_concurrencies_are_read_in_order_and_once() -> None:
    assert read_levels("8,1, 32,8") == [1, 8, 32]
    for text in ("", "0", "1,,2", "-1", "1.5", "9999"):
        with pytest.raises(InvalidValueError, match="concurrency"):
            read_levels(text)


async def test_a_closed_loop_ends_when_there_is_nothing_more_to_ask() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        asks = [questions.plain() for _ in range(5)]
        window = await closed_loop(server.target, 2, taker(asks), math.inf)
    assert len(window.asked) == 5
    assert all(asked.error is None and asked.tokens > 0 for asked in window.asked)
    assert 0 < window.seconds < 60
    assert 0 < window.tokens <= sum(asked.tokens for asked in window.asked)
    assert {ask.options["drafting"] for ask in asks} == {False}


async def test_no_tenant_is_asked_a_question_twice_and_each_has_learned_first() -> None:
    with FakeServer() as server:
        questions = Questions(server.target, ["a", "b", "c"], ["d", "e"], {"max_tokens": 8})
        assert questions.drafted() is None
        await questions.prepare(5)
        learned = [(request.tenant, request.text) for request in server.requests]
    asks = []
    while (ask := questions.drafted()) is not None:
        asks.append((ask.options["tenant"], ask.prompt))
    assert len(asks) == len(set(asks)) == 6
    tenants = {tenant for tenant, _ in asks}
    assert len(tenants) == 2
    assert sorted(learned) == sorted((tenant, text) for tenant in tenants for text in ("d", "e"))


def test_the_command_measures_a_real_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "load.json", tmp_path / "load.png"
    arguments = ["--concurrency", "1,3", "--duration", "2", "--warm", "4", "--max-tokens", "24", "--threads", "1"]
    status = bench(["load", *arguments, "--json", str(report), "--plot", str(picture)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    rows = json.loads(report.read_text())["rows"]
    assert [(row["concurrency"], row["drafting"]) for row in rows] == [(1, False), (1, True), (3, False), (3, True)]
    for row in rows:
        assert set(row) == KEYS
        assert row["errors"] == 0
        assert row["tokens_per_s"] > 0
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"]
        assert (row["acceptance_length"] > 1.0) is row["drafting"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert max(map(len, captured.out.splitlines())) <= 100
