"""`draftwood bench experiments`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.experiments import command
from draftwood_benchmarks.experiments.command import AA, AB, Row, excludes_zero, false_alarms, found_in, misses, power
from tests.service.experiments.statistics.simulation import LOOKS, TPOT_VARIATION, Looks, World, simulate
from draftwood_service.experiments.statistics.ratios import compare
from draftwood_tenants.experiments.outcomes import TIME_PER_TOKEN, column

RUNS = 200


def test_few_equal_arms_raise_a_false_alarm() -> None:
    """20 of 200 are more than a share of 5% gives with a probability of 0.3%."""
    for row in false_alarms(AA, RUNS, seed=3):
        assert row.false_alarms is not None
        assert row.false_alarms * RUNS < 20
        assert row.srm_false_alarms * RUNS < 20


def test_ten_percent_more_tokens_per_second_is_found() -> None:
    """140 of 200 is less than a share of 80% gives with a probability of 0.1%."""
    row = power(AB, RUNS, seed=4)
    assert row.power is not None
    assert row.power * RUNS > 140


def test_fixed_intervals_raise_many_false_alarms_in_the_same_simulation() -> None:
    """What makes the bar of 5% worth testing: an interval for one look fails it when it is looked at 20 times."""

    def naive(looks: Looks) -> np.ndarray:
        low, high = compare(looks.sums[:, :, 0], looks.sums[:, :, 1], TIME_PER_TOKEN).fixed(0.05)
        return (low > 0) | (high < 0)

    def sequence(looks: Looks) -> np.ndarray:
        return excludes_zero(looks, TIME_PER_TOKEN)

    found = found_in(AA, RUNS, 3, {"naive": naive, "sequence": sequence})
    assert found["naive"] > 0.12
    assert found["sequence"] < 0.1


def test_the_simulated_requests_are_as_described() -> None:
    (looks,) = simulate(World(requests=2000, session_length=2.0, speedup=1.5), 20, seed=0)
    assert looks.sums.shape[:3] == (20, LOOKS, 2)
    last = looks.sums[:, -1].sum(-2)
    assert last[..., column("requests")].sum() == 20 * 2000
    assert last[..., column("units")].sum() == pytest.approx(20 * 1000, rel=0.05)
    np.testing.assert_allclose(looks.ttft.sum(-1), looks.sums[..., column("units")].sum(-1))
    per_token = last[..., column("decode_seconds")].sum(0) / last[..., column("tokens")].sum(0)
    assert per_token[0] / per_token[1] == pytest.approx(1.5, rel=0.03)
    alone = next(simulate(World(requests=40), 10, seed=0)).sums[:, -1]
    single = alone[alone[..., column("requests")] == 1]
    times = single[:, column("decode_seconds")] / single[:, column("tokens")]
    assert times.std() / times.mean() == pytest.approx(TPOT_VARIATION, rel=0.25)


def test_rows_beyond_a_bar_are_missed() -> None:
    assert not misses(Row("good", 0.05, None, 0.05))
    assert misses(Row("alarms", 0.051, None, 0.0))
    assert misses(Row("srm", None, 0.9, 0.051))
    assert misses(Row("power", None, 0.79, 0.0))


def test_the_command_writes_its_rows(tmp_path: Path) -> None:
    figures = tmp_path / "rows.json"
    assert bench(["experiments", "--runs", "40", "--json", str(figures)]) == 0
    rows = json.loads(figures.read_text())["rows"]
    assert [set(row) for row in rows] == [{"case", "false_alarms", "power", "srm_false_alarms"}] * 4


def test_a_missed_bar_is_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "AB", World(speedup=1.01))
    assert bench(["experiments", "--runs", "10"]) == 1
    assert capsys.readouterr().err == "error: missed by: +1% tokens/s\n"
