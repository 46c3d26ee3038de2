"""A rolling restart of real replicas on a real store, under load."""

from __future__ import annotations

import pytest

from tests.system.rollout.rollout import CONCURRENCY, Plan, roll_out


@pytest.mark.timeout(600)
def test_a_rolling_restart_loses_no_request_and_no_memory() -> None:
    report = roll_out(Plan(replicas=2))
    assert (report.errors, report.cut, report.different) == ([], 0, 0)
    assert report.requests >= 60
    assert report.acceptance_before > 1.5 * report.acceptance_cold
    assert report.acceptance_kept > 0.9


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kill", [False, True])
@pytest.mark.parametrize("new_addresses", [False, True])
def test_a_rolling_restart_loses_none_of_1000_requests(new_addresses: bool, kill: bool) -> None:
    """The runs of docs/rollout.md; `pytest -rP` prints their figures."""
    report = roll_out(Plan(1000, questions=20, max_tokens=60, new_addresses=new_addresses, kill=kill))
    print(report)
    assert (report.errors, report.different) == ([], 0)
    assert report.requests >= 1000
    assert report.cut <= (CONCURRENCY if kill else 0)
    assert report.lookups > 0 or not new_addresses
    assert report.acceptance_kept > 0.9
