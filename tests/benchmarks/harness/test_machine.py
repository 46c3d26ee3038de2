"""The load of other processes."""

from __future__ import annotations

import pytest

from draftwood_benchmarks.harness import machine
from draftwood_benchmarks.harness.machine import OtherLoad, warning


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((100, 50, 20), (200, 100, 70), 0.0),
        ((100, 50, 20), (200, 120, 50), 0.4),
        ((100, 50, 20), (200, 50, 30), 0.0),
        ((100, 50, 20), (100, 50, 20), None),
        (None, None, None),
    ],
)
def test_the_share_is_of_cpu_time_that_is_not_ours(
    before: tuple[int, int, int] | None,
    after: tuple[int, int, int] | None,
    share: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = iter([before, after])
    monkeypatch.setattr(machine, "_sample", lambda: next(samples))
    assert OtherLoad().share() == share


def test_a_busy_machine_is_named() -> None:
    assert warning(0.02) == ""
    assert "other processes took 31% of the CPU time" in warning(0.31)
    assert "unknown" in warning(None)
