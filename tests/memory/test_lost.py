"""A store that lost records, or cannot serve them: the processes that have them go on, and give them back once."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.crc import key_slot

from draftwood_memory import Memory, RedisClient
from draftwood_memory.errors import (
    MemoryStoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
    WrongTypeError,
)
from draftwood_memory.operations import PurgeMemory
from draftwood_memory.sender import RecordStore
from draftwood_memory.store import redis_client
from draftwood_memory.store.naming import PURGES_KEY, memories_key, tenant_key
from draftwood_memory.store.redis_client import Script
from tests.memory.helpers import (
    FINGERPRINT,
    agreed,
    before_command,
    fill,
    key_of,
    learn_output,
    learned_by,
    log_of,
    numbers,
    perform,
    replicas,
    resident,
    stored,
    strategy_of,
    stream_of,
    until,
)
from tests.memory.servers import Proxy, Valkey, cluster, wait_for


async def rounds_until(memory: Memory, condition: Callable[[], object]) -> None:
    def after_a_round() -> object:
        memory.thread.wake()
        return condition()

    await until(after_a_round)


@pytest.mark.usefixtures("checks_often")
@pytest.mark.parametrize("lost", ["all", "the hash", "the hash, which another process writes again"])
async def test_what_a_store_has_lost_is_restored_by_one_process(server: Valkey, lost: str) -> None:
    """Entries that are still there are loaded, and not written again. The outbox is sent as ever."""

    async def lose() -> None:
        server.client.delete(tenant_key("t"), *([stream] if lost == "all" else []))
        await learn_output(memory, "t", numbers(11))

    async def begin() -> None:
        if "another process" in lost:
            server.client.hset(tenant_key("t"), f"n:{FINGERPRINT}:", "")

    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        stream = stream_of(memory, "t")
        in_between = before_command(memory, "EVAL", begin, of=tenant_key("t"))
        with in_between, before_command(memory, "HMGET", lose):
            await rounds_until(memory, lambda: memory.counters().pushed == 2 and resident(memory, "t").loaded)
        assert await agreed([memory], "t") == [numbers(10), numbers(11)]
        assert memory.counters().restored == (lost == "all")
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10), numbers(11)]  # once each


@pytest.mark.usefixtures("checks_often")
async def test_a_restore_that_fails_is_made_again(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        with refused(memory, "EVAL", StoreUnavailableError("cut"), of=tenant_key("t")):
            server.client.delete(tenant_key("t"), stream_of(memory, "t"))
            await rounds_until(memory, lambda: memory.counters().restored)
        assert memory.counters().failures == 1
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10)]


async def test_after_a_failure_all_memories_are_compared_at_once(
    server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is not followed, for no request used it of late."""
    async with replicas(1, server.url) as [memory]:
        await stored([memory], "t", numbers(10))
        monkeypatch.setattr("draftwood_memory.resident.LIVE_SECONDS", 0.0)
        server.client.flushall()

        def cut() -> bool:
            """Until something waited on a connection: one that breaks while nothing does is replaced silently."""
            server.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            return memory.counters().failures > 0

        await until(cut)
        await until(lambda: memory.counters().restored)
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == [numbers(10)]


@contextmanager
def refused(memory: Memory, word: str, error: MemoryStoreError, times: int = 1, of: str = "") -> Iterator[None]:
    """The store answers the first commands with a word, whose key begins with `of`, with an error, and does not run
    them."""
    assert memory.memories is not None
    client: Any = memory.memories.client
    send, left = client.commands, times

    async def commands(words: Any) -> Any:
        nonlocal left
        chosen = []
        for command in words:
            chosen.append(not (left and command[0] == word and key_of(command).startswith(of)))
            left -= not chosen[-1]
        answers = iter(await send([command for command, runs in zip(words, chosen, strict=True) if runs]))
        return [next(answers) if runs else error for runs in chosen]

    client.commands = commands
    try:
        yield
    finally:
        del client.commands


@pytest.mark.parametrize("word", ["hset", "pexpire", "xadd"])
async def test_an_entry_whose_name_or_expiry_is_refused_is_written_later_and_once(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream without a name would outlive its purge."""
    with Valkey() as server:
        async with replicas(1, server.url) as [memory]:
            await strategy_of(memory, "t")
            server.client.execute_command("ACL", "SETUSER", "default", f"-{word}")
            await learn_output(memory, "t", numbers(10))
            await until(lambda: "refuses" in caplog.text)
            assert (memory.outbox.pending, server.client.keys("dw:{t:t}:3:*")) == (1, [])
            server.client.execute_command("ACL", "SETUSER", "default", f"+{word}")
            await until(lambda: not memory.outbox.pending)
            assert memory.counters().pushed == 1
            assert server.client.xlen(stream_of(memory, "t")) == 1
            assert server.client.hexists(tenant_key("t"), f"n:{FINGERPRINT}:")
            assert server.client.pttl(stream_of(memory, "t")) > 0
            await perform(PurgeMemory("t"), memory)
            assert server.client.keys("dw:{t:t}:3:*") == []


async def test_what_was_sent_before_an_outage_is_not_sent_again(server: Valkey) -> None:
    """One round trip writes for several tenants; the store ceases to serve one of them."""
    async with replicas(1, server.url) as [memory]:
        for tenant in "ab":
            await strategy_of(memory, tenant)
        with refused(memory, "EVAL", StoreUnavailableError("CLUSTERDOWN"), of="dw:{t:b}"):
            async with memory_locked(memory):
                for tenant in "ab":
                    await learn_output(memory, tenant, numbers(10))
            await until(lambda: memory.counters().pushed == 2 and not memory.outbox.pending)
        assert memory.counters().failures == 1
        assert [server.client.xlen(stream_of(memory, tenant)) for tenant in "ab"] == [1, 1]


@asynccontextmanager
async def memory_locked(memory: Memory) -> AsyncIterator[None]:
    """No round of the memory thread runs meanwhile."""
    held, done = threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with memory.locked():
            held.set()
            await done.wait()

    holding = memory.thread.submit(hold())
    await asyncio.to_thread(held.wait)
    try:
        yield
    finally:
        memory.thread._loop.call_soon_threadsafe(done.set)
        await asyncio.wrap_future(holding)


async def test_an_import_that_fails_midway_adds_here_what_the_store_has(server: Valkey) -> None:
    async with replicas(1, server.url) as [memory]:
        await strategy_of(memory, "t")
        texts = [numbers(8000, start) for start in range(0, 24_000, 1000)]  # three entries
        written = 0

        async def write(*arguments: Any) -> Any:
            nonlocal written
            written += 1
            if written > 2:
                raise StoreUnavailableError("cut")
            return await RecordStore.write(memory.replica.records, *arguments)  # type: ignore[union-attr]

        memory.replica.records.write = write  # type: ignore[union-attr, method-assign]
        with pytest.raises(StoreUnavailableError):
            await perform(fill("t", *texts), memory)
        del memory.replica.records.write  # type: ignore[union-attr]
        assert 0 < len(log_of(memory, "t")) < 24
        assert resident(memory, "t").log.first_id is not None
        known = log_of(memory, "t")
    async with replicas(1, server.url) as [later]:
        assert await agreed([later], "t") == sorted(known)


@pytest.mark.usefixtures("checks_often")
async def test_a_full_store_is_given_space_before_it_gets_back_what_it_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It refuses whatever a memory's restoration begins with, and stays as full until somebody deletes something."""
    monkeypatch.setattr("draftwood_memory.sender._SPACE_CHECK_SECONDS", 0.0)
    with Valkey("--maxmemory-policy", "noeviction") as server:
        async with replicas(1, server.url, fingerprint="e" * 16) as [other]:
            await perform(fill("old", np.random.default_rng(0).integers(0, 30_000, 400_000).tolist()), other)
            assert other.memories is not None
            await asyncio.wrap_future(other.thread.submit(other.memories.catalogue.note_kind("e" * 16 + ":")))
        async with replicas(1, server.url) as [memory]:
            await stored([memory], "t", numbers(10))
            server.client.config_set("maxmemory", server.client.info("memory")["used_memory"] - 100_000)
            server.client.execute_command("ACL", "SETUSER", "default", "-info")  # as on a cluster, where none is asked
            server.client.delete(tenant_key("t"), stream_of(memory, "t"))
            await rounds_until(memory, lambda: memory.counters().restored)
            assert memory.counters().failures == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_while_a_node_of_a_cluster_is_down_the_tenants_of_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the cluster goes on without the node's slots. Where they hold the purges, nobody can be served.

    redis-py drops a node that is down without closing its connections. They are collected here, where their warnings
    are ignored, and not in another test.
    """
    monkeypatch.setattr("draftwood_memory.replica._RETRY_SECONDS", 1.0)

    def node_of(key: str) -> int:
        return next(i for i in (2, 1, 0) if key_slot(key.encode()) >= 16384 * i // 3)

    served = node_of(PURGES_KEY)
    fingerprint = next(f for f in map("{:016x}".format, range(99)) if node_of(memories_key(f)) == served)
    dead = (served + 1) % 3
    alive, down = (next(t for t in "abcdefghijklmn" if node_of(tenant_key(t)) == node) for node in (served, dead))
    with cluster("--cluster-require-full-coverage", "no", persistent=True) as nodes:
        url = f"redis+cluster://127.0.0.1:{nodes[served].port}"
        async with replicas(2, url, fingerprint=fingerprint) as memories:
            for tenant in (alive, down):
                assert await stored(memories, tenant, numbers(10)) == [numbers(10)]
            nodes[dead].kill()
            await learn_output(memories[0], down, numbers(11))
            await until(lambda: resident(memories[0], down).problem)
            await learn_output(memories[0], alive, numbers(12))
            assert await agreed(memories, alive, outboxes=False) == [numbers(10), numbers(12)]
            async with replicas(1, url, fingerprint=fingerprint) as [later]:
                assert await agreed([later], alive) == [numbers(10), numbers(12)]
            await until(lambda: memories[0].outbox.pending == 1)  # it waits until the node is back
            assert learned_by(memories[0], down) == [numbers(10), numbers(11)]
            nodes[dead].start()
            assert await agreed(memories, down) == [numbers(10), numbers(11)]
    gc.collect()


@contextmanager
def pair() -> Iterator[tuple[Valkey, Valkey]]:
    """A primary and its replica, in step."""
    with Valkey() as primary, Valkey("--replicaof", f"127.0.0.1 {primary.port}") as replica:
        wait_for(lambda: replica.client.info("replication").get("master_link_status") == "up", "replication")
        yield primary, replica


async def fail_over(primary: Valkey, replica: Valkey, address: Proxy) -> None:
    """The replica is promoted and the primary demoted; the address leads new connections to the former."""
    await asyncio.to_thread(replica.client.execute_command, "REPLICAOF", "NO", "ONE")
    address.to = replica.port
    await asyncio.to_thread(primary.client.execute_command, "REPLICAOF", "127.0.0.1", str(replica.port))


@asynccontextmanager
async def connected(address: Proxy) -> AsyncIterator[RedisClient]:
    client = RedisClient(address.url, timeout=60.0)
    yield client
    await client.close()


@pytest.mark.parametrize("call", ["command", "commands", "script"])
async def test_the_call_after_a_refused_one_reaches_the_new_primary(call: str) -> None:
    async def write(client: RedisClient) -> None:
        if call == "command":
            await client.command("SET", "k", "v")
        elif call == "script":
            await client.run(Script("return redis.call('SET', KEYS[1], ARGV[1])", ["k"], ["v"]))
        else:
            [answer] = await client.commands([("SET", "k", "v")])
            if isinstance(answer, MemoryStoreError):
                raise answer

    with pair() as (primary, replica):
        async with Proxy(primary.port) as address, connected(address) as client:
            await write(client)
            await fail_over(primary, replica, address)
            with pytest.raises(StoreUnavailableError, match="read only replica"):
                await write(client)
            replica.client.delete("k")
            await write(client)
            assert replica.client.get("k") == b"v"


async def test_a_blocked_reader_leaves_a_primary_that_is_demoted() -> None:
    with pair() as (primary, replica):
        async with Proxy(primary.port) as address, connected(address) as client:
            reading = asyncio.create_task(client.command("XREAD", "BLOCK", 50_000, "STREAMS", "s", "0"))
            await until(lambda: primary.client.info("clients")["blocked_clients"] == 1)
            await fail_over(primary, replica, address)
            async with asyncio.timeout(30.0):
                with pytest.raises(StoreUnavailableError):
                    await reading
            assert (await client.command("ROLE"))[0] == b"master"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("READONLY You can't write against a read only replica.", StoreUnavailableError),
        ("CLUSTERDOWN The cluster is down", StoreUnavailableError),
        ("MOVED 3999 127.0.0.1:6381", StoreUnavailableError),
        ("MISCONF Errors writing to the AOF file: No space left on device", StoreUnavailableError),
        ("ERR max number of clients reached", StoreUnavailableError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFullError),
        ("NOPERM User x has no permissions to run the 'set' command", StoreRefusedError),
        ("NOAUTH Authentication required.", StoreRefusedError),
        ("WRONGPASS invalid username-password pair or user is disabled.", StoreRefusedError),
        ("ERR unknown command 'XADD'", StoreRefusedError),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", WrongTypeError),
        # As Redis 6 reports what failed within a script.
        (
            "ERR Error running script (call to f_a1): @user_script:3: @user_script: 3: -READONLY You can't write "
            "against a read only replica.",
            StoreUnavailableError,
        ),
        (
            "ERR Error running script (call to f_a1): @user_script:3: @user_script: 3: -OOM command not allowed when "
            "used memory > 'maxmemory'.",
            StoreFullError,
        ),
    ],
)
def test_answers_of_servers_by_their_codes(answer: str, expected: type[MemoryStoreError]) -> None:
    """As the library parses them: it takes the codes that it knows off the text."""
    error = BaseParser.parse_error(answer)
    assert isinstance(error, exceptions.RedisError)
    assert type(redis_client._mapped(error)) is expected
