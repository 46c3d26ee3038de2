"""Contexts of 100,000 tokens: what the scheduler does with pages grows neither with their number nor with who waits."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling import prefix_cache
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.page_pool import PagePool
from draftwood_model_runner.scheduling.page_table import GROWTH
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.counting import calls_of
from tests.model_runner.sequences import make_sequence

PAGE, TOKENS, STREAMS = 16, 100_000, 64


def prompt_of(seed: int, tokens: int = TOKENS) -> Sequence:
    prompt = np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)
    return make_sequence(str(seed), prompt, StopParams(10_000), tenant="a")


def opened(pool: KVPool, seed: int, tokens: int = TOKENS) -> Sequence:
    sequence = prompt_of(seed, tokens)
    assert pool.open(sequence)
    sequence.committed = tokens
    pool.record(sequence)
    return sequence


def pool_for(streams: int) -> KVPool:
    return KVPool(streams * (TOKENS // PAGE + 700), PAGE)


def test_taking_pages_looks_at_no_others() -> None:
    pages = PagePool(STREAMS * TOKENS // PAGE)
    everything = pages.allocate(pages.num_free)
    pages.free(pages.release(everything[::2]))  # no page has a free neighbour
    assert calls_of(lambda: pages.allocate(5)) < 300
    pages.free(pages.release(everything[1::2]))
    assert calls_of(lambda: pages.allocate(1000)) < 100


@pytest.mark.parametrize("keep", [True, False])
def test_closing_costs_the_same_whoever_waits(keep: bool) -> None:
    counts = []
    for waiting in (0, 64):
        pool = pool_for(2)
        sequence = opened(pool, 1)
        waiters = [prompt_of(1) for _ in range(waiting)]
        assert all(pool.cached(one) > TOKENS - 2 * PAGE for one in waiters)
        counts.append(calls_of(lambda pool=pool, sequence=sequence: pool.close(sequence, keep)))  # type: ignore[misc]
        for one in waiters:
            assert pool.cached(one) == (0 if not keep else (TOKENS - 1) // PAGE * PAGE)
            assert pool.shortfall_of_waiting(one) <= 0
        pool.check([], waiters)
    assert counts[0] == counts[1]
    if keep:
        assert counts[0] < 100


def test_opening_from_the_cache_is_no_work_for_those_who_wait() -> None:
    counts = []
    for waiting in (0, 64):
        pool = pool_for(2)
        pool.close(opened(pool, 1))
        sequence, *waiters = [prompt_of(1) for _ in range(1 + waiting)]
        for one in (sequence, *waiters):
            pool.cached(one)
        counts.append(calls_of(lambda pool=pool, sequence=sequence: pool.open(sequence)))  # type: ignore[misc]
        pool.check([sequence], waiters)
    assert counts[0] == counts[1]


def test_who_gives_way_is_found_with_one_look_at_each() -> None:
    pool = pool_for(STREAMS)
    running = [opened(pool, seed, TOKENS // 10) for seed in range(STREAMS)]
    looks: list[Sequence] = []
    pages = pool.pages
    pool.pages = lambda sequence: looks.append(sequence) or pages(sequence)  # type: ignore[func-returns-value,method-assign]
    held = sum(pages(one).size for one in running)
    assert pool.victims(running, held) == running
    assert looks == running
    assert pool.victims(running, held + 1) is None
    assert pool.victims(running, 1) == running[:1]


def test_a_waiting_request_hashes_each_block_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is looked up."""
    hashed = 0

    def counting(block: bytes) -> Any:
        nonlocal hashed
        hashed += 1
        return sha256(block)

    monkeypatch.setattr(prefix_cache, "sha256", counting)
    pool = pool_for(3)
    running = opened(pool, 1)
    hashed = 0
    waiting = prompt_of(1)
    pool.shortfall_of_waiting(waiting)
    assert hashed <= TOKENS // PAGE + 1  # and the tenant
    hashed = 0
    for _ in range(100):
        pool.shortfall_of_waiting(waiting)
        pool.cached(waiting)
    assert hashed == 0
    # Of what a sequence writes, too, each block is hashed once, at its end.
    hashed = 0
    for _ in range(100):
        running.output.extend(range(PAGE))
        running.committed += PAGE
        if pool.is_short(running):
            pool.grow(running)
        pool.record(running)
    pool.close(running)
    assert hashed == 100
    assert GROWTH > PAGE
