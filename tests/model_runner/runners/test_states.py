"""States of recurrent layers on CPUs: what is kept between steps, and the recurrences over draft trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood_model_runner.runners.base import KVCompaction
from draftwood_model_runner.runners.page_states import StepRow
from draftwood_model_runner.runners.recurrent_layers import State
from draftwood_model_runner.runners.torch.states import RowStates, StateMemory
from tests.model_runner.test_hybrids import assert_lossless

PAGE = 4
TABLE = np.array([7, 3, 9], np.int32)
KEPT = 256
"""Bytes of states at the ends of pages: four of them."""


def state(value: float) -> list[State]:
    return [{("recurrent", 0): torch.full((1, 16), value)}]


def after_step(memory: StateMemory, context: int, chain: int, nodes: int, before: RowStates | None = None) -> RowStates:
    entries = np.arange(context + chain, context + chain + nodes)
    slots = TABLE[entries // PAGE] * PAGE + entries % PAGE
    row = RowStates(position=context + chain, states=state(1.0), nodes=[*range(nodes)], slots=slots.tolist())
    step_row = StepRow(context, range(chain), range(chain), range(chain, chain + nodes), TABLE)
    memory.store(step_row, before, row)
    return row


@pytest.fixture
def memory() -> StateMemory:
    return StateMemory(PAGE, KEPT)


def test_a_state_serves_up_to_its_last_accepted_node(memory: StateMemory) -> None:
    """Accepted nodes come first, as their keys do."""
    row = after_step(memory, 0, 3, 4)
    assert all(memory.find(TABLE, context) is row for context in (3, 4, 7))
    for context in (1, 2, 8):
        with pytest.raises(RuntimeError, match=f"first {context} tokens"):
            memory.find(TABLE, context)
    moves = np.array(row.slots, np.int32)
    memory.move(KVCompaction(moves[[1, 3]], moves[[0, 1]], np.array([0, 2], np.int32)))
    assert row.nodes[:2] == [1, 3]


def test_the_state_before_is_gone_after_a_step(memory: StateMemory) -> None:
    first = after_step(memory, 0, 3, 0)
    after_step(memory, 3, 6, 0, before=first)
    with pytest.raises(RuntimeError):
        memory.find(TABLE, 3)


def test_two_sequences_begin_after_a_page_until_it_is_released(memory: StateMemory) -> None:
    after_step(memory, 0, 4, 0)
    memory.keep_end(7, state(2.0))
    memory.release([7], kept=True)
    with pytest.raises(RuntimeError):
        memory.find(TABLE, 4)
    memory.resume(7, first=3, position=PAGE)
    memory.resume(7, first=8, position=PAGE)
    for table in (TABLE, np.array([7, 8], np.int32)):
        assert memory.find(table, PAGE).states[0]["recurrent", 0][0, 0] == 2.0
    assert memory.resumes_after(7)
    memory.release([7], kept=False)
    assert not memory.resumes_after(7)


def test_a_page_that_is_written_again_has_no_state(memory: StateMemory) -> None:
    memory.keep_end(3, state(2.0))
    after_step(memory, 4, 1, 0)
    assert not memory.resumes_after(3)


def test_the_least_recently_used_states_are_given_up(memory: StateMemory) -> None:
    for page in range(5):
        memory.keep_end(page, state(float(page)))
    assert [memory.resumes_after(page) for page in range(5)] == [False, True, True, True, True]


@pytest.mark.parametrize("kind", ["kimi_linear", "qwen3_next", "zamba2", "lfm2"])
def test_recurrences_over_trees_write_what_generate_writes(kind: str) -> None:
    """Delta rules of both kinds, a state space and convolutions."""
    assert_lossless(kind, range(2))
