"""Records age by the store's clock, whatever those of the processes say."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from draftwood_memory import MemoryConfig, MemoryName
from draftwood_memory.operations import ExportMemory, ListOrphans
from tests.memory.helpers import (
    agreed,
    learn_output,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    resident,
    started,
    stored,
    tokens_of,
    until,
)
from tests.memory.servers import Valkey

HOUR = 3600.0


@pytest.mark.parametrize("hours", [2, -2])
async def test_a_wrong_clock_deletes_nothing_and_is_logged_once(
    server: Valkey, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hours: int
) -> None:
    config, right = MemoryConfig(max_age=HOUR, ttl=HOUR), time.time
    async with replicas(1, server.url, config=config) as [first]:
        for number in range(40):
            await stored([first], "t", numbers(20, number))
        monkeypatch.setattr(time, "time", lambda: right() + hours * HOUR)
        with caplog.at_level(logging.WARNING):
            async with replicas(1, server.url, config=config) as [wrong]:
                assert len(await agreed([first, wrong], "t")) == 40
                for memory in (first, wrong):
                    resident(memory, "t").aged_at = 0.0
                    memory.thread.wake()
                await learn_output(wrong, "t", numbers(20, 100))
                await asyncio.sleep(0.2)
                assert len(await agreed([first, wrong], "t")) == 41
                assert await perform(ListOrphans(), wrong) == []
                records = await perform(ExportMemory(MemoryName("t")), first)
                assert all(abs(one.learned_at - right()) < 60 for one in records)
                logged = [one for one in caplog.messages if "clock is" in one]
                side = "ahead of" if hours > 0 else "behind"
                assert len(logged) == 2  # one for each process, both in this one here
                assert all(f"7200 s {side} the store's" in one for one in logged)


async def test_what_was_learned_before_the_store_was_reached_has_its_age_by_the_stores_clock(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 2 * HOUR)
    late = memory_of(server.url)
    with late.learning(MemoryName("t")) as request:
        request.learn(tokens_of(*numbers(30)))
    async with started(late):
        await until(lambda: late.outbox.pending == 0)
    async with replicas(1, server.url) as [memory]:
        await agreed([memory], "t")
        [record] = await perform(ExportMemory(MemoryName("t")), memory)
        assert abs(record.learned_at - right()) < 60


@pytest.mark.system
async def test_what_is_too_old_by_the_stores_clock_goes(server: Valkey) -> None:
    config = MemoryConfig(max_age=3.0)
    async with replicas(1, server.url, config=config) as [memory]:
        await stored([memory], "t", numbers(20))
        await until(lambda: log_of(memory, "t") == [], 8.0)
