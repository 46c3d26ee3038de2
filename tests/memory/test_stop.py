"""What a process has learned is in the store when the memory has stopped, also if the store is slow or away a while."""

from __future__ import annotations

import asyncio
import time

from tests.memory.helpers import agreed, learn_output, numbers, replicas, strategy_of
from tests.memory.servers import Proxy, Valkey

OUTPUTS = [numbers(40, start=100 * n) for n in range(5)]


async def assert_stored(server: Valkey) -> None:
    async with replicas(1, server.url) as later:
        assert sorted(await agreed(later, "t")) == OUTPUTS


async def test_the_last_answers_reach_a_slow_store(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=3.0) as memories:
        await strategy_of(memories[0], "t")
        proxy.delay = 0.3
        for output in OUTPUTS:
            await learn_output(memories[0], "t", output)
        await asyncio.to_thread(memories[0].stop)
        assert memories[0].outbox.pending == 0
    await assert_stored(server)


async def test_the_last_answers_reach_a_store_that_comes_back(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=0.3) as memories:
        await strategy_of(memories[0], "t")
        proxy.open.clear()
        for output in OUTPUTS:
            await learn_output(memories[0], "t", output)
        stopping = asyncio.create_task(asyncio.to_thread(memories[0].stop))
        await asyncio.sleep(1.0)
        proxy.open.set()
        await stopping
        assert memories[0].outbox.pending == 0
    await assert_stored(server)


async def test_a_store_that_stays_away_does_not_keep_the_process(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=0.3) as memories:
        await strategy_of(memories[0], "t")
        proxy.open.clear()
        await learn_output(memories[0], "t", OUTPUTS[0])
        began = time.monotonic()
        await asyncio.to_thread(memories[0].stop)
        assert time.monotonic() - began < 10
        assert memories[0].outbox.pending == 1
