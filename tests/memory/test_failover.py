"""A managed failover: the address stands for another server, and connections to the old one stay open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest
from redis import exceptions
from redis._parsers.base import BaseParser

from draftwood_memory import RedisClient
from draftwood_memory.errors import (
    MemoryStoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
    WrongTypeError,
)
from draftwood_memory.store import redis_client
from draftwood_memory.store.redis_client import Script
from tests.memory.helpers import numbers, replicas, stored, until
from tests.memory.servers import Proxy, Valkey, wait_for


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
    client = RedisClient(address.url, timeout=2.0)
    yield client
    await client.close()


async def test_records_are_pushed_to_the_new_primary() -> None:
    with pair() as (primary, replica):
        async with Proxy(primary.port) as address, replicas(2, address.url) as memories:
            await stored(memories, "t", numbers(10))
            await fail_over(primary, replica, address)
            assert await stored(memories, "t", numbers(11)) == [numbers(10), numbers(11)]
            assert memories[0].counters().reconnects >= 1
            [stream] = [key for key in replica.client.keys("dw:*:3:*") if replica.client.type(key) == b"stream"]
            assert replica.client.xlen(stream) == 2


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
            reading = asyncio.create_task(client.command("XREAD", "BLOCK", 1500, "STREAMS", "s", "0"))
            await until(lambda: primary.client.info("clients")["blocked_clients"] == 1)
            await fail_over(primary, replica, address)
            with pytest.raises(StoreUnavailableError):
                await reading
            assert (await client.command("ROLE"))[0] == b"master"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("READONLY You can't write against a read only replica.", StoreUnavailableError),
        ("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", StoreUnavailableError),
        ("CLUSTERDOWN The cluster is down", StoreUnavailableError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", StoreUnavailableError),
        ("MOVED 3999 127.0.0.1:6381", StoreUnavailableError),
        ("LOADING Valkey is loading the dataset in memory", StoreUnavailableError),
        ("BUSY Valkey is busy running a script.", StoreUnavailableError),
        ("NOREPLICAS Not enough good replicas to write.", StoreUnavailableError),
        ("MISCONF Errors writing to the AOF file: No space left on device", StoreUnavailableError),
        ("UNBLOCKED force unblock from blocking operation", StoreUnavailableError),
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
