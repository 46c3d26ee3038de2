"""The memories of all tenants in this process: a request's strategy instance, and learning of its output.

Nothing here waits for a store, except the first request of a tenant that is not in this process: it waits a moment, or
not at all while the store does not answer.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TypeAlias

from draftwood_model_runner.errors import EngineStoppedError
from draftwood_model_runner.request import MemoryTerms, Request
from draftwood_model_runner.sequence import Sequence
from draftwood_service.memory.codec import Codec, KeyRing, Kind, Record, split
from draftwood_service.memory.config import MemoryConfig
from draftwood_service.memory.errors import CorruptValueError
from draftwood_service.memory.learning import HasOutput, LearnOnExit, batches, learning_task
from draftwood_service.memory.naming import MemoryName, Naming
from draftwood_service.memory.presence import Presence
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.instances import InstanceKey, learn
from draftwood_service.memory.replica.outbox import Outbox
from draftwood_service.memory.replica.replica import Replica
from draftwood_service.memory.replica.replica_thread import ReplicaThread
from draftwood_service.memory.replica.residents import Resident, Residents
from draftwood_service.memory.store.base import MemoryStore
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Int32Array

_FIRST_WAIT = 0.05
"""Seconds that a tenant's first request waits for its memory. `draftwood bench share`: a memory of 10,000 tokens takes
3 ms at the median and 6 ms at the 99th percentile, so any longer time works; not tuned beyond that."""
_LEARN_SECONDS = 1.0
"""For the engine to learn one batch, before the next is queued. Not tuned: it only matters beside very long steps."""
_STOP_SECONDS = 4.5
"""For the memory thread to send the outbox and end; a little more than it takes at most."""
_RETAINED_TOKENS = 1 << 20
"""Of confirmed records, kept for a shared store that loses them in a failover. Up to 4 MiB; the soak test showed it as
growth of the process, so a store in this process, which loses nothing, has none (docs/decisions.md)."""

RunOnEngine: TypeAlias = Callable[[Callable[[], None]], None]
"""Runs a task between two steps of the engine, on its thread. May raise EngineStoppedError."""


@dataclass(frozen=True, slots=True)
class StrategyUse:
    """Which memory and which instance of a strategy a request drafts with, and what the memory is."""

    memory: MemoryName
    key: InstanceKey
    terms: MemoryTerms

    @classmethod
    def of(cls, request: Request) -> StrategyUse:
        key = InstanceKey(request.strategy_name, request.strategy_options)
        return cls(MemoryName(request.tenant, request.arm), key, request.memory)


class MemoryManager:
    """The memories of all tenants, in this process and in the store. Called from the engine's thread.

    Args:
        fingerprint: of model and tokenizer; memories of other models are not read.
        keys: if set, stored values are encrypted and tenants' names hidden.
    """

    def __init__(
        self, store: MemoryStore, fingerprint: str, config: MemoryConfig = MemoryConfig(), keys: KeyRing | None = None
    ) -> None:
        self.store = store
        self.config = config
        self.naming = Naming(fingerprint, None if keys is None else keys.naming_key)
        self.codec = Codec(fingerprint, keys)
        self.residents = Residents(self.naming, config)
        self.outbox = Outbox(secrets.token_hex(8), retained_tokens=_RETAINED_TOKENS if store.shared else 0)
        self._counters = MemoryCounters()
        presence = Presence(store, self.naming, self.codec, config, self.outbox.source, self._counters)
        self.replica = Replica(
            store, self.residents, self.outbox, self.codec, self._learn_records, self._counters, presence
        )
        self.thread = ReplicaThread(self.replica, config.round_seconds)
        self._run_on_engine: RunOnEngine = _run_at_once
        self._preloaded: Future[None] = Future()

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

    def fetch(self, request: StrategyUse, later: Callable[[Strategy], object]) -> Strategy | None:
        """The instance of a request's strategy in its memory, or None: then `later` gets it, once, on another thread.

        Raises:
            UnknownStrategyError: no strategy has this name.
            ValueError, TypeError: it does not accept the options.
        """
        strategy, loading = self._instance(request)
        if loading is None or not self.thread.healthy:
            return strategy
        once = threading.Lock()

        def deliver(_: object = None) -> None:
            if once.acquire(blocking=False):
                with suppress(EngineStoppedError):
                    strategy, loading = self._instance(request)
                    self._counters.late += loading is not None
                    later(strategy)

        self.thread.wake()
        timer = threading.Timer(_FIRST_WAIT, deliver)
        timer.daemon = True
        timer.start()
        loading.add_done_callback(deliver)
        return None

    async def strategy(self, tenant: str, name: str) -> Strategy:
        """As `fetch`, for an event loop, without options."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Strategy] = loop.create_future()

        def deliver(strategy: Strategy) -> None:
            if not loaded.done():
                loaded.set_result(strategy)

        use = StrategyUse(MemoryName(tenant), InstanceKey(name), MemoryTerms())
        present = self.fetch(use, lambda strategy: loop.call_soon_threadsafe(deliver, strategy))
        return await loaded if present is None else present

    def _instance(self, use: StrategyUse) -> tuple[Strategy, Future[None] | None]:
        if self.residents.get(use.memory) is None:
            # What cannot be made must raise before the memory is added.
            Resident(use.memory, "", self.config).instance(use.key)
        return self.residents.open(use.memory, use.terms).instance(use.key)

    def learning(self, sequences: SequenceOf[Sequence]) -> AbstractContextManager[object]:
        """Around a request's samples, which share a memory and a strategy: their outputs are learned on exit."""
        first = sequences[0]
        if first.strategy is None:
            return nullcontext()
        prompt = first.request.prompt if first.request.memory.with_prompts else None
        return self.learn_on_exit(StrategyUse.of(first.request).memory, first.strategy, sequences, prompt)

    def learn_on_exit(
        self, memory: MemoryName, strategy: Strategy, outputs: SequenceOf[HasOutput], prompt: Int32Array | None = None
    ) -> LearnOnExit:
        """As `learning`, for anything with an output."""
        resident = self.residents.pin(memory)
        return LearnOnExit(resident, strategy, outputs, prompt, self._learned, self.residents.unpin)

    def _learned(self, scope: LearnOnExit, tokens: Int32Array) -> None:
        """Takes a request's output, int32[n]. Its own strategy has learned it; the tenant's others do now."""
        resident = scope.resident
        with resident.lock:
            if not resident.is_current(scope.epoch, scope.since):
                self._counters.stale += 1
                return
            for piece in split(tokens):
                self.outbox.add(resident.name, scope.epoch, Kind.OUTPUT, piece)
                self._counters.learned += 1
            if resident.learned_meanwhile is not None:
                resident.learned_meanwhile.append(tokens)
            others = [one for one in resident.strategies.values() if one is not scope.strategy]
        if others:
            with suppress(EngineStoppedError):
                self._run_on_engine(lambda: _learn_all(others, tokens))

    def purge_watch(self, tenant: str, arm: str) -> Callable[[], bool]:
        """A function that tells whether a memory is known not to have been purged, on any replica, since now.

        False as well once the memory was evicted, since then nothing is known of it.
        """
        name = MemoryName(tenant, arm)
        epoch, since = self.residents.open(name).epoch, time.monotonic()

        def is_kept() -> bool:
            resident = self.residents.get(name)
            return resident is not None and resident.is_current(epoch, since)

        return is_kept

    @property
    def healthy(self) -> bool:
        """The store answered the latest round. From any thread."""
        return self.thread.healthy

    def counters(self) -> MemoryCounters:
        """The counters as of now. From any thread."""
        residents = self.residents.all()
        return replace(
            self._counters,
            tenants=len(residents),
            newer_memories=sum(resident.newer for resident in residents),
            tokens=sum(resident.log.tokens for resident in residents),
            index_bytes=sum(resident.index_bytes for resident in residents),
            resident_bytes=sum(resident.nbytes for resident in residents),
            evicted=self.residents.evicted,
            outbox_records=self.outbox.pending,
            retained_records=self.outbox.retained,
            dropped=self.outbox.dropped,
        )

    async def _preload(self, limit: int, strategy: str) -> None:
        async with self.replica.lock:
            tags = (await self.store.tags())[:limit] if limit else []
            for info in reversed(await self.store.info(tags)):
                with suppress(CorruptValueError):
                    if info.name:
                        self.residents.open(self.codec.decode_name(info.tag, info.name)).instance(InstanceKey(strategy))
            self.thread.wake()

    async def _learn_records(self, resident: Resident, records: SequenceOf[Record]) -> None:
        if not resident.strategies:
            return
        for batch in batches(records):
            done: Future[None] = Future()
            try:
                self._run_on_engine(learning_task(resident, batch, done))
            except EngineStoppedError:
                return
            try:
                async with asyncio.timeout(_LEARN_SECONDS):
                    await asyncio.shield(asyncio.wrap_future(done))
            except TimeoutError:
                pass  # the engine is in a long step and runs the task after it


def _learn_all(strategies: SequenceOf[Strategy], tokens: Int32Array) -> None:
    for strategy in strategies:
        learn(strategy, [tokens])


def _run_at_once(task: Callable[[], None]) -> None:
    task()
