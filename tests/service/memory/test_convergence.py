"""Two replicas over one store, in any order of learning, folding, purging, crashing and losing touch: they converge,
nothing that was purged comes back, and nothing that a living replica or the store had is lost."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from service.memory import MemoryName, TenantMemory
from service.memory.admin import MemoryAdmin
from service.memory.errors import MemoryStoreError, StoreUnavailableError
from service.memory.store.base import Limits
from service.memory.store.in_process import InProcessStore
from service.memory.tenants import MemoryConfig
from tests.service.memory.helpers import FINGERPRINT, known_to, log_of, teach

TENANT = "t"
CONFIG = MemoryConfig(tokens=100_000, bytes=1 << 20)
WRITES = ("append", "fold", "seed", "purge", "set_aside")


class Link:
    """One replica's way to the store.

    Attributes:
        down: nothing gets through.
        deaf: writes get through, their answers do not.
    """

    shared = True
    shown = "a link"

    def __init__(self, store: InProcessStore) -> None:
        self.store = store
        self.down = self.deaf = False

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any, **more: Any) -> Any:
            if self.down:
                raise StoreUnavailableError("the link is down")
            answer = await getattr(self.store, name)(*arguments, **more)
            if self.deaf and name in WRITES:
                raise StoreUnavailableError("no answer came")
            return answer

        return call


class Replicas(RuleBasedStateMachine):
    """`learned` holds the numbers that must be there in the end, and who learned them; those that were purged are in
    `gone`, and must never be seen again."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = InProcessStore(Limits(CONFIG.log_bytes), shared=True)
        self.backup: dict[str, Any] | None = None
        self.links = [Link(self.store), Link(self.store)]
        self.memories = [self._fresh(link) for link in self.links]
        self.next = 0
        self.learned: dict[int, int] = {}
        self.gone: set[int] = set()

    def _fresh(self, link: Link) -> TenantMemory:
        return TenantMemory(link, FINGERPRINT, CONFIG)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @rule(who=st.integers(0, 1), count=st.integers(1, 3))
    def learn(self, who: int, count: int) -> None:
        for _ in range(count):
            self.next += 1
            self.run(teach(self.memories[who], TENANT, [self.next, self.next, self.next]))
            if self._is_aware(who):
                self.learned[self.next] = who

    @rule(who=st.integers(0, 1))
    def go_on(self, who: int) -> None:
        self._reach_store(who, self.memories[who].replica.round())

    @rule(who=st.integers(0, 1))
    def only_send(self, who: int) -> None:
        """The first part of a round: what the store takes then may be lost before anybody reads it."""
        self._reach_store(who, self.memories[who].replica._push())

    def _reach_store(self, who: int, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.run(work)
        except MemoryStoreError:
            assert self.links[who].down or self.links[who].deaf

    @rule(who=st.integers(0, 1))
    def fold(self, who: int) -> None:
        resident = self.memories[who].residents.get(MemoryName(TENANT))
        if resident is not None:
            resident.fold_due = True
            self.store._leases.clear()
            self.go_on(who)

    @rule(who=st.integers(0, 1))
    def purge(self, who: int) -> None:
        memory = self.memories[who]
        try:
            self.run(MemoryAdmin(memory)._purge(TENANT))
        except MemoryStoreError:
            if not self.links[who].deaf:
                return
        # What the other one learned and has not sent is from before the purge as well.
        self.gone |= self.learned.keys()
        self.learned.clear()
        self.backup = None  # a failover to before a purge that nobody alive may remember is not promised

    @rule(who=st.integers(0, 1))
    def crash(self, who: int) -> None:
        lost = {number for number, owner in self.learned.items() if owner == who} - self._stored()
        for number in lost:
            del self.learned[number]
        self.memories[who].thread.stop(0)
        self.memories[who] = self._fresh(self.links[who])

    @rule(who=st.integers(0, 1), deaf=st.booleans())
    def lose_touch(self, who: int, deaf: bool) -> None:
        self.links[who].down, self.links[who].deaf = not deaf, deaf

    @rule(who=st.integers(0, 1))
    def get_in_touch(self, who: int) -> None:
        self.links[who].down = self.links[who].deaf = False

    @rule()
    def replicate(self) -> None:
        """What a failover would go back to."""
        self.backup = copy.deepcopy(self.store.__dict__)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def fail_over(self) -> None:
        """The store loses what came since; replicas that live send it again, so long as they keep it."""
        before = self._stored()
        assert self.backup is not None
        self.store.__dict__.update(copy.deepcopy(self.backup))
        for number in before - self._stored():
            # Nobody has to know what a replica wrote that has died since.
            if not self._kept(number):
                self.learned.pop(number, None)

    @rule()
    def lose_everything(self) -> None:
        """The store starts empty. Where both replicas live and one holds all, it all comes back.

        With the rest goes when a purge was. What a replica holds that has not heard of it may come back, if nobody else
        has, or go, if somebody has: from before the purge, as far as anybody can tell.
        """
        before = self._stored()
        latest, epochs = self._epochs()
        for who in range(2):
            if epochs[who] != latest:
                held = self._held(who)
                self.gone -= held
                for number in held & self.learned.keys():
                    del self.learned[number]
        self.store.__dict__.update(InProcessStore(Limits(CONFIG.log_bytes), shared=True).__dict__)
        self.backup = None
        for number in before:
            if not self._kept(number):
                self.learned.pop(number, None)

    @invariant()
    def nothing_purged_is_stored(self) -> None:
        assert not self._stored() & self.gone

    def teardown(self) -> None:
        try:
            self._converge()
        finally:
            for memory in self.memories:
                memory.thread.stop(0)
            self.loop.close()

    def _converge(self) -> None:
        for who in range(2):
            self.get_in_touch(who)
            self.run(self.memories[who].strategy(TENANT, "trie"))
        for _ in range(12):
            for memory in self.memories:
                memory.replica._check_all = True
                self.run(memory.replica.round())
        logs = [log_of(memory, TENANT) for memory in self.memories]
        assert logs[0] == logs[1]
        for memory in self.memories:
            assert memory.outbox.pending == 0
            assert known_to(memory, TENANT) == sorted(logs[0])
        numbers = [tokens[0] for tokens in logs[0]]
        assert len(set(numbers)) == len(numbers)
        assert not set(numbers) & self.gone
        assert self.learned.keys() <= set(numbers)

    def _stored(self) -> set[int]:
        """The numbers in the store, whatever any replica knows."""
        reader = self._fresh(Link(self.store))
        self.run(reader.replica.refresh(reader.residents.open(MemoryName(TENANT))))
        reader.thread.stop(0)
        return {tokens[0] for tokens in log_of(reader, TENANT)}

    def _is_aware(self, who: int) -> bool:
        """Whether a replica knows of the latest purge that anybody knows of, or nothing was purged; otherwise what it
        learns is left out: it may be from before the purge, as far as anybody can tell."""
        latest, epochs = self._epochs()
        stored = self.store._memories.get(self.memories[who].naming.tag(MemoryName(TENANT)))
        will_hear = stored is not None and stored.epoch == latest
        return epochs[who] == latest or (will_hear and self._epoch(who) is None)

    def _epoch(self, who: int) -> int | None:
        resident = self.memories[who].residents.get(MemoryName(TENANT))
        return None if resident is None else resident.epoch

    def _epochs(self) -> tuple[int, list[int]]:
        """The life that the latest purge began, as far as the store or a replica knows, and what each replica knows."""
        epochs = [self._epoch(who) or 0 for who in range(2)]
        stored = self.store._memories.get(self.memories[0].naming.tag(MemoryName(TENANT)))
        return max(*epochs, 0 if stored is None else stored.epoch), epochs

    def _held(self, who: int) -> set[int]:
        """The numbers that a replica knows or keeps for sending."""
        memory = self.memories[who]
        kept = memory.outbox.records(MemoryName(TENANT), 0)
        return {int(record.tokens[0]) for record in kept} | {tokens[0] for tokens in log_of(memory, TENANT)}

    def _kept(self, number: int) -> bool:
        """Whether the replica that learned a number lives and still keeps it for sending."""
        return any(
            record.tokens[0] == number
            for memory in self.memories
            for record in memory.outbox.records(MemoryName(TENANT), 0)
        )


def test_what_the_store_confirmed_and_lost_unread_is_sent_again() -> None:
    replicas = Replicas()
    replicas.learn(0, 1)
    replicas._converge()
    replicas.learn(0, 1)
    replicas.only_send(0)
    replicas.lose_everything()
    replicas.go_on(1)  # gives the store back what both have read
    replicas._converge()
    assert replicas._stored() == {1, 2}
    replicas.teardown()


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=30)
