"""Which prefixes are found and kept, and who holds which pages. `test_scheduler` looks at what is in the pages."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.kv_pool import GROWTH, AttentionWindow, KVPool
from draftwood_model_runner.scheduling.page_pool import PagePool
from draftwood_model_runner.scheduling.scheduler import ScheduledSequence
from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.arrays import Int32Array
from tests.model_runner.fake_kv import FakeMemory
from tests.model_runner.sequences import make_sequence

PAGE = 16


def memory_of(pages: int, prefix_cache: bool = True, window: AttentionWindow | None = None) -> FakeMemory:
    return FakeMemory(KVPool(pages, PAGE, prefix_cache, window=window))


def tokens(*parts: tuple[int, int]) -> Int32Array:
    """int32[n]: for each (token, count) that many of it."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def ended(memory: FakeMemory, prompt: Int32Array, tenant: str = "", output: int = 1, keep: bool = True) -> None:
    """A sequence of that prompt ran and ended."""
    sequence = start(memory, prompt, tenant)
    memory.run(ScheduledSequence(sequence, sequence.length - sequence.committed), list(range(1000, 1000 + output)))
    memory.pool.close(sequence, keep)
    memory.pool.check([])


def cached(memory: FakeMemory, prompt: Int32Array) -> int:
    """Tokens of it that a waiting sequence would find."""
    return memory.pool.cached(make_sequence("r", prompt, StopParams(1)))


def start(memory: FakeMemory, prompt: Int32Array, tenant: str = "") -> Sequence:
    sequence = make_sequence("r", prompt, StopParams(50), tenant=tenant, max_draft_nodes=50)
    assert memory.pool.open(sequence)
    return sequence


def pages(count: int) -> int:
    return -(-count // PAGE)


def test_what_begins_alike_is_held_once() -> None:
    memory = memory_of(100)
    ended(memory, tokens((1, 64), (2, 40)))
    sequences = [start(memory, tokens((1, 64), (3, 40))) for _ in range(2)]
    assert [sequence.committed for sequence in sequences] == [64, 64]
    first, second = (memory.pool.pages(sequence).tolist() for sequence in sequences)
    assert {*first} & {*second} == {*first[: 64 // PAGE]}


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


def test_tables_grow_in_place_on_both_sides() -> None:
    pool = PagePool(128)
    tables = [pool.allocate(3) for _ in range(4)]
    for _ in range(3):
        tables = [np.concatenate([table, pool.allocate(2, after=int(table[-1]))]) for table in tables]
    for table in tables:
        assert np.diff(table).tolist() == [1] * 8
    assert len({page for table in tables for page in table.tolist()}) == 36


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
