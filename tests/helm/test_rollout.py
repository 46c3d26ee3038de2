"""What the chart renders is rolled out under load: no request fails, answers stay the same, and so does the memory.

`python -m tests.helm.rollout` prints the figures.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.rollout import Report, can_roll_out, roll_out

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_roll_out(), reason="needs root, namespaces with bridges, and the program setpriv"),
]


def check(report: Report, pods: int) -> None:
    print(report)
    assert (report.failed, report.wrong) == ([], 0)
    assert [restart.status for restart in report.restarts] == [0] * pods
    assert all(restart.ended_in_s <= restart.grace_s for restart in report.restarts)
    assert min(report.through.values()) > 0
    # Not compared with each other: how much a replica drafts follows its own step times.
    assert min(report.acceptance_before, report.acceptance_after) > 1.5 * report.acceptance_cold


def test_a_pod_and_its_gateway_are_replaced_and_no_request_fails() -> None:
    check(roll_out(60, replicas=1), pods=2)


@pytest.mark.slow
@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 0, "maxUnavailable": 1}], ids=["surge", "as on GPUs"])
def test_three_pods_and_their_gateway_are_replaced_under_1000_requests(rollout: dict[str, Any]) -> None:
    report = roll_out(1000, rollout=rollout)
    assert report.requests >= 1000
    check(report, pods=4)
