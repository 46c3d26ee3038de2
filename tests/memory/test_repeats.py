"""A request that is sent again adds what is new in its answer to the memory once, on whichever replica it runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draftwood_memory import Memory, MemoryName
from draftwood_memory.local.resident import OVERLAP
from tests.memory.helpers import agreed, learned_by, log_of, numbers, replicas, strategy_of, tokens_of, until
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
        assert sorted(learned_by(memory, "t"), key=len) == sorted([answer[:written], answer[begin:]], key=len)
        for _ in range(3):
            assert await attempt(memory, answer)
        assert (len(log_of(memory, "t")), memory.counters().learned) == (2, 2)


ANSWER, OTHER = numbers(100), [*numbers(40), *numbers(60, 5000)]


@pytest.mark.parametrize(
    ("attempts", "learned"),
    [
        ([(ANSWER[:n],) for n in (30, 60, 40, 100, 100)],
         [ANSWER[:30], ANSWER[30 - OVERLAP : 60], ANSWER[60 - OVERLAP :]]),
        ([(ANSWER[:60],), (OTHER,)], [ANSWER[:60], OTHER[40 - OVERLAP :]]),
        ([(ANSWER, *of) for of in (("r", 0), ("r", 1), ("s", 0), ("", 0), ("", 0))], [ANSWER] * 5),
    ],
    ids=["each adds what is new", "another answer from where it differs", "samples and other requests each"],
)  # fmt: skip
async def test_what_attempts_add(attempts: list[Any], learned: list[list[int]]) -> None:
    async with replicas(1, None) as [memory]:
        for one in attempts:
            await attempt(memory, *one)
        assert log_of(memory, "t") == learned


async def test_long_answers_are_compared_over_all_their_records() -> None:
    async with replicas(1, None) as [memory]:
        answer = np.random.default_rng(0).integers(0, 30_000, 20_000).tolist()
        await attempt(memory, answer[:17_000])
        await attempt(memory, answer)
        assert [len(one) for one in log_of(memory, "t")] == [8192, 8192, 17_000 - 2 * 8192, 3000 + OVERLAP]


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
