"""A request that is sent again teaches what is new in its answer, once, on whichever replica it runs."""

from __future__ import annotations

import numpy as np
import pytest

from draftwood_memory import Memory, MemoryName
from draftwood_memory.local.resident import OVERLAP
from tests.memory.helpers import agreed, known_to, log_of, numbers, replicas, strategy_of, tokens_of, until
from tests.memory.servers import Valkey

NAME = MemoryName("t")


async def attempt(memory: Memory, answer: list[int], request: str = "r", sample: int = 0) -> bool:
    """A request that wrote an answer; returns whether it was known as repeated. Its drafter learns if it was not."""
    strategy = await strategy_of(memory, "t")
    with memory.learning(NAME, strategy, request=request) as scope:
        if not scope.repeated:
            strategy.learn(tokens_of(*answer))
        scope.learn(tokens_of(*answer), sample)
    return scope.repeated


@pytest.mark.parametrize("written", [1, 10, 40, 99])
async def test_after_a_cancelled_attempt_the_retry_is_learned_in_full(written: int) -> None:
    async with replicas(1, None) as [memory]:
        answer = numbers(100)
        assert not await attempt(memory, answer[:written])
        assert await attempt(memory, answer)
        begin = max(0, written - OVERLAP)
        assert log_of(memory, "t") == [answer[:written], answer[begin:]]
        assert sorted(known_to(memory, "t"), key=len) == sorted([answer[:written], answer[begin:]], key=len)
        for _ in range(3):
            assert await attempt(memory, answer)
        assert (len(log_of(memory, "t")), memory.counters().learned) == (2, 2)


async def test_three_attempts_each_add_what_is_new() -> None:
    async with replicas(1, None) as [memory]:
        answer = numbers(100)
        for written in (30, 60, 40, 100, 100):
            await attempt(memory, answer[:written])
        assert log_of(memory, "t") == [answer[:30], answer[30 - OVERLAP : 60], answer[60 - OVERLAP :]]


async def test_an_answer_that_differs_is_learned_from_where_it_does() -> None:
    async with replicas(1, None) as [memory]:
        first, second = numbers(60), [*numbers(40), *numbers(60, 5000)]
        await attempt(memory, first)
        await attempt(memory, second)
        assert log_of(memory, "t") == [first, second[40 - OVERLAP :]]


async def test_long_answers_are_compared_over_all_their_records() -> None:
    async with replicas(1, None) as [memory]:
        answer = np.random.default_rng(0).integers(0, 30_000, 20_000).tolist()
        await attempt(memory, answer[:17_000])
        await attempt(memory, answer)
        assert [len(one) for one in log_of(memory, "t")] == [8192, 8192, 17_000 - 2 * 8192, 3000 + OVERLAP]


async def test_samples_and_other_requests_are_learned_each() -> None:
    async with replicas(1, None) as [memory]:
        for request, sample in (("r", 0), ("r", 1), ("s", 0), ("", 0), ("", 0)):
            await attempt(memory, numbers(30), request, sample)
        assert len(log_of(memory, "t")) == 5


@pytest.mark.parametrize("written", [1, 40, 100])
async def test_another_replica_knows_what_was_learned(server: Valkey, written: int) -> None:
    async with replicas(2, server.url) as [first, second]:
        answer = numbers(100)
        await attempt(first, answer[:written])
        await agreed([first, second], "t")
        assert await attempt(second, answer)
        expected = [answer[:written]] if written == 100 else [answer[:written], answer[max(0, written - OVERLAP) :]]
        await until(lambda: not second.outbox.pending)
        assert await agreed([first, second], "t") == sorted(expected)
    async with replicas(1, server.url) as [later]:
        await agreed([later], "t")
        assert await attempt(later, answer)
        assert len(log_of(later, "t")) == len(expected)
