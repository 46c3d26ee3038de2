"""Two replicas over one store, in any order of learning, folding, purging, crashes and lost connections: they converge,
nothing that was purged comes back, and nothing that a running replica or the store has is lost."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.errors import MemoryStoreError, StoreUnavailableError
from draftwood_service.memory.manager import MemoryManager
from draftwood_service.memory.naming import MemoryName
from draftwood_service.memory.operations import PurgeMemory
from draftwood_service.memory.store.base import Limits
from draftwood_service.memory.store.in_process import InProcessStore
from tests.service.memory.helpers import FINGERPRINT, known_to, learn_output, log_of

TENANT = "t"
CONFIG = MemoryConfig(tokens=100_000, bytes=1 << 20)
WRITES = ("append", "fold", "seed", "purge", "set_aside")


class Link:
    """One replica's connection to the store.

    Attributes:
        down: nothing gets through.
        deaf: writes get through, their answers do not.
    """

    shared = True
    description = "a link"

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
    """`learned` has the numbers that must be stored in the end, each with the replica that learned it; `gone` has those
    that were purged and must never be stored again."""

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

    def _fresh(self, link: Link) -> MemoryManager:
        return MemoryManager(link, FINGERPRINT, CONFIG)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @rule(who=st.integers(0, 1), count=st.integers(1, 3))
    def learn(self, who: int, count: int) -> None:
        for _ in range(count):
            self.next += 1
            self.run(learn_output(self.memories[who], TENANT, [self.next, self.next, self.next]))
            if self._knows_purge(who):
                self.learned[self.next] = who

    @rule(who=st.integers(0, 1))
    def go_on(self, who: int) -> None:
        self._reach_store(who, self.memories[who].replica.round())

    @rule(who=st.integers(0, 1))
    def only_send(self, who: int) -> None:
        """The first part of a round: records that the store confirms may be lost before a replica reads them."""
        self._reach_store(who, self.memories[who].replica.pusher.push())

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
            self.run(PurgeMemory(TENANT).run(memory))
        except MemoryStoreError:
            if not self.links[who].deaf:
                return
        # Records that the other replica has not sent were learned before the purge as well.
        self.gone |= self.learned.keys()
        self.learned.clear()
        self.backup = None  # no guarantee for a failover behind a purge that no running replica has read

    @rule(who=st.integers(0, 1))
    def crash(self, who: int) -> None:
        lost = {number for number, owner in self.learned.items() if owner == who} - self._stored()
        for number in lost:
            del self.learned[number]
        self.memories[who].thread.stop(0)
        self.memories[who] = self._fresh(self.links[who])

    @rule(who=st.integers(0, 1), deaf=st.booleans())
    def disconnect(self, who: int, deaf: bool) -> None:
        self.links[who].down, self.links[who].deaf = not deaf, deaf

    @rule(who=st.integers(0, 1))
    def reconnect(self, who: int) -> None:
        self.links[who].down = self.links[who].deaf = False

    @rule()
    def replicate(self) -> None:
        """The state that a failover restores."""
        self.backup = copy.deepcopy(self.store.__dict__)

    @precondition(lambda self: self.backup is not None)
    @rule()
    def fail_over(self) -> None:
        """The store loses later writes; running replicas send their own again, as long as they keep them."""
        before = self._stored()
        assert self.backup is not None
        self.store.__dict__.update(copy.deepcopy(self.backup))
        for number in before - self._stored():
            # The records of a replica that has died since may be lost.
            if not self._kept(number):
                self.learned.pop(number, None)

    @rule()
    def lose_everything(self) -> None:
        """The store starts empty. Running replicas restore all that they have.

        The time of the last purge is lost, too. Records of a replica that has not read of the purge may come back if
        the other one has not either, or be dropped if it has: nothing shows whether they are from before the purge.
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
            self.reconnect(who)
            self.run(self.memories[who].strategy(TENANT, "trie"))
        for _ in range(12):
            for memory in self.memories:
                memory.replica.follower.check_all = True
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
        """The numbers in the store."""
        reader = self._fresh(Link(self.store))
        self.run(reader.replica.follower.refresh(reader.residents.open(MemoryName(TENANT))))
        reader.thread.stop(0)
        return {tokens[0] for tokens in log_of(reader, TENANT)}

    def _knows_purge(self, who: int) -> bool:
        """Whether a replica has read of the latest purge, or nothing was purged. Otherwise its new records are not
        expected: nothing shows whether they are from before the purge."""
        latest, epochs = self._epochs()
        stored = self.store._memories.get(self.memories[who].naming.tag(MemoryName(TENANT)))
        will_read = stored is not None and stored.epoch == latest
        return epochs[who] == latest or (will_read and self._epoch(who) is None)

    def _epoch(self, who: int) -> int | None:
        resident = self.memories[who].residents.get(MemoryName(TENANT))
        return None if resident is None else resident.epoch

    def _epochs(self) -> tuple[int, list[int]]:
        """The latest epoch of store and replicas, and each replica's own."""
        epochs = [self._epoch(who) or 0 for who in range(2)]
        stored = self.store._memories.get(self.memories[0].naming.tag(MemoryName(TENANT)))
        return max(*epochs, 0 if stored is None else stored.epoch), epochs

    def _held(self, who: int) -> set[int]:
        """The numbers in a replica's log and outbox."""
        memory = self.memories[who]
        kept = memory.outbox.records(MemoryName(TENANT), 0)
        return {int(record.tokens[0]) for record in kept} | {tokens[0] for tokens in log_of(memory, TENANT)}

    def _kept(self, number: int) -> bool:
        """Whether a running replica has a number in its outbox."""
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
    replicas.go_on(1)  # restores to the store what both have read
    replicas._converge()
    assert replicas._stored() == {1, 2}
    replicas.teardown()


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=30)
