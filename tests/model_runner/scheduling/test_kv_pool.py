"""Which prefixes are found, who may find them, and that pages always hold what they are found for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.kv_pool import GROWTH, AttentionWindow, KVPool
from draftwood_model_runner.scheduling.page_pool import common_prefix
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.fake_kv import FakeMemory, held_alone
from tests.model_runner.sequences import make_sequence

PAGE = 16


def memory_of(pages: int, prefix_cache: bool = True, window: AttentionWindow | None = None) -> FakeMemory:
    return FakeMemory(KVPool(pages, PAGE, prefix_cache, window=window))


def tokens(*parts: tuple[int, int]) -> Int32Array:
    """int32[n]: for each (token, count) that many of it."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def ended(memory: FakeMemory, prompt: Int32Array, tenant: str = "a", output: int = 1, keep: bool = True) -> None:
    """A sequence of that prompt ran and ended."""
    sequence = start(memory, prompt, tenant)
    memory.run(ScheduledSequence(sequence, sequence.length - sequence.committed), list(range(1000, 1000 + output)))
    memory.pool.close(sequence, keep)
    memory.pool.check([])


def cached(memory: FakeMemory, prompt: Int32Array, tenant: str = "a") -> int:
    """Tokens of it that a waiting sequence would find."""
    return memory.pool.cached(make_sequence("r", prompt, StopParams(1), tenant=tenant))


def start(memory: FakeMemory, prompt: Int32Array, tenant: str = "a") -> Sequence:
    sequence = make_sequence("r", prompt, StopParams(50), tenant=tenant, max_draft_nodes=50)
    assert memory.pool.open(sequence)
    return sequence


def pages(count: int) -> int:
    return -(-count // PAGE)


@given(st.lists(st.integers(0, 2), max_size=70), st.lists(st.integers(0, 2), max_size=70), st.integers(0, 70))
def test_the_common_prefix_ends_where_tokens_differ(a: list[int], b: list[int], common: int) -> None:
    left, right = np.array(a[:common] + b, np.int32), np.array(a, np.int32)
    expected = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    assert common_prefix(left, right) == common_prefix(right, left) == expected


def test_what_begins_alike_is_held_once() -> None:
    memory = memory_of(100)
    ended(memory, tokens((1, 64), (2, 40)))
    sequences = [start(memory, tokens((1, 64), (3, 40))) for _ in range(2)]
    assert [s.committed for s in sequences] == [64, 64]
    assert start(memory, tokens((1, 64), (2, 40), (4, 40))).committed == 96
    shared, own = 64 // PAGE, pages(104 + 50 + 50) - 64 // PAGE
    assert held_alone(memory.pool, sequences) == 2 * own
    assert memory.pool.available == 100 - shared - 2 * own - 2 - (pages(144 + 50 + 50) - 6)


@pytest.mark.parametrize("size", [PAGE, PAGE + 1, 100])
def test_the_last_token_is_always_computed(size: int) -> None:
    memory = memory_of(100)
    ended(memory, tokens((1, size)), output=30)
    assert start(memory, tokens((1, size))).committed == (size - 1) // PAGE * PAGE


def test_a_live_sequences_prompt_serves_as_prefix() -> None:
    memory = memory_of(100)
    first = start(memory, tokens((1, 80), (2, 50)))
    assert start(memory, tokens((1, 80), (3, 50))).committed == 0
    memory.run(ScheduledSequence(first, 70), [])
    memory.pool.record(first)
    assert start(memory, tokens((1, 80), (4, 50))).committed == 64


def test_tenants_never_meet() -> None:
    memory = memory_of(200)
    ended(memory, tokens((1, 100)), "a")
    live = start(memory, tokens((2, 100)), "a")
    memory.run(ScheduledSequence(live, 100), [7])
    memory.pool.record(live)
    for prompt in (tokens((1, 100)), tokens((2, 100))):
        assert start(memory, prompt, "b").committed == 0
        assert start(memory, prompt, "a\ud800").committed == 0  # a name that UTF-8 has no bytes for
        assert start(memory, prompt, "a").committed == 96


def test_what_is_known_already_takes_no_further_memory() -> None:
    memory = memory_of(200)
    for _ in range(3):
        ended(memory, tokens((1, 100)), output=5)
    assert memory.pool._prefixes.retained == 6
    ended(memory, tokens((1, 90)))
    assert memory.pool._prefixes.retained == 6
    ended(memory, tokens((1, 100), (2, 100)))
    assert memory.pool._prefixes.retained == 12


def test_the_least_recently_used_prefix_yields_to_live_sequences() -> None:
    memory = memory_of(42)
    for token in (1, 2, 3):
        ended(memory, tokens((token, 80)))
    assert memory.pool._prefixes.retained == 15
    used = start(memory, tokens((1, 32), (9, 48)))
    assert used.committed == 32
    others = [start(memory, tokens((token, 80))) for token in (7, 8)]  # for these, the ends of 1 and of 2 must go
    assert [cached(memory, tokens((token, 80))) for token in (1, 2)] == [32, 16]
    assert cached(memory, tokens((3, 81))) == 80
    memory.pool.check([used, *others])


@pytest.mark.parametrize(("prefix_cache", "keep"), [(False, True), (True, False)])
def test_nothing_is_retained_where_it_must_not_be(prefix_cache: bool, keep: bool) -> None:
    memory = memory_of(100, prefix_cache)
    ended(memory, tokens((1, 100)), keep=keep)
    assert memory.pool._prefixes.retained == 0
    assert memory.pool.available == 100
    assert start(memory, tokens((1, 100))).committed == 0


def test_a_sequence_grows_page_by_page_and_nothing_is_copied() -> None:
    memory = memory_of(100)
    sequence = make_sequence("r", tokens((1, 20)), StopParams(400), max_draft_nodes=10)
    assert memory.pool.open(sequence)
    held = memory.pool.pages(sequence).tolist()
    while len(sequence.output) < 400:
        if memory.pool.is_short(sequence):
            assert memory.pool.shortfall([sequence]) <= 0
            memory.pool.grow(sequence)
            assert memory.pool.pages(sequence).tolist()[: len(held)] == held
            held = memory.pool.pages(sequence).tolist()
            assert len(held) <= pages(sequence.length + GROWTH + 10)
        pending = sequence.length - sequence.committed
        memory.run(ScheduledSequence(sequence, pending), [len(sequence.output)] * 5)
        memory.pool.check([sequence])
    assert len(held) == pages(430)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_sequence_of_any_length_needs_its_window_and_a_step(prefix_cache: bool) -> None:
    window = AttentionWindow(tokens=100, step=128)
    most = pages(window.needs(10))
    memory = memory_of(most, prefix_cache, window)
    for turn in (5, 6):
        sequence = make_sequence("r", tokens((turn, 3000)), StopParams(1000), max_draft_nodes=10)
        assert memory.pool.open(sequence)
        while len(sequence.output) < 1000:
            if memory.pool.is_short(sequence):
                memory.pool.trim(sequence)
                assert memory.pool.shortfall([sequence]) <= 0
                memory.pool.grow(sequence)
            pending = min(sequence.length - sequence.committed, window.step)
            memory.run(ScheduledSequence(sequence, pending), [turn] * 5)
            memory.pool.check([sequence])
        memory.pool.close(sequence)
        memory.pool.check([])
    assert memory.pool.available == most


def test_what_lies_behind_the_window_stays_cached_while_there_is_room() -> None:
    memory = memory_of(100, window=AttentionWindow(tokens=40, step=1000))
    ended(memory, tokens((1, 500)), output=30)
    again = start(memory, tokens((1, 500)))
    assert again.committed == 496
    assert memory.pool.use.held == pages(500 + 50 + 50) - (496 - 40 + 1) // PAGE
    memory.run(ScheduledSequence(again, 4), [1])
    memory.pool.check([again])
    memory.pool.close(again)
    assert cached(memory, tokens((1, 300))) == 288


def test_a_prefix_whose_beginning_was_given_up_for_others_is_computed_again() -> None:
    memory = memory_of(60, window=AttentionWindow(tokens=40, step=1000))
    first = start(memory, tokens((1, 500)))
    memory.run(ScheduledSequence(first, 500), [1])
    memory.pool.trim(first)
    other = start(memory, tokens((2, 500)))  # takes pages behind the window of the first one
    memory.pool.check([first, other])
    memory.pool.close(first)
    assert cached(memory, tokens((1, 500))) < 480
    memory.pool.close(other, keep=False)
    memory.pool.check([])
    assert memory.pool.available == 60


def test_what_a_sequence_gave_up_is_forgotten_with_the_rest() -> None:
    memory = memory_of(100, window=AttentionWindow(tokens=40, step=1000))
    sequence = start(memory, tokens((1, 500)))
    memory.run(ScheduledSequence(sequence, 500), [1])
    memory.pool.trim(sequence)
    memory.pool.close(sequence, keep=False)
    assert memory.pool.use.cached == 0
    assert start(memory, tokens((1, 500))).committed == 0


def test_what_is_known_of_a_waiting_sequence_follows_what_becomes_cached_and_what_is_forgotten() -> None:
    memory = memory_of(500)
    ended(memory, tokens((1, 1000)))
    waiting = make_sequence("r", tokens((1, 1500)), StopParams(1), tenant="a")
    assert memory.pool.cached(waiting) == 992
    ended(memory, tokens((1, 1200)))
    assert memory.pool.cached(waiting) == 1200
    other = make_sequence("r", tokens((2, 500 * PAGE - 1100)), StopParams(1), tenant="b")
    assert memory.pool.open(other)  # takes the end of the prefix
    assert memory.pool.cached(waiting) < 1100
    memory.pool.check([other])
    memory.pool.leave(waiting)
    assert waiting.cached_prefix is None
