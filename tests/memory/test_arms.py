"""The memories of an experiment's arms go with it, and no others."""

from __future__ import annotations

from tests.memory.helpers import Answer, numbers, perform, replicas
from tests.memory.servers import Valkey
from tests.service.fakes import until

KEYS = read_keys(f"k={'A' * 43}=,names={'C' * 42}A=", "store_keys")


async def learn(memory: MemoryManager, *names: MemoryName) -> None:
    """Ten tokens in each memory, written to the store."""
    for name in names:
        with memory.learn_on_exit(name, await memory.strategy(name.tenant, "trie"), [Answer(numbers(10))]):
            pass
    memory.thread.wake()
    await until(lambda: not memory.outbox.pending)


def tokens(memory: MemoryManager, name: MemoryName) -> int:
    resident = memory.residents.get(name)
    return 0 if resident is None else resident.log.tokens


async def test_arms_are_purged_for_all_tenants_and_models_and_on_all_replicas(server: Valkey) -> None:
    names = [MemoryName(tenant, arm) for tenant in ("acme", "x/a") for arm in ("", "x/a", "x/b", "xx/a", "x/ab")]
    async with replicas(1, server.url, fingerprint="0" * 16) as [other_model]:
        await learn(other_model, MemoryName("acme", "x/b"), MemoryName("acme"))
    async with replicas(1, server.url) as [plain]:
        await learn(plain, MemoryName("umbrella", "x/a"))
    async with replicas(2, server.url, keys=KEYS) as [first, second]:
        await learn(first, *names)
        await learn(second, MemoryName("acme", "x/a"))
        assert await perform(PurgeArms(("x/a", "x/b")), first) == 2 * 2 + 1 + 1
        for name in names:
            assert tokens(first, name) == (0 if name.arm in ("x/a", "x/b") else 10), name
        await until(lambda: tokens(second, MemoryName("acme", "x/a")) == 0)
        assert await perform(PurgeArms(("y/a",)), first) == 0
