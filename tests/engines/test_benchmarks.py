"""The benchmarks of the service on vLLM, in short: a rolling restart, a soak, attacks, the load beside vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood_benchmarks.commands import bench
from tests.system.rollout.rollout import Plan, roll_out
from tests.system.soak.run import ROUNDS
from tests.system.soak.traffic import KINDS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def report_of(folder: Path, *arguments: str) -> dict[str, Any]:
    """What a benchmark writes, which may have missed its bars."""
    report = folder / "report.json"
    bench([*arguments, "--engine", "vllm", "--threads", "1", "--json", str(report)])
    found: dict[str, Any] = json.loads(report.read_text())
    return found


def test_a_rolling_restart_loses_none_of_1000_requests() -> None:
    report = roll_out(Plan(requests=1000, questions=5, engine="vllm", replicas=2))
    assert (report.errors, report.cut, report.different) == ([], 0, 0)
    assert report.requests >= 1000
    assert report.exit_codes == [0, 0]
    assert report.acceptance_before > 1.2 * report.acceptance_cold
    assert report.acceptance_kept > 0.9


def test_a_soak_loses_no_slot(tmp_path: Path) -> None:
    found = report_of(tmp_path, "soak", "--duration", "20", "--max-context", "512", "--dtype", "float32")
    assert found["failures"] == []
    assert found["free_places"] == [found["places"]] * ROUNDS
    assert set(found["requests"]) == KINDS.keys()


def test_attacks_end_with_statuses_that_tell_what_to_change(tmp_path: Path) -> None:
    """Times are not looked at here: vLLM's processes share their cores with the attackers."""
    attacks = ("many-messages", "properties", "10x-fair", "stalled-readers")
    named = [part for attack in attacks for part in ("--attack", attack)]
    rows = report_of(tmp_path, "abuse", *named, "--seconds", "3")["rows"]
    assert [row["attack"] for row in rows] == ["fair", *attacks]
    for row in rows:
        problems = [what for what in row["missed"] if "failed" in what or "a call ended with" in what]
        assert problems == []
        assert row["neighbour_ttft_p99_ms"] > 0


def test_vllm_itself_is_timed_beside_the_service(tmp_path: Path) -> None:
    arguments = ["--peer", "vllm", "--concurrency", "2", "--duration", "2", "--warm", "4", "--max-tokens", "24"]
    rows = report_of(tmp_path, "load", *arguments)["rows"]
    peer, off, on = rows
    assert [row["engine"] for row in rows] == ["vllm", "draftwood", "draftwood"]
    for row in (peer, off, on):
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"]
        assert row["requests"] > 2
    assert off["vs_peer"] > 0
