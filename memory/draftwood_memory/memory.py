"""`Memory`: the learned sequences of all tenants of one model, in this process and in a store that processes share.

A hint cache: what it holds can never change an answer, so an entry that is lost or doubled costs a few drafts. Called
from the thread that drafts; nothing here waits for a store, except the first request of a tenant whose memory is not in
this process, or was not used for a minute: it waits a moment, or not at all while the store does not answer. What is
loaded later reaches requests that run.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Protocol, Self, TypeVar

from draftwood_memory.config import MemoryConfig, MemoryOverrides, default_max_bytes
from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import CorruptValueError
from draftwood_memory.memory_thread import Maintenance, MemoryThread
from draftwood_memory.records import (
    WRITER_BYTES,
    Codec,
    Int32Array,
    Kind,
    LoggedRecord,
    Outbox,
    PendingRecord,
    Record,
    request_key,
    split,
)
from draftwood_memory.replica import Replica
from draftwood_memory.resident import OVERLAP, BetweenSteps, Resident, RunOnEngine, StrategyKey, make
from draftwood_memory.residents import Process, Residents
from draftwood_memory.settings import MemorySettings, store_client, store_keys
from draftwood_memory.store.embedded import EmbeddedServer, default_folder
from draftwood_memory.store.encryption import KeyRing
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import MemoryName, Naming
from draftwood_memory.store.redis_client import RedisClient
from draftwood_memory.store.stored import StoreClock, StoredMemory
from draftwood_strategies import Strategy

_FIRST_WAIT = 0.05
"""Seconds that a tenant's first request waits for its memory. One of 10,000 tokens takes
3 ms at the median and 6 ms at the 99th percentile, so any longer time works."""
_STOP_SECONDS = 4.5
"""For the memory thread to send the outbox and end; a little more than it takes at most."""
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class MemoryOperation(Protocol[Result_co]):
    """An operation on memories (see `operations`). `run` may raise MemoryStoreError."""

    async def run(self, memory: Memory) -> Result_co: ...


class Memory:
    """The memories of all tenants and one model.

    Args:
        store: shares them with other processes, and keeps them; None keeps them in this process alone.
        fingerprint: of model and tokenizer; memories of other models are not read.
        keys: if set, stored values are encrypted and tenants' names hidden.
    """

    def __init__(
        self,
        store: RedisClient | None,
        fingerprint: str,
        config: MemoryConfig = MemoryConfig(),
        keys: KeyRing | None = None,
    ) -> None:
        self.config = config
        self.naming = Naming(fingerprint, None if keys is None else keys.naming_key)
        self.codec = Codec(keys)
        self.clock = StoreClock()
        self.residents = Residents(self.naming, config, self.clock, stored=store is not None)
        self.outbox = Outbox()
        self.between_steps = BetweenSteps()
        self._counted = MemoryCounters()
        process = Process(
            secrets.token_bytes(WRITER_BYTES),
            self.naming,
            self.codec,
            self.clock,
            self.residents,
            self.outbox,
            self._counted,
            self.between_steps,
        )
        self.memories = None if store is None else Memories(store, self.clock)
        self.replica = None if self.memories is None else Replica(self.memories, process)
        self._maintenance = Maintenance(process, self.replica)
        self.thread = MemoryThread(process, self.replica, self._maintenance)
        self._process = process
        self._preloaded: Future[None] = Future()

    def start(self, run_on_engine: RunOnEngine, preload: int = 0, strategy: str = "") -> None:
        """Starts following the store.

        Args:
            preload: number of memories, the latest written, that are loaded at once, for the strategy named.
        """
        self.between_steps.run_on_engine = run_on_engine
        self.thread.start()
        self._preloaded = self.thread.submit(self._preload(preload, strategy))

    @property
    def preloaded(self) -> bool:
        """The memories of the preload are loaded, or the store fails."""
        loading = any(resident.unbuilt for resident in self.residents.all())
        return self.thread.failing or (self._preloaded.done() and not loading)

    def stop(self) -> None:
        """Sends the outbox, if the store takes it within seconds, and stops. Blocks."""
        self.thread.stop(_STOP_SECONDS)

    def submit(self, operation: MemoryOperation[Result]) -> Future[Result]:
        """Runs an operation (see `operations`) on the memory thread. From any thread.

        Raises:
            MemoryStoreError: from the future.
        """
        return self.thread.submit(operation.run(self))

    def fetch(self, use: StrategyUse, on_loaded: Callable[[Strategy], object]) -> Strategy | None:
        """The instance of a request's strategy in its memory; None if the request should wait for `on_loaded`.

        `on_loaded` gets the instance within `_FIRST_WAIT`, on another thread. If the memory is not loaded by then, that
        is one without the memory; `on_loaded` gets the other one when it is loaded, to take the first one's place. The
        same follows an instance that was returned while the memory thread is slow. While the store fails nothing
        follows.

        Raises:
            UnknownStrategyError: no strategy has this name.
            ValueError, TypeError: it does not accept the options.
        """
        resident = self.residents.get(use.memory)
        behind = self.replica is not None and resident is not None and resident.loaded and not resident.live
        strategy, loading = self._instance(use)
        if behind and loading is None and resident is not None and self.thread.healthy:
            loading = self.thread.submit(self._read_on(resident))
        if loading is None or self.thread.failing:
            return strategy
        waits = self.thread.healthy or self.replica is None
        lock, delivered = threading.Lock(), None if waits else strategy

        def deliver(_: object = None) -> None:
            nonlocal delivered
            with lock, suppress(Exception):  # the engine may take no more
                if delivered is None:
                    ready, loading = self._instance(use)
                    self._counted.late += loading is not None
                else:
                    ready = self._loaded_instance(use) or delivered
                if ready is not delivered:
                    delivered = ready
                    on_loaded(ready)

        self.thread.wake()
        loading.add_done_callback(deliver)
        if not waits:
            self._counted.late += 1
            return strategy
        timer = threading.Timer(_FIRST_WAIT, deliver)
        timer.daemon = True
        timer.start()
        return None

    def strategy(self, tenant: str, name: str, arm: str = "") -> Strategy:
        """As `fetch`, without options; blocks until the memory is loaded, `_FIRST_WAIT` at most."""
        arrived: SimpleQueue[Strategy] = SimpleQueue()
        present = self.fetch(StrategyUse(MemoryName(tenant, arm), StrategyKey(name)), arrived.put)
        return arrived.get() if present is None else present

    def learning(
        self, name: MemoryName, strategy: Strategy | None = None, *, began: float | None = None, request: str = ""
    ) -> Learning:
        """Around a request: pins the memory, and takes what the request wrote.

        Args:
            strategy: has learned it already, as its own drafts were verified.
            began: when the request began, on the clock of `time.monotonic`; now, if it is None.
            request: what it has in common with the same request sent again; "" if that is not known.
        """
        since = time.monotonic() if began is None else began
        resident = self.residents.pin(name)
        return Learning(self._process, self.replica, self.thread.wake, resident, strategy, since, request)

    def purge_watch(self, name: MemoryName) -> Callable[[], bool]:
        """A function that tells whether a memory is known not to have been purged, on any replica, since now.

        False as well once the memory was evicted, since then nothing is known of it.
        """
        epoch, since = self.residents.open(name).epoch, time.monotonic()

        def is_kept() -> bool:
            resident = self.residents.get(name)
            return resident is not None and resident.is_current(epoch, since)

        return is_kept

    @property
    def healthy(self) -> bool:
        """The store answered the latest call, or there is none. From any thread."""
        return self.thread.healthy

    def counters(self) -> MemoryCounters:
        """The counters as of now. From any thread."""
        residents = self.residents.all()
        return replace(
            self._counted,
            tenants=len(residents),
            newer_memories=sum(resident.newer for resident in residents),
            tokens=sum(resident.log.tokens for resident in residents),
            index_bytes=sum(resident.index_bytes for resident in residents),
            resident_bytes=sum(resident.nbytes for resident in residents),
            evicted=self.residents.evicted,
            outbox_records=self.outbox.pending,
            dropped=self.outbox.dropped,
        )

    def _instance(self, use: StrategyUse) -> tuple[Strategy, Future[None] | None]:
        if self._maintenance.forget_if_lapsed():
            return make(use.key, self.config.capacity), None
        if use.memory not in self.residents:
            make(use.key, self.config.capacity)  # what cannot be made must raise before the memory is added
        return self.residents.open(use.memory, use.overrides).instance(use.key)

    def _loaded_instance(self, use: StrategyUse) -> Strategy | None:
        """The instance if it has learned its memory; makes none, as it may have been evicted."""
        resident = self.residents.get(use.memory)
        return None if resident is None or use.key in resident.unbuilt else resident.strategies.get(use.key)

    async def _read_on(self, resident: Resident) -> None:
        """Reads what other processes learned, adopted or purged in a memory that was not followed."""
        assert self.replica is not None
        async with self.replica.lock:
            await self.replica.refresh(resident)
        await self.between_steps.learned(resident)

    def name_of(self, stored: StoredMemory) -> MemoryName | None:
        """The name of a memory in the store; None if it cannot be decoded here."""
        try:
            return self.codec.decode_name(stored.tag, stored.name)
        except CorruptValueError:
            return None

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[Replica | None]:
        """Holds the replica's lock, so that no round of the memory thread runs. On that thread."""
        if self.replica is None:
            yield None
        else:
            async with self.replica.lock:
                yield self.replica

    async def _preload(self, limit: int, strategy: str) -> None:
        if self.memories is None or self.replica is None or not limit:
            return
        async with self.replica.lock:
            tags = (await self.memories.catalogue.tags(self.naming.fingerprint))[:limit]
            for info in reversed(await self.memories.info(tags)):
                if (name := self.name_of(info)) is not None:
                    self.residents.open(name).instance(StrategyKey(strategy))
            self.thread.wake()


@dataclass(frozen=True, slots=True)
class StrategyUse:
    """Which memory and which instance of a strategy a request drafts with, and what the memory is."""

    memory: MemoryName
    key: StrategyKey
    overrides: MemoryOverrides = MemoryOverrides()


class Learning:
    """A context manager; the memory stays in this process meanwhile. Made by `Memory.learning`.

    Args:
        replica: None without a store.
        wake: starts the memory thread's next round.
        resident: a pinned memory.
        strategy: has learned the answer already.
        request: see `Memory.learning`.

    Attributes:
        epoch: of the memory when the request began; None if it was not known.
        since: when it began, on the clock of `time.monotonic`.
        repeated: it was sent before, so a strategy should not learn from its drafts: `learn` adds what is new.
    """

    def __init__(
        self,
        process: Process,
        replica: Replica | None,
        wake: Callable[[], None],
        resident: Resident,
        strategy: Strategy | None,
        since: float,
        request: str,
    ) -> None:
        self.resident = resident
        self.strategy = strategy
        self.epoch = resident.epoch
        self.since = since
        self.request = request
        self.repeated = bool(request) and bool(resident.log.of_request(request_key(request, 0)))
        self._process = process
        self._replica = replica
        self._wake = wake

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.residents.unpin(self.resident)

    def learn(self, tokens: Int32Array, sample: int = 0) -> None:
        """Learns an answer, int32[n], unless the memory was purged since the request began: into the memory, the outbox
        and the tenant's other strategies.

        Of an answer to a request that was sent before, what was not learned then, a few tokens before it included.

        Args:
            sample: which one of the request's answers.
        """
        resident, request = self.resident, request_key(self.request, sample) if self.request else 0
        with resident.lock:
            lapsed = self._replica is not None and self._replica.purges.lapsed
            if lapsed or not resident.is_current(self.epoch, self.since):
                self._process.counters.stale += 1
                return
            learned = resident.learned_prefix(request, tokens)
            if learned >= tokens.size:
                return
            tokens = tokens[max(0, learned - OVERLAP) :]
            now = time.monotonic()
            for piece in split(tokens):
                logged = LoggedRecord(Record(Kind.OUTPUT, piece, int(self._process.clock.at(now)), request))
                resident.add(logged)
                self._process.counters.learned += 1
                if self._replica is not None:
                    self._process.outbox.add(PendingRecord(resident.name, self.epoch, self.since, now, logged))
            has_learned = None if self.repeated else self.strategy
            others = [strategy for strategy in resident.strategies.values() if strategy is not has_learned]
        if self._replica is not None:
            self._wake()
        if others:
            self._process.between_steps.learn(others, [tokens])


@contextmanager
def opened_memory(settings: MemorySettings, fingerprint: str) -> Iterator[Memory]:
    """The memory of the settings, not started yet. An embedded store runs as long as the context.

    Raises:
        InvalidSettingError: a setting cannot be used.
        StoreUnavailableError: the embedded store does not start.
    """
    config = MemoryConfig(
        tokens=settings.memory_tokens,
        bytes=settings.memory_bytes,
        max_resident=settings.max_tenants,
        max_bytes=default_max_bytes() if settings.memory_max_bytes is None else settings.memory_max_bytes,
        idle_seconds=settings.memory_idle,
        ttl=settings.memory_ttl,
        max_age=settings.memory_max_age,
        orphan_ttl=settings.memory_orphan_ttl,
    )
    with ExitStack() as stack:
        if settings.store == "embedded":
            server = EmbeddedServer(settings.store_folder or default_folder(), settings.store_bytes)
            stack.enter_context(server)
            server.wait()
        yield Memory(store_client(settings), fingerprint, config, store_keys(settings))
