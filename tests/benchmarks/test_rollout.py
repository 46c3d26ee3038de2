"""Replicas are replaced under load, for real."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.rollout import measure


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rolling_restart_loses_no_request_and_keeps_what_was_learned() -> None:
    outcome, replaced = measure(replicas=2, requests=120, clients=3, max_tokens=48, grace=10.0, out=Console(quiet=True))
    assert len(replaced) == 2
    assert outcome.errors == []
    assert outcome.different == 0
    assert outcome.acceptance_length("after") > 2 * outcome.acceptance_length("cold")
