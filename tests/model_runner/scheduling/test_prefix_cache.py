"""Which prefixes are found, who may find them, and that they always hold what they are found for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Values
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, rule

from model_runner.request import StopParams
from model_runner.scheduling.kv_pool import KVPool, size_class
from model_runner.scheduling.prefix_cache import PREFIX_BLOCK, block_hashes, common_prefix
from model_runner.scheduling.scheduler import Work
from model_runner.sequence import Sequence
from strategies.draft import Int32Array
from tests.model_runner.fake_kv import FakeStore, run
from tests.model_runner.sequences import make_sequence

LARGEST = 500


def pool_of(capacity: int, prefix_cache: bool = True) -> KVPool:
    return KVPool(FakeStore(capacity), capacity, LARGEST, prefix_cache)


def tokens(*parts: tuple[int, int]) -> Int32Array:
    """int32[n]: for each (token, count) that many of it."""
    return np.concatenate([np.full(count, token, np.int32) for token, count in parts])


def ended(pool: KVPool, prompt: Int32Array, tenant: str = "a", output: int = 1, keep: bool = True) -> None:
    """A sequence of that prompt ran and ended."""
    sequence = start(pool, prompt, tenant)
    run(pool, Work(sequence, sequence.length - sequence.committed), list(range(1000, 1000 + output)))
    pool.close(sequence, keep)
    pool.check([])


def start(pool: KVPool, prompt: Int32Array, tenant: str = "a") -> Sequence:
    sequence = make_sequence("r", prompt, StopParams(50), tenant=tenant, max_draft_nodes=50)
    assert pool.open(sequence)
    return sequence


@given(st.lists(st.integers(0, 2), max_size=70), st.lists(st.integers(0, 2), max_size=70), st.integers(0, 70))
def test_hashes_agree_as_far_as_tokens_do(a: list[int], b: list[int], common: int) -> None:
    left, right = np.array(a[:common] + b, np.int32), np.array(a, np.int32)
    expected = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right))
    )
    assert common_prefix(left, right) == common_prefix(right, left) == expected
    blocks = list(zip(block_hashes(left), block_hashes(right), strict=False))
    assert [x == y for x, y in blocks] == [(i + 1) * PREFIX_BLOCK <= expected for i in range(len(blocks))]
    hashes = list(block_hashes(left))
    assert hashes[1:] == list(block_hashes(left, hashes[:1]))


@given(st.integers(1, 10**6))
def test_size_classes_are_few_and_close(size: int) -> None:
    found = size_class(size)
    assert max(size, 128) <= found < max(1.5 * size, 129)
    assert found % 64 == 0
    assert size_class(found) == found


def test_the_next_chat_turn_takes_over_the_region_of_the_last_one() -> None:
    pool = pool_of(2000)
    ended(pool, tokens((1, 100)), output=20)
    before = pool.allocated_tokens
    second = start(pool, np.concatenate([tokens((1, 100)), np.arange(1000, 1020, dtype=np.int32), tokens((2, 9))]))
    assert second.committed == 100 + 19  # the last token's keys and values were never computed
    assert pool.allocated_tokens == pool.live_tokens
    assert pool.size(second) <= 2 * before
    pool.check([second])


def test_a_prefix_that_others_may_want_is_copied() -> None:
    pool = pool_of(2000)
    ended(pool, tokens((1, 64), (2, 40)))
    sequences = [start(pool, tokens((1, 64), (3, 40))) for _ in range(2)]
    assert [s.committed for s in sequences] == [64, 64]
    assert start(pool, tokens((1, 64), (2, 40), (4, 40))).committed == 104


@pytest.mark.parametrize("size", [PREFIX_BLOCK, PREFIX_BLOCK + 1, 100])
def test_the_last_token_is_always_computed(size: int) -> None:
    pool = pool_of(2000)
    ended(pool, tokens((1, size)), output=30)
    assert start(pool, tokens((1, size))).committed == size - 1


def test_a_live_sequences_prompt_serves_as_prefix() -> None:
    pool = pool_of(2000)
    first = start(pool, tokens((1, 80), (2, 50)))
    assert start(pool, tokens((1, 80), (3, 50))).committed == 0
    run(pool, Work(first, 70), [])
    pool.record(first)
    assert start(pool, tokens((1, 80), (4, 50))).committed == 70


def test_tenants_never_meet() -> None:
    pool = pool_of(2000)
    ended(pool, tokens((1, 100)), "a")
    live = start(pool, tokens((2, 100)), "a")
    run(pool, Work(live, 100), [7])
    pool.record(live)
    for prompt in (tokens((1, 100)), tokens((2, 100))):
        assert start(pool, prompt, "b").committed == 0
        assert start(pool, prompt, "a").committed == 99


def test_a_longer_answer_replaces_what_it_contains() -> None:
    pool = pool_of(4000)
    for _ in range(3):
        ended(pool, tokens((1, 100)), output=5)
    once = pool.allocated_tokens
    ended(pool, tokens((1, 90)))
    assert pool.allocated_tokens == once == size_class(100 + 100)
    ended(pool, tokens((1, 100), (2, 100)))
    assert pool.allocated_tokens == size_class(200 + 100)


def test_the_least_recently_used_prefix_yields_to_live_sequences() -> None:
    pool = pool_of(4 * 192)
    for token in (1, 2, 3):
        ended(pool, tokens((token, 80)))
    assert pool.allocated_tokens == 3 * 192
    used = start(pool, tokens((1, 32), (9, 48)))  # now 1 was used last
    assert used.committed == 32
    others = [start(pool, tokens((token, 80))) for token in (7, 8)]  # for these 2 and 3 must go
    assert pool.live_tokens == 3 * 192
    found = [pool.cached(make_sequence("r", tokens((token, 80)), StopParams(1), tenant="a")) for token in (1, 2, 3)]
    assert found == [79, 0, 0]
    pool.check([used, *others])


@pytest.mark.parametrize(("prefix_cache", "keep"), [(False, True), (True, False)])
def test_nothing_is_retained_where_it_must_not_be(prefix_cache: bool, keep: bool) -> None:
    pool = pool_of(2000, prefix_cache)
    ended(pool, tokens((1, 100)), keep=keep)
    assert pool.allocated_tokens == 0
    assert start(pool, tokens((1, 100))).committed == 0


def test_a_sequence_that_outgrows_its_region_moves_to_a_larger_one() -> None:
    pool = pool_of(2000)
    sequence = make_sequence("r", tokens((1, 20)), StopParams(400), max_draft_nodes=10)
    assert pool.open(sequence)
    sizes = [pool.size(sequence)]
    while len(sequence.output) < 400:
        if pool.is_short(sequence):
            assert pool.shortfall(sequence) <= 0
            assert pool.grow(sequence)
            sizes.append(pool.size(sequence))
        pending = sequence.length - sequence.committed
        run(pool, Work(sequence, pending), [len(sequence.output)] * 5)
        pool.check([sequence])
    assert sizes == [128, 256, 384, LARGEST]


prompts = st.lists(st.sampled_from([(1, 16), (2, 16), (3, 40), (4, 7)]), min_size=1, max_size=6)


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, write, grow and go in a pool that is too small; every row read holds what it should."""

    live = Values("live")

    @initialize(capacity=st.integers(LARGEST, 3 * LARGEST))
    def _make(self, capacity: int) -> None:
        self.pool = pool_of(capacity)
        self.running: list[Sequence] = []

    @rule(
        target=live,
        prompt=prompts,
        tenant=st.sampled_from("ab"),
        max_tokens=st.integers(1, 200),
        nodes=st.integers(0, 40),
    )
    def open(self, prompt: list[tuple[int, int]], tenant: str, max_tokens: int, nodes: int) -> Sequence:
        # Each tenant's tokens are its own, so that a row of another's would be seen.
        ids = tokens(*prompt) + np.int32(100 * ord(tenant))
        sequence = make_sequence("r", ids, StopParams(max_tokens), tenant=tenant, max_draft_nodes=nodes)
        fits = self.pool.live_tokens + size_class(min(64, max_tokens) + ids.size + nodes) <= self.pool.capacity
        if self.pool.open(sequence):
            self.running.append(sequence)
            assert sequence.committed < sequence.length
        else:
            assert not fits
        return sequence

    @rule(sequence=live, share=st.floats(0, 1), accepted=st.integers(1, 9))
    def step(self, sequence: Sequence, share: float, accepted: int) -> None:
        left = sequence.request.stop.max_tokens - len(sequence.output)
        if sequence not in self.running or left == 0:
            return
        if self.pool.is_short(sequence):
            if self.pool.shortfall(sequence) > 0:
                return
            assert self.pool.grow(sequence)
        pending = sequence.length - sequence.committed
        written = [7] * min(accepted, left, sequence.request.max_draft_nodes + 1)
        run(self.pool, Work(sequence, max(1, round(share * pending))), written)
        self.pool.record(sequence)

    @rule(sequence=consumes(live), keep=st.booleans())
    def close(self, sequence: Sequence, keep: bool) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
            self.pool.close(sequence, keep)

    @invariant()
    def lawful(self) -> None:
        self.pool.check(self.running)


TestPool = PoolMachine.TestCase
