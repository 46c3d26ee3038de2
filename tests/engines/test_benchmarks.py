"""The service on vLLM: a rolling restart, a soak, attacks, and `draftwood bench load` beside vLLM itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions, server_on
from draftwood_benchmarks.harness.servers import server_process
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.security.abuse.attacks import ATTACKS, FAIR_STREAMS, MAX_MESSAGE_BYTES
from tests.security.abuse.looking import look_during
from tests.system.rollout.rollout import Plan, roll_out
from tests.system.soak.run import ROUNDS, soak
from tests.system.soak.traffic import KINDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_rolling_restart_loses_none_of_1000_requests() -> None:
    report = roll_out(Plan(requests=1000, questions=5, engine="vllm", replicas=2))
    assert (report.errors, report.cut, report.different) == ([], 0, 0)
    assert report.requests >= 1000
    assert report.acceptance_before > 1.2 * report.acceptance_cold
    assert report.acceptance_kept > 0.9


def test_a_soak_loses_no_slot() -> None:
    soaked = soak(20, "vllm")
    assert soaked.failures == []
    assert soaked.free_slots == [soaked.slots] * ROUNDS
    assert set(soaked.requests) == KINDS.keys()


def test_attacks_end_with_statuses_that_tell_what_to_change() -> None:
    """Times are not looked at here: vLLM's processes share their cores with the attackers."""
    attacks = {attack.name: attack for attack in ATTACKS}
    model = ChosenModel("bundled model", BUNDLED_MODEL, ModelOptions(threads=1))
    on_vllm, process = server_on("vllm", model, eager=True)
    flags = ["--max-message-bytes", str(MAX_MESSAGE_BYTES), "--max-running", str(2 * FAIR_STREAMS)]
    with server_process(*on_vllm, *flags, **process) as server:
        for name in ("fair", "many-messages", "properties", "10x-fair", "stalled-readers"):
            seen, statuses = asyncio.run(look_during(server.target, attacks[name], 3.0))
            assert (name, seen.refused, statuses.untyped) == (name, [], "")
            assert min(seen.ttfts) > 0


def test_vllm_itself_is_timed_beside_the_service(tmp_path: Path) -> None:
    arguments = ["--peer", "vllm", "--concurrency", "2", "--duration", "2", "--warm", "4", "--max-tokens", "24"]
    report = tmp_path / "report.json"
    bench(["load", *arguments, "--engine", "vllm", "--threads", "1", "--json", str(report)])  # bars may be missed
    peer, off, on = rows = json.loads(report.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["vllm", "draftwood", "draftwood"]
    for row in (peer, off, on):
        assert 0 < row["ttft_p50"] <= row["ttft_p99"]
        assert 0 < row["tpot_p50"] <= row["tpot_p99"]
        assert row["requests"] > 2
    assert off["vs_peer"] > 0
