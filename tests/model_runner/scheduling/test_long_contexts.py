"""Contexts of 100,000 tokens: what the scheduler does with pages grows neither with their number nor with who waits."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.kv_pool import KVPool
from draftwood_model_runner.scheduling.page_pool import PagePool
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


def calls_beside(waiting: int, work: str) -> int:
    """Calls to close or open a sequence while others with its prompt wait."""
    pool = pool_for(2)
    sequence, waiters = opened(pool, 1), [prompt_of(1) for _ in range(waiting)]
    if work == "open":
        pool.close(sequence)
        sequence = prompt_of(1)
        assert pool.cached(sequence) > TOKENS - 2 * PAGE
    assert all(pool.cached(waiter) > TOKENS - 2 * PAGE for waiter in waiters)
    count = calls_of(lambda: pool.open(sequence) if work == "open" else pool.close(sequence, keep=work == "close"))
    for waiter in waiters:
        assert pool.cached(waiter) == (0 if work == "drop" else (TOKENS - 1) // PAGE * PAGE)
        assert pool.shortfall_of_waiting(waiter) <= 0
    pool.check([sequence] if work == "open" else [], waiters)
    return count


@pytest.mark.parametrize("work", ["open", "close", "drop"])
def test_a_sequence_costs_the_same_whoever_waits(work: str) -> None:
    alone = calls_beside(0, work)
    assert calls_beside(64, work) == alone
    assert alone < 100 or work != "close"


def test_who_gives_way_is_found_with_one_look_at_each() -> None:
    pool = pool_for(STREAMS)
    running = [opened(pool, seed, TOKENS // 10) for seed in range(STREAMS)]
    held = sum(pool.pages(sequence).size for sequence in running)
    assert pool.victims(running, held) == running
    assert pool.victims(running, held + 1) is None
    assert pool.victims(running, 1) == running[:1]
    few, all_ = (calls_of(lambda count=count: pool.victims(running[:count], held)) for count in (8, STREAMS))  # type: ignore[misc]
    assert all_ < 2 * few * STREAMS / 8


def test_a_waiting_request_hashes_each_block_once() -> None:
    """However often it is looked up; and so does one that runs, at the end of each block that it writes."""
    pool = pool_for(3)
    running, waiting = opened(pool, 1), prompt_of(1)
    assert calls_of(lambda: pool.shortfall_of_waiting(waiting)) > TOKENS // PAGE
    assert calls_of(lambda: (pool.shortfall_of_waiting(waiting), pool.cached(waiting))) < 100

    def write_block() -> None:
        running.output.extend(range(PAGE))
        running.committed += PAGE
        if pool.is_short(running):
            pool.grow(running)
        pool.record(running)

    assert max(calls_of(write_block) for _ in range(100)) < 100
