"""How many sequences run after a step that ran out of memory, and when more do again."""

from __future__ import annotations

import pytest

from draftwood_model_runner.scheduling import fair_queue as slot_limit
from draftwood_model_runner.scheduling.fair_queue import SlotLimit

PATIENCE = slot_limit._FIRST_PATIENCE


def steps_until_growth(limit: SlotLimit, most: int = 10**7) -> int:
    """Steps in which all slots are in use and more are wanted."""
    return next(step for step in range(1, most) if limit.passed(limit.slots, 1))


def test_slots_are_halved_and_grow_to_what_was_configured() -> None:
    limit = SlotLimit(32)
    assert limit.out_of_memory(32)
    sizes = [limit.slots]
    while limit.slots < 32:
        assert steps_until_growth(limit) == 2 * PATIENCE
        sizes.append(limit.slots)
    assert sizes == [16, 20, 25, 31, 32]
    assert not any(limit.passed(32, 1) for _ in range(10 * PATIENCE))


def test_a_failure_after_growth_takes_back_the_growth_and_the_next_try_is_later() -> None:
    limit = SlotLimit(32)
    assert limit.out_of_memory(32)
    waited = []
    for _ in range(12):
        waited.append(steps_until_growth(limit))
        assert limit.slots == 20
        assert limit.out_of_memory(20)
        assert limit.slots == 16
    assert waited[:3] == [2 * PATIENCE, 4 * PATIENCE, 8 * PATIENCE]
    assert waited[-1] == waited[-2] == slot_limit._MOST_PATIENCE
    assert limit.out_of_memory(16)  # not after a growth
    assert limit.slots == 8


def test_an_old_failure_is_forgotten() -> None:
    limit = SlotLimit(2)
    for _ in range(3):
        assert limit.out_of_memory(2)
        steps_until_growth(limit)
    assert not any(limit.passed(2, 1) for _ in range(slot_limit._MOST_PATIENCE))
    assert limit.out_of_memory(2)
    assert steps_until_growth(limit) == 2 * PATIENCE


@pytest.mark.parametrize(("running", "waiting"), [(15, 3), (16, 0)])
def test_steps_that_want_no_more_do_not_count(running: int, waiting: int) -> None:
    limit = SlotLimit(32)
    limit.out_of_memory(32)
    assert not any(limit.passed(running, waiting) for _ in range(10 * PATIENCE))
    assert limit.slots == 16


def test_one_sequence_cannot_be_fewer() -> None:
    limit = SlotLimit(2)
    assert limit.out_of_memory(2)
    assert limit.slots == 1
    assert not limit.out_of_memory(1)
    assert limit.slots == 1
