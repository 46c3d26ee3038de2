"""`Memory`: the learned sequences of all tenants of one model, in this process and in a store that processes share.

A hint cache: what it holds can never change an answer, so an entry that is lost or doubled costs a few drafts. Called
from the thread that drafts; nothing here waits for a store, except the first request of a tenant whose memory is not in
this process, or was not used for a minute: it waits a moment, or not at all while the store does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, TypeAlias, TypeVar

from draftwood_memory.background import MemoryThread
from draftwood_memory.config import MemoryConfig, Terms
from draftwood_memory.counters import MemoryCounters
from draftwood_memory.errors import CorruptValueError, MemoryStoreError
from draftwood_memory.outbox import Outbox, Waiting
from draftwood_memory.record_log import Held
from draftwood_memory.records import WRITER_BYTES, Codec, Int32Array, Kind, Record, request_key, runs, split
from draftwood_memory.replica import Replica
from draftwood_memory.residents import OVERLAP, Resident, Residents, StrategyKey, learn, make
from draftwood_memory.store import legacy
from draftwood_memory.store.clock import StoreClock
from draftwood_memory.store.encryption import KeyRing
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import KINDS_KEY, SCHEMA, MemoryName, Naming
from draftwood_memory.store.redis_client import RedisClient
from draftwood_strategies import Strategy

_log = logging.getLogger(__name__)

_FIRST_WAIT = 0.05
"""Seconds that a tenant's first request waits for its memory. `draftwood bench share`: a memory of 10,000 tokens takes
3 ms at the median and 6 ms at the 99th percentile, so any longer time works; not tuned beyond that."""
_BATCH_TOKENS = 2048
"""Tokens learned at once between two steps: half a millisecond (`draftwood bench memory`: 0.25 us a token, 0.53 on a
slower machine), a fifth of the bundled model's shortest step. Otherwise not tuned."""
_LEARN_SECONDS = 1.0
"""For the engine to learn one batch, before the next is queued. Not tuned: it only matters beside very long steps."""
_STOP_SECONDS = 4.5
"""For the memory thread to send the outbox and end; a little more than it takes at most."""
_NOTE_SECONDS = 60.0
"""Between two notes of which kind of memories this process uses. Not tuned: memories are orphans after an hour."""
_DISCARD_SECONDS = 600.0
"""Between two looks for what earlier versions stored."""

RunOnEngine: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a task between two steps, on the thread that drafts. It may raise, once there are no more steps."""
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class MemoryOperation(Protocol[Result_co]):
    """An operation on memories (see `operations`). `run` may raise MemoryStoreError."""

    async def run(self, memory: Memory) -> Result_co: ...


@dataclass(frozen=True, slots=True)
class StrategyUse:
    """Which memory and which instance of a strategy a request drafts with, and what the memory is."""

    memory: MemoryName
    key: StrategyKey
    terms: Terms = Terms()


class Learning:
    """One request's use of its tenant's memory, which stays in this process meanwhile. A context manager.

    Attributes:
        generation: of the memory when the request began; None if it was not known.
        since: when it began, on the clock of `time.monotonic`.
        repeated: it was sent before, so a strategy should not learn from its drafts: `learn` adds what is new.
    """

    def __init__(
        self, memory: Memory, resident: Resident, strategy: Strategy | None, since: float, request: str
    ) -> None:
        self.resident = resident
        self.strategy = strategy
        self.generation = resident.generation
        self.since = since
        self.request = request
        self.repeated = bool(request) and bool(resident.log.of_request(request_key(request, 0)))
        self._memory = memory

    def __enter__(self) -> Self:
        return self

    def learn(self, tokens: Int32Array, sample: int = 0) -> None:
        """Learns an answer, int32[n], unless the memory was purged since the request began.

        Of an answer to a request that was sent before, what was not learned then, a few tokens before it included.

        Args:
            sample: which one of the request's answers.
        """
        self._memory._learned(self, tokens, request_key(self.request, sample) if self.request else 0)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._memory.residents.unpin(self.resident)


class Memory:
    """The memories of all tenants and one model.

    Args:
        store: shares them with other processes, and keeps them; None keeps them in this process alone.
        fingerprint: of model and tokenizer; memories of other models are not read.
        keys: if set, stored values are encrypted and tenants' names hidden.
        schema: as `naming.SCHEMA`; another one for tests.
    """

    def __init__(
        self,
        store: RedisClient | None,
        fingerprint: str,
        config: MemoryConfig = MemoryConfig(),
        keys: KeyRing | None = None,
        schema: int = SCHEMA,
    ) -> None:
        self.config = config
        self.naming = Naming(fingerprint, None if keys is None else keys.naming_key)
        self.codec = Codec(keys)
        self.clock = StoreClock()
        self.residents = Residents(self.naming, config, self.clock, stored=store is not None)
        self.outbox = Outbox()
        self.counted = MemoryCounters()
        self.memories = None if store is None else Memories(store, self.clock, schema)
        writer = secrets.token_bytes(WRITER_BYTES)
        self.replica = (
            None
            if self.memories is None
            else Replica(
                self.memories,
                self.residents,
                self.outbox,
                self.codec,
                self.naming,
                writer,
                self.learn_records,
                self.counted,
            )
        )
        self.thread = MemoryThread(self.replica, self.residents, self.outbox, self._keep, self.counted, writer.hex())
        self._run_on_engine: RunOnEngine = lambda task: task()
        self._preloaded: Future[None] = Future()
        self._forgot = False
        self._noted_at = self._discarded_at = self._evicted_at = -float("inf")

    def start(self, run_on_engine: RunOnEngine, preload: int = 0, strategy: str = "") -> None:
        """Starts following the store.

        Args:
            preload: number of memories, the latest written, that are loaded at once, for the strategy named.
        """
        self._run_on_engine = run_on_engine
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

    def fetch(self, use: StrategyUse, later: Callable[[Strategy], object]) -> Strategy | None:
        """The instance of a request's strategy in its memory, or None: then `later` gets it, once, on another thread.

        Raises:
            UnknownStrategyError: no strategy has this name.
            ValueError, TypeError: it does not accept the options.
        """
        resident = self.residents.get(use.memory)
        behind = self.replica is not None and resident is not None and resident.loaded and not resident.live
        strategy, loading = self._instance(use)
        if behind and loading is None and resident is not None and self.thread.healthy:
            loading = self.thread.submit(self._read_on(resident))
        if loading is None or not (self.thread.healthy or self.replica is None):
            return strategy
        once = threading.Lock()

        def deliver(_: object = None) -> None:
            if once.acquire(blocking=False):
                with suppress(Exception):  # the engine takes no more
                    strategy, loading = self._instance(use)
                    self.counted.late += loading is not None
                    later(strategy)

        self.thread.wake()
        timer = threading.Timer(_FIRST_WAIT, deliver)
        timer.daemon = True
        timer.start()
        loading.add_done_callback(deliver)
        return None

    def strategy(self, tenant: str, name: str, arm: str = "") -> Strategy:
        """As `fetch`, without options; blocks until the memory is loaded, `_FIRST_WAIT` at most."""
        found: Future[Strategy] = Future()
        present = self.fetch(StrategyUse(MemoryName(tenant, arm), StrategyKey(name)), found.set_result)
        return found.result() if present is None else present

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
        return Learning(self, self.residents.pin(name), strategy, since, request)

    def purge_watch(self, name: MemoryName) -> Callable[[], bool]:
        """A function that tells whether a memory is known not to have been purged, on any replica, since now.

        False as well once the memory was evicted, since then nothing is known of it.
        """
        generation, since = self.residents.open(name).generation, time.monotonic()

        def is_kept() -> bool:
            resident = self.residents.get(name)
            return resident is not None and resident.is_current(generation, since)

        return is_kept

    @property
    def healthy(self) -> bool:
        """The store answered the latest call, or there is none. From any thread."""
        return self.thread.healthy

    def counters(self) -> MemoryCounters:
        """The counters as of now. From any thread."""
        residents = self.residents.all()
        return replace(
            self.counted,
            tenants=len(residents),
            newer_memories=sum(resident.newer for resident in residents),
            tokens=sum(resident.log.tokens for resident in residents),
            index_bytes=sum(resident.index_bytes for resident in residents),
            resident_bytes=sum(resident.nbytes for resident in residents),
            evicted=self.residents.evicted,
            outbox_records=self.outbox.pending,
            dropped=self.outbox.dropped,
        )

    async def learn_records(self, resident: Resident, records: SequenceOf[Record]) -> None:
        """Lets the published strategies of a memory learn records between steps. On the memory thread."""
        strategies = [*resident.strategies.values()]
        done: Future[None] | None = None
        for run in runs(records, _BATCH_TOKENS) if strategies else ():
            if done is not None:
                with suppress(TimeoutError):  # a long step
                    await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(done)), _LEARN_SECONDS)
            done = Future()
            if not self._on_engine(_learning_task(strategies, [record.tokens for record in run], done)):
                return

    def _instance(self, use: StrategyUse) -> tuple[Strategy, Future[None] | None]:
        if self.thread.lapsed:
            self._forget()
            return make(use.key, self.config.capacity), None
        if use.memory not in self.residents:
            make(use.key, self.config.capacity)  # what cannot be made must raise before the memory is added
        return self.residents.open(use.memory, use.terms).instance(use.key)

    async def _read_on(self, resident: Resident) -> None:
        """Of a memory that was not followed: what others have learned meanwhile, or adopted, or purged."""
        assert self.replica is not None
        async with self.replica.lock:
            await self.replica.refresh(resident)

    def _forget(self) -> None:
        """The store was away for so long that purges do not wait for this process any more."""
        if not self._forgot:
            self._forgot = True
            for resident in self.residents.all():
                resident.reset(resident.generation, resident.purged_at)
            _log.warning("the store was away for a day: nothing is drafted from memories until it is back")

    def _learned(self, scope: Learning, tokens: Int32Array, request: int) -> None:
        """Takes a request's answer. Its own strategy has learned it; the tenant's others do now."""
        resident = scope.resident
        with resident.lock:
            if self.thread.lapsed or not resident.is_current(scope.generation, scope.since):
                self.counted.stale += 1
                return
            known = resident.known(request, tokens)
            if known >= tokens.size:
                return
            tokens = tokens[max(0, known - OVERLAP) :]
            now = time.monotonic()
            for piece in split(tokens):
                held = Held(Record(Kind.OUTPUT, piece, int(self.clock.at(now)), request))
                resident.add(held)
                self.counted.learned += 1
                if self.replica is not None:
                    self.outbox.add(Waiting(resident.name, scope.generation, scope.since, now, held))
            has_learned = None if scope.repeated else scope.strategy
            others = [one for one in resident.strategies.values() if one is not has_learned]
        if self.replica is not None:
            self.thread.wake()
        if others:
            self._on_engine(_learning_task(others, [tokens], None))

    def _on_engine(self, task: Callable[[], None]) -> bool:
        """False if the engine takes no more tasks."""
        try:
            self._run_on_engine(task)
        except Exception:
            return False
        return True

    async def _preload(self, limit: int, strategy: str) -> None:
        if self.memories is None or self.replica is None or not limit:
            return
        async with self.replica.lock:
            tags = (await self.memories.tags(self.naming.fingerprint))[:limit]
            for info in reversed(await self.memories.info(tags)):
                with suppress(CorruptValueError):
                    name = self.codec.decode_name(info.tag, info.name)
                    self.residents.open(name).instance(StrategyKey(strategy))
            self.thread.wake()

    async def _keep(self) -> None:
        """What every round does besides: builds without a store, evicts, drops what is too old, notes the use."""
        now = time.monotonic()
        if self.thread.lapsed:
            self._forget()
        for resident in self.residents.all():
            if self.replica is None and resident.unbuilt:
                self._fork(resident)
                resident.build([*resident.unbuilt])
            if resident.expired:
                resident.reset(resident.generation or 0, resident.purged_at)
                resident.loaded = self.replica is None
            elif resident.loaded and resident.drop_aged():
                resident.build([*resident.strategies], replace_empty=True)
                await self._trim(resident)
        if now - self._evicted_at >= _EVICT_SECONDS or len(self.residents) > self.config.max_resident:
            self._evicted_at = now
            self.residents.evict(self.outbox.names())
        with suppress(MemoryStoreError):
            await self._note(now)

    def _fork(self, resident: Resident) -> None:
        """Without a store: an arm that is to begin with the tenant's records does."""
        base = self.residents.get(MemoryName(resident.name.tenant))
        empty = not resident.generation and not len(resident.log)
        if resident.forked and empty and base is not None and base is not resident:
            resident.replace_log([Held(held.record) for held in base.log], b"0-0")

    async def _trim(self, resident: Resident) -> None:
        if self.memories is not None and resident.config.max_age and not resident.newer and not self.thread.failing:
            with suppress(MemoryStoreError):
                await self.memories.trim(
                    resident.tag, resident.generation or 0, resident.config.oldest(self.clock.now())
                )

    async def _note(self, now: float) -> None:
        if self.memories is None or self.replica is None or self.thread.failing:
            return
        self._forgot = False
        await self.replica.note_use()
        if now - self._noted_at >= _NOTE_SECONDS:
            await self.memories.client.command("ZADD", KINDS_KEY, int(self.clock.now()), self.naming.kind)
            self._noted_at = now
        if now - self._discarded_at >= _DISCARD_SECONDS:
            await legacy.discard(self.memories.client, self.naming.fingerprint)
            self._discarded_at = now


_EVICT_SECONDS = 1.0
"""Between two evictions. Not tuned: it bounds how long surplus memories stay."""


def _learning_task(
    strategies: SequenceOf[Strategy], batch: list[Int32Array], done: Future[None] | None
) -> Callable[[], None]:
    def task() -> None:
        for strategy in strategies:
            learn(strategy, batch)
        if done is not None and not done.done():
            done.set_result(None)

    return task
