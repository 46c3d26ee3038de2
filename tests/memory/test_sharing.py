"""What one process learns, others draft from: through a real server."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from draftwood_memory import Memory, MemoryConfig, MemoryName, RedisClient, memory_thread
from draftwood_memory.memory import StrategyUse
from draftwood_memory.operations import ExportMemory, GetStatistics, ListOrphans, PurgeMemory
from draftwood_memory.resident import StrategyKey
from draftwood_memory.store.encryption import read_keys
from draftwood_memory.store.naming import memories_key
from draftwood_service.quotas import RateLimits
from draftwood_service.quotas.shared import SharedLimiter
from draftwood_tenants.resources.redis import RedisResources, ResourceCipher
from draftwood_tenants.resources.store import Cursor, Write
from tests.memory.helpers import (
    FINGERPRINT,
    KEY_A,
    KEY_B,
    NAMES,
    agreed,
    learn_output,
    learned_by,
    log_of,
    memory_of,
    numbers,
    perform,
    replicas,
    resident,
    started,
    stopped,
    stored,
    strategy_of,
    stream_of,
    tokens_of,
    until,
)
from tests.memory.servers import Proxy, Valkey, cluster


async def test_answers_reach_the_other_replicas_in_a_tenth_of_a_second(server: Valkey) -> None:
    async with replicas(3, server.url) as memories:
        for memory in memories:
            await strategy_of(memory, "t")
        await until(lambda: all(memory.thread.follower and memory.thread.follower.reading for memory in memories))
        for attempt in range(10):  # other work on the machine may hold up most of one attempt
            lags = [await _lag(memories, number) for number in range(30 * attempt, 30 * (attempt + 1))]
            if median(lags) < 0.1:
                break
        assert median(lags) < 0.1
        assert len(await agreed(memories, "t")) == 30 * (attempt + 1)  # once each


async def _lag(memories: list[Memory], number: int) -> float:
    """Seconds until all processes know what one of them has learned."""
    expected = numbers(40, 50 * number)
    await learn_output(memories[number % len(memories)], "t", expected)
    began = time.monotonic()
    await until(lambda: all(expected in learned_by(memory, "t") for memory in memories))
    return time.monotonic() - began


async def test_a_new_process_loads_what_others_have_learned(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        for number in range(300):
            await learn_output(first, "t", numbers(20, number))
        await until(lambda: not first.outbox.pending)
    async with started(memory_of(server.url), preload=1, strategy="trie") as second:
        await until(lambda: second.preloaded)
        assert learned_by(second, "t") == sorted(numbers(20, number) for number in range(300))


async def test_a_memory_that_loads_late_reaches_the_request_that_began_without_it(server: Valkey) -> None:
    async with replicas(2, server.url) as [first, second]:
        await learn_output(first, "t", numbers(20))
        await until(lambda: not first.outbox.pending)
        await until(lambda: second.healthy)
        delivered: list[Any] = []
        server.pause()
        try:
            use = StrategyUse(MemoryName("t"), StrategyKey("trie"))
            assert second.fetch(use, delivered.append) is None
            await until(lambda: len(delivered) == 1)
            assert (delivered[0].tokens, second.counters().late) == (0, 1)
        finally:
            server.resume()
        await until(lambda: len(delivered) == 2)
        assert delivered[1].tokens == 20
        assert delivered[1] is await strategy_of(second, "t")
        assert second.counters().late == 1


async def test_a_returning_request_reads_on(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory that no request has used for a while is not followed; the next request catches up."""
    monkeypatch.setattr("draftwood_memory.resident.LIVE_SECONDS", 0.1)
    async with replicas(2, server.url) as [first, second]:
        await strategy_of(second, "t")
        unused = resident(second, "t")
        await until(lambda: unused.loaded and not unused.live)
        await learn_output(first, "t", numbers(10))
        await until(lambda: not first.outbox.pending)
        await strategy_of(second, "t")
        await until(lambda: learned_by(second, "t") == [numbers(10)])


async def test_the_newest_records_are_kept(server: Valkey) -> None:
    config = MemoryConfig(tokens=2000, bytes=1 << 20)
    async with replicas(2, server.url, config=config) as memories:
        for number in range(60):
            await learn_output(memories[0], "t", numbers(90, 100 * number))
        await strategy_of(memories[1], "t")
        newest = [numbers(90, 100 * number) for number in range(38, 60)]
        await until(lambda: all(log_of(memory, "t") == newest for memory in memories))
        await until(lambda: not memories[0].outbox.pending)
    async with replicas(1, server.url, config=config) as [later]:
        await strategy_of(later, "t")
        await until(lambda: log_of(later, "t") == newest and learned_by(later, "t")[-20:] == newest[-20:])


async def test_the_stream_keeps_to_its_bytes(server: Valkey) -> None:
    async with replicas(1, server.url, config=MemoryConfig(bytes=1 << 16)) as [memory]:
        for number in range(300):
            await learn_output(memory, "t", [(number * 7919 + i * i) % 30_000 for i in range(300)])
            if number % 4 == 0:
                await until(lambda: not memory.outbox.pending)
        await until(lambda: not memory.outbox.pending)
        used = server.client.memory_usage(stream_of(memory, "t"), samples=0)
        assert isinstance(used, int)
        assert used < 1.5 * (1 << 16)
        assert 10_000 < resident(memory, "t").log.tokens <= (1 << 16) // 4


async def test_another_model_reads_nothing(server: Valkey) -> None:
    async with replicas(1, server.url) as [first], replicas(1, server.url, fingerprint="e" * 16) as [other]:
        await stored([first], "t", numbers(20))
        await strategy_of(other, "t")
        await until(lambda: resident(other, "t").loaded)
        assert log_of(other, "t") == []


async def test_an_entry_that_cannot_be_read_costs_itself(server: Valkey) -> None:
    async with replicas(1, server.url) as [first]:
        await stored([first], "t", numbers(20))
        for value in (b"", b"\x00", b"\x00\x01" + bytes(40), b"\x07new", b"\x01\x01k" + bytes(60)):
            server.client.xadd(stream_of(first, "t"), {"e": value})
        server.client.xadd(stream_of(first, "t"), {"other": b"field"})
        await until(lambda: first.counters().unreadable == 5)
        assert await stored([first], "t", numbers(21)) == [numbers(20), numbers(21)]
        assert first.healthy
    async with replicas(1, server.url) as [second]:
        assert await agreed([second], "t") == [numbers(20), numbers(21)]
        assert second.counters().unreadable == 5


async def test_nothing_in_the_store_can_be_read_without_a_key(server: Valkey) -> None:
    keys = read_keys(f"{NAMES}\nk1={KEY_A}", "keys")
    secret = [4242, 17] * 64
    async with replicas(1, server.url, keys=keys) as [first]:
        await stored([first], "acme-secret", secret)
    dump = b"".join(server.client.dump(key) + key for key in server.client.scan_iter())
    assert b"acme" not in dump
    assert b"".join(token.to_bytes(2, "little") for token in secret[:2]) not in dump
    async with replicas(1, server.url) as [plain]:
        await strategy_of(plain, "acme-secret")
        await until(lambda: resident(plain, "acme-secret").loaded)
        assert log_of(plain, "acme-secret") == []


async def test_keys_can_be_rotated_and_a_wrong_one_costs_the_entries(server: Valkey) -> None:
    old = read_keys(f"{NAMES}\nk1={KEY_A}", "keys")
    new = read_keys(f"{NAMES},k2={KEY_B},k1={KEY_A}", "keys")
    newest = read_keys(f"{NAMES},k2={KEY_B}", "keys")
    async with replicas(1, server.url, keys=old) as [first]:
        await stored([first], "t", numbers(20))
    async with replicas(1, server.url, keys=new) as [second]:
        assert await agreed([second], "t") == [numbers(20)]
        await stored([second], "t", numbers(10))
    async with replicas(1, server.url, keys=newest) as [third]:
        assert await agreed([third], "t") == [numbers(10)]
        assert (third.counters().unreadable, third.healthy) == (1, True)


async def test_entries_moved_to_another_tenant_do_not_decrypt(server: Valkey) -> None:
    async with replicas(1, server.url, keys=read_keys(f"{NAMES},k1={KEY_A}", "keys")) as [memory]:
        await stored([memory], "victim", numbers(50))
        server.client.copy(stream_of(memory, "victim"), stream_of(memory, "thief"))
        server.client.delete(memories_key(FINGERPRINT))
        await strategy_of(memory, "thief")
        await until(lambda: memory.counters().unreadable > 0 and resident(memory, "thief").loaded)
        assert log_of(memory, "thief") == learned_by(memory, "thief") == []


async def test_time_to_live(server: Valkey) -> None:
    async with replicas(1, server.url, config=MemoryConfig(ttl=100.0)) as [memory]:
        await stored([memory], "t", numbers(20))
        key = stream_of(memory, "t")
        assert 0 < server.client.pttl(key) <= 100_000
        server.client.delete(key)  # as it does when the time is over
        resident(memory, "t").changed_at -= 100.0
        await until(lambda: log_of(memory, "t") == [] == server.client.keys("dw:*:3:*"))


async def test_what_no_process_uses_expires(server: Valkey) -> None:
    async with replicas(1, server.url, config=MemoryConfig(orphan_ttl=100.0)) as [memory]:
        await stored([memory], "t", numbers(20))
        key = stream_of(memory, "t")
        server.client.pexpire(key, 50_000)
    async with replicas(1, server.url, config=MemoryConfig(orphan_ttl=100.0)) as [memory]:
        await agreed([memory], "t")  # to load it is to use it
        await until(lambda: server.client.pttl(key) > 90_000)
    async with replicas(1, server.url, config=MemoryConfig(orphan_ttl=0.0)) as [memory]:
        await stored([memory], "t", numbers(21))
        assert server.client.pttl(key) == -1


ROOT = Path(__file__).parents[2]
OF_THE_LIBRARY = {"client|setname", "cluster|slots", "command", "select"}


def documented_rights() -> list[str]:
    """What docs/memory.md says that the store's user needs."""
    [rights] = re.findall(r"^ACL SETUSER (.*?)^```", (ROOT / "docs/memory.md").read_text(), re.DOTALL | re.MULTILINE)
    return str(rights).replace("\\\n", " ").split()


def test_the_documented_rights_are_for_the_commands_that_are_sent(server: Valkey) -> None:
    known = {name.decode().upper() for name in server.client.execute_command("COMMAND LIST")} - {"READONLY"}
    sent = set[str]()
    for package in ("memory", "tenants", "service"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text()
            if "redis" in text or ".command(" in text:
                sent |= {*re.findall(r"[\"']([A-Z]+)[\"']", text)} & known
    commands = {"memory|usage" if word == "MEMORY" else word.lower() for word in sent}
    granted = {right[1:] for right in documented_rights() if right.startswith("+")}
    assert granted == commands | OF_THE_LIBRARY


async def test_a_restricted_user_is_enough(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_thread, "_LAST_ROUND_SECONDS", 0.1)
    server.client.execute_command("ACL", "LOG", "RESET")
    server.client.execute_command("ACL", "SETUSER", *documented_rights())
    url = f"redis://draftwood:PASSWORD@127.0.0.1:{server.port}/1"
    async with replicas(2, url) as memories:
        assert await stored(memories, "t", numbers(12)) == [numbers(12)]
        assert (await perform(GetStatistics(None), memories[1])).memories
        assert (await perform(PurgeMemory("t"), memories[1])).tokens == 12
    limiter = SharedLimiter(RedisClient(url), answer_seconds=2.0)
    reservation = await limiter.reserve("t", RateLimits(5, 100, 5), 10)
    await limiter.refresh()
    reservation.release(5)
    await reservation.released()
    await limiter.close()
    assert limiter.outages == 0
    resources = RedisResources(RedisClient(url), ResourceCipher(None))
    [first] = await resources.write([Write("tenants", "a", b"1", 0)])
    await resources.write([Write("tenants", "a", b"2", first)])
    await resources.changes(Cursor())
    await resources.close()
    assert server.client.execute_command("ACL", "LOG") == []
    async with replicas(1, f"redis://draftwood:wrong@127.0.0.1:{server.port}") as [refused]:
        await learn_output(refused, "t", numbers(3))
        await until(lambda: refused.thread.failing)
        assert refused.outbox.pending == 1


async def test_a_restricted_user_is_enough_on_a_cluster() -> None:
    with cluster() as nodes:
        for node in nodes:
            node.client.execute_command("ACL", "SETUSER", *documented_rights())
        async with replicas(2, f"redis+cluster://draftwood:PASSWORD@127.0.0.1:{nodes[0].port}") as memories:
            assert await stored(memories, "t", numbers(12)) == [numbers(12)]
            assert (await perform(PurgeMemory("t"), memories[1])).tokens == 12
        assert [node.client.execute_command("ACL LOG") for node in nodes] == [[]] * 3


async def test_without_requests_the_store_is_left_alone(server: Valkey, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_thread, "_ROUND_SECONDS", 1.0)
    limit = 7 * 5 + 6  # looks at purges, of seven commands each, and others

    async def commands_in_a_second() -> int:
        before: int = server.client.info("stats")["total_commands_processed"]
        await asyncio.sleep(1.0)
        return int(server.client.info("stats")["total_commands_processed"]) - before

    async with replicas(1, server.url) as [memory]:
        for number in range(50):
            await learn_output(memory, f"t{number}", numbers(20))
        await until(lambda: not memory.outbox.pending)
        for _ in range(10):  # until all memories have their indexes
            if (commands := await commands_in_a_second()) < limit:
                break
        assert commands < limit
        assert MemoryName("t0") in memory.residents


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
                await until(lambda: all(resident(memory, "t").aged_at for memory in (first, wrong)))
                assert len(await agreed([first, wrong], "t")) == 41
                assert await perform(ListOrphans(), wrong) == []
                records = await perform(ExportMemory(MemoryName("t")), first)
                assert all(abs(record.learned_at - right()) < 60 for record in records)
                side = "ahead of" if hours > 0 else "behind"
                found = [re.findall(rf"clock is (\d+) s {side} the store's", message) for message in caplog.messages]
                seconds = [int(one) for [one] in filter(None, found)]
                assert seconds == pytest.approx([7200, 7200], abs=60)  # one for each process, both in this one here


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


OUTPUTS = [numbers(40, start=100 * n) for n in range(5)]


@pytest.mark.parametrize("away", [False, True], ids=["is slow", "comes back"])
async def test_the_last_answers_reach_a_store_that(server: Valkey, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    monkeypatch.setattr(memory_thread, "_LAST_ROUND_SECONDS", 30.0)
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=0.3 if away else 10.0) as [memory]:
        await strategy_of(memory, "t")
        if away:
            proxy.open.clear()
        proxy.delay = 0.0 if away else 0.3
        for output in OUTPUTS:
            await learn_output(memory, "t", output)
        failures = memory.counters().failures
        stopping = asyncio.create_task(stopped(memory))
        if away:  # and is missed by what comes after the stop
            await until(lambda: memory.thread._stopped and memory.counters().failures > failures + 1)
            proxy.open.set()
        await stopping
        assert memory.outbox.pending == 0
    async with replicas(1, server.url) as later:
        assert sorted(await agreed(later, "t")) == OUTPUTS


async def test_a_store_that_stays_away_does_not_keep_the_process(server: Valkey) -> None:
    async with Proxy(server.port) as proxy, replicas(1, proxy.url, timeout=0.3) as memories:
        await strategy_of(memories[0], "t")
        proxy.open.clear()
        await learn_output(memories[0], "t", OUTPUTS[0])
        began = time.monotonic()
        await asyncio.to_thread(memories[0].stop)
        assert time.monotonic() - began < 10
        assert memories[0].outbox.pending == 1
