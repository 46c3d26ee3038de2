"""What requests see of the memory: their tenant's strategies, and a place for what they wrote.

Nothing here waits for a store, but for the first request of a tenant that is not in this process: it waits a moment,
and not even that while the store does not answer.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from model_runner.errors import EngineStoppedError
from model_runner.sequence import Sequence
from service.memory.codec.records import Kind, Record, parts
from service.memory.codec.sealed import Sealed
from service.memory.codec.sealing import KeyRing, PlainSealer
from service.memory.errors import CorruptValueError
from service.memory.names import MemoryName, Naming
from service.memory.replica.counters import MemoryCounters
from service.memory.replica.outbox import Outbox
from service.memory.replica.replica import Replica
from service.memory.replica.replica_thread import ROUND_SECONDS, ReplicaThread
from service.memory.replica.residents import Resident, Residents, learn
from service.memory.replica.tenant_log import Capacity
from service.memory.store.base import MemoryStore
from strategies import Strategy
from strategies.draft import Int32Array

_FIRST_WAIT = 0.05
"""Seconds that a tenant's first request waits for its memory to come; drafting cold for a while costs about as much."""
_TEACH_TOKENS = 2048
"""Learned at once between two steps: about a third of a millisecond."""
_TEACH_SECONDS = 1.0
_STOP_SECONDS = 3.0
_RETAINED_TOKENS = 1 << 20
"""Kept for a store that loses what it confirmed; one in this process does not."""

RunOnEngine = Callable[[Callable[[], None]], None]
"""Runs something between two steps of the engine, on its thread. May raise EngineStoppedError."""


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """How much is kept, and where.

    Attributes:
        tokens: of one tenant.
        bytes: of one tenant in the store, its log and its snapshot together.
        most_tenants: in this process.
        idle_seconds: after which a tenant that nobody asks for leaves this process.
        ttl: seconds after which the store forgets a tenant that learns nothing; 0 for never.
        round_seconds: between two rounds with the store.
    """

    tokens: int = 1_000_000
    bytes: int = 16 << 20
    most_tenants: int = 1000
    idle_seconds: float = 900.0
    ttl: float = 0.0
    round_seconds: float = ROUND_SECONDS

    @property
    def capacity(self) -> Capacity:
        """Half of the bytes are the snapshot's, the other half is for what comes until it is folded."""
        return Capacity(self.tokens, self.bytes // 2)

    @property
    def log_bytes(self) -> int:
        return self.bytes // 2


class TenantMemory:
    """All tenants' memories, in this process and in the store. Called from the engine's thread.

    Args:
        fingerprint: of model and tokenizer; memories of others are never read.
        keys: where set, values in the store are encrypted and names hidden.
    """

    def __init__(
        self, store: MemoryStore, fingerprint: str, config: MemoryConfig = MemoryConfig(), keys: KeyRing | None = None
    ) -> None:
        self.store = store
        self.config = config
        self.naming = Naming(fingerprint, None if keys is None else keys.names)
        self.sealed = Sealed(fingerprint, PlainSealer() if keys is None else keys)
        self.residents = Residents(self.naming, config.capacity, config.most_tenants, config.idle_seconds)
        self.outbox = Outbox(secrets.token_hex(8), retained_tokens=_RETAINED_TOKENS if store.shared else 0)
        self.counters_now = MemoryCounters()
        self.replica = Replica(store, self.residents, self.outbox, self.sealed, self._teach, self.counters_now)
        self.thread = ReplicaThread(self.replica, config.round_seconds)
        self._run_on_engine: RunOnEngine = _at_once
        self._preloaded: Future[None] = Future()

    def start(self, run_on_engine: RunOnEngine, preload: int = 0, strategy: str = "") -> None:
        """Starts following the store.

        Args:
            preload: how many memories, those written to last, come at once, for the strategy named.
        """
        self._run_on_engine = run_on_engine
        self.thread.start()
        self._preloaded = self.thread.submit(self._preload(preload, strategy))

    @property
    def arrived(self) -> bool:
        """The memories that come at the start are here, or the store fails."""
        coming = any(resident.wanted for resident in self.residents.all())
        return self.thread.failing or (self._preloaded.done() and not coming)

    def stop(self) -> None:
        """Sends what was learned last, if the store takes it within seconds. Blocks."""
        self.thread.stop(_STOP_SECONDS)

    def fetch(self, tenant: str, name: str, later: Callable[[Strategy], object]) -> Strategy | None:
        """The tenant's own instance of the strategy `name`, or None: then `later` gets it, once, on another thread.

        Raises:
            UnknownStrategyError: no strategy has this name.
        """
        strategy, coming = self._instance(tenant, name)
        if coming is None or not self.thread.healthy:
            return strategy
        turn = threading.Lock()

        def come(_: object = None) -> None:
            if turn.acquire(blocking=False):
                with suppress(EngineStoppedError):
                    later(self._instance(tenant, name)[0])

        self.thread.wake()
        patience = threading.Timer(_FIRST_WAIT, come)
        patience.daemon = True
        patience.start()
        coming.add_done_callback(come)
        return None

    async def strategy(self, tenant: str, name: str) -> Strategy:
        """As `fetch`, for an event loop."""
        loop = asyncio.get_running_loop()
        coming: asyncio.Future[Strategy] = loop.create_future()

        def come(strategy: Strategy) -> None:
            if not coming.done():
                coming.set_result(strategy)

        here = self.fetch(tenant, name, lambda strategy: loop.call_soon_threadsafe(come, strategy))
        return await coming if here is None else here

    def _instance(self, tenant: str, name: str) -> tuple[Strategy, Future[None] | None]:
        memory = MemoryName(tenant)
        known = self.residents.get(memory)
        if known is None:
            # A name that is no strategy's leaves no memory behind.
            make_sure = Resident(memory, "", self.config.capacity)
            make_sure.instance(name)
        return self.residents.open(memory).instance(name)

    def lesson(self, sequences: SequenceOf[Sequence]) -> AbstractContextManager[object]:
        """Around a request's samples, which share a tenant and a strategy: what they wrote is learned at its end."""
        strategy = sequences[0].strategy
        return nullcontext() if strategy is None else self.lesson_of(sequences[0].tenant, strategy, sequences)

    def lesson_of(self, tenant: str, strategy: Strategy, written: SequenceOf[Written]) -> Lesson:
        """As `lesson`, for anything with an output."""
        return Lesson(self, self.residents.begin(MemoryName(tenant)), strategy, written)

    def learned(self, lesson: Lesson, tokens: Int32Array) -> None:
        """Takes what a request wrote, int32[n]; its own strategy knows it, the tenant's others learn it."""
        resident = lesson.resident
        with resident.lock:
            if not resident.is_current(lesson.epoch, lesson.since):
                self.counters_now.stale += 1
                return
            for part in parts(tokens):
                self.outbox.add(resident.name, lesson.epoch, Kind.OUTPUT, part)
                self.counters_now.learned += 1
            if resident.late is not None:
                resident.late.append(tokens)
            others = [one for one in resident.strategies.values() if one is not lesson.strategy]
        if others:
            with suppress(EngineStoppedError):
                self._run_on_engine(lambda: _learn_all(others, tokens))

    def counters(self) -> MemoryCounters:
        """What the memory counts, as of now. From any thread."""
        residents = self.residents.all()
        return replace(
            self.counters_now,
            tenants=len(residents),
            tokens=sum(resident.log.tokens for resident in residents),
            index_bytes=sum(resident.nbytes for resident in residents),
            outbox_records=self.outbox.pending,
            retained_records=self.outbox.retained,
            dropped=self.outbox.dropped,
        )

    async def _preload(self, most: int, strategy: str) -> None:
        tags = (await self.store.tags())[:most] if most else []
        for facts in reversed(await self.store.facts(tags)):
            with suppress(CorruptValueError):
                if facts.name:
                    self.residents.open(self.sealed.open_name(facts.tag, facts.name)).instance(strategy)
        self.thread.wake()

    async def _teach(self, resident: Resident, records: SequenceOf[Record]) -> None:
        if not resident.strategies:
            return
        for batch in _batches(records):
            done: Future[None] = Future()
            try:
                self._run_on_engine(_lecture(resident, batch, done))
            except EngineStoppedError:
                return
            try:
                async with asyncio.timeout(_TEACH_SECONDS):
                    await asyncio.shield(asyncio.wrap_future(done))
            except TimeoutError:
                pass  # the engine is in a long step; it will come to it


class Written(Protocol):
    """What a request writes into, token by token."""

    @property
    def output(self) -> SequenceOf[int]: ...


class Lesson:
    """One request's use of its tenant's memory, which stays in this process meanwhile. A context manager.

    On leaving, the memory takes what was written, unless it was purged since the request began.
    """

    def __init__(
        self, memory: TenantMemory, resident: Resident, strategy: Strategy, written: SequenceOf[Written]
    ) -> None:
        self._memory = memory
        self._written = written
        self.resident = resident
        self.strategy = strategy
        self.epoch = resident.epoch
        self.since = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for one in self._written:
                if one.output:
                    self._memory.learned(self, np.array(one.output, np.int32))
        finally:
            self._memory.residents.end(self.resident)


def _learn_all(strategies: SequenceOf[Strategy], tokens: Int32Array) -> None:
    for strategy in strategies:
        learn(strategy, [tokens])


def _at_once(task: Callable[[], None]) -> None:
    task()


def _lecture(resident: Resident, batch: list[Int32Array], done: Future[None]) -> Callable[[], None]:
    def task() -> None:
        for strategy in [*resident.strategies.values()]:
            learn(strategy, batch)
        if not done.done():
            done.set_result(None)

    return task


def _batches(records: SequenceOf[Record]) -> Iterator[list[Int32Array]]:
    """Sequences of at most `_TEACH_TOKENS` together, at least one in each batch."""
    batch: list[Int32Array] = []
    size = 0
    for record in records:
        if batch and size + record.tokens.size > _TEACH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(record.tokens)
        size += int(record.tokens.size)
    if batch:
        yield batch
