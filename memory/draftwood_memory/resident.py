"""One memory in this process, with the strategies that requests draft with."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from draftwood_memory.config import Capacity, MemoryConfig
from draftwood_memory.records import Int32Array, LoggedRecord, Record, RecordLog, batched
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.stored import StoreClock
from draftwood_strategies import Strategy, create
from draftwood_strategies.base import SupportsRebuild
from draftwood_strategies.options import Options
from draftwood_strategies.registry import options_of

_log = logging.getLogger(__name__)

LIVE_SECONDS = 60.0
"""Seconds after its last request for which a memory is followed. Bounds the keys of a blocking read; a later request
first reads what the memory has missed."""
_MAX_INSTANCES = 8
"""Of one memory: requests may name any strategy, and configurations change."""
OVERLAP = 16
"""Tokens that are learned again before those that are new in the answer to a repeated request, so that drafts lead from
one to the other."""
_AGE_PARTS = 64
"""A record is dropped a 64th of the maximum age too late at most; each time, the strategies are rebuilt."""
_BATCH_TOKENS = 512
"""Tokens learned at once between two steps, in 1 ms: a token takes 1.9 to 2.0 us."""
_LEARN_SECONDS = 1.0
"""For the engine to learn one batch, before the next is queued. It only matters beside very long steps."""
RunOnEngine: TypeAlias = Callable[[Callable[[], None]], object]
"""Runs a task between two steps, on the thread that drafts. It may raise, once there are no more steps."""


class StrategyKey(NamedTuple):
    """A strategy and its options: requests with the same ones share an instance."""

    name: str
    options: Options = ()


def make(key: StrategyKey, capacity: Capacity) -> Strategy:
    """A new instance with at most the memory's capacity, if the strategy has one.

    Raises:
        UnknownStrategyError: no strategy has this name.
        ValueError, TypeError: it does not accept the options.
    """
    options = dict(key.options)
    if "capacity_tokens" in options_of(key.name, options):
        expected = min(capacity.tokens, capacity.bytes // 4)
        options["capacity_tokens"] = min(int(options.get("capacity_tokens", expected)), expected)
    return create(key.name, **options)


def remade(key: StrategyKey, capacity: Capacity, earlier: Strategy) -> Strategy:
    """A new instance as `make` returns it, without texts; what `earlier` has learned besides stays, if it can."""
    strategy = make(key, capacity)
    if isinstance(strategy, SupportsRebuild):
        try:
            strategy.keep_learned(earlier)
        except Exception:
            _log.exception("strategy %s keeps nothing of what it learned", key.name)
            strategy = make(key, capacity)
    return strategy


def learn(strategy: Strategy, sequences: Iterable[Int32Array]) -> None:
    """Lets a strategy learn whole sequences, int32[n] each, if it can. A failure is logged and affects nothing else."""
    learn_one: Any = getattr(strategy, "learn", None)
    if learn_one is None:
        return
    try:
        for tokens in sequences:
            learn_one(tokens)
    except Exception:
        _log.exception("strategy %s cannot learn", type(strategy).__name__)


@dataclass(eq=False, slots=True)
class Resident:
    """One memory in this process.

    Attributes:
        config: its limits.
        clock: by which its records age.
        forked: while the store has nothing of it, it begins with what its tenant's memory has.
        log: its records: those of the store up to `position`, and this process's own.
        epoch: raised by each purge; None before the first answer of the store.
        purged_at, used_at, changed_at, aged_at: on the clock of `time.monotonic`.
        position: the id of the last entry that was read.
        loaded: the store's entries up to `position` were read.
        newer: a newer version wrote to it: nothing of it is written here.
        resized: its capacity has changed, which log and strategies do not follow yet.
        retry_at: until then it is not loaded, since the store could not serve it.
        problem: why it could not; "" if it could.
        strategies: the instances that requests draft with, those used last at the end.
        unbuilt: strategies without the log yet, each with the future that completes when it has it.
        learned_meanwhile: what was learned here while instances are being built; None while none are.
        to_learn: records that the log has and these strategies are to learn; another queue after a purge.
        learning: the task in which they do; None before the first one.
        pins: number of requests and operations that use it now.
    """

    name: MemoryName
    tag: str
    config: MemoryConfig
    clock: StoreClock
    loaded: bool
    log: RecordLog = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    forked: bool = False
    epoch: int | None = None
    purged_at: float | None = None
    position: bytes = b"0-0"
    newer: bool = False
    resized: bool = False
    retry_at: float = 0.0
    problem: str = ""
    strategies: dict[StrategyKey, Strategy] = field(default_factory=dict)
    unbuilt: dict[StrategyKey, Future[None]] = field(default_factory=dict)
    learned_meanwhile: list[LoggedRecord] | None = None
    to_learn: deque[tuple[list[Strategy], SequenceOf[Record]]] = field(default_factory=deque)
    learning: asyncio.Task[None] | None = None
    pins: int = 0
    used_at: float = field(default_factory=time.monotonic)
    changed_at: float = 0.0
    aged_at: float = 0.0

    def __post_init__(self) -> None:
        self.log = RecordLog(self.config.capacity)

    @property
    def index_bytes(self) -> int:
        """Bytes of its strategies, of those that report them."""
        return sum(int(getattr(strategy, "nbytes", 0)) for strategy in [*self.strategies.values()])

    @property
    def nbytes(self) -> int:
        """Bytes of its records and strategies."""
        return self.log.nbytes + self.index_bytes

    @property
    def live(self) -> bool:
        """Whether it is followed: loaded, and used lately."""
        return self.loaded and (self.pins > 0 or time.monotonic() - self.used_at < LIVE_SECONDS)

    @property
    def learns(self) -> bool:
        """Its strategies have not learned yet all that its log has from other processes or an import."""
        return self.learning is not None and not self.learning.done()

    @property
    def expired(self) -> bool:
        """It holds records, and nothing was added for so long that the store has deleted it."""
        return len(self.log) > 0 and 0 < self.config.stored_seconds < time.monotonic() - self.changed_at

    def reconfigure(self, config: MemoryConfig, forked: bool) -> None:
        """Applies the overrides of a request."""
        with self.lock:
            self.forked = forked
            self.resized |= config.capacity != self.config.capacity
            self.config = config
            self.log.capacity = config.capacity

    def instance(self, key: StrategyKey) -> tuple[Strategy, Future[None] | None]:
        """The instance of a strategy, and the future that completes when it has learned the log; None if it has.

        Of more than `_MAX_INSTANCES` the one used longest ago is dropped; sequences that use it keep it.

        Raises:
            UnknownStrategyError: no strategy has this name.
            ValueError, TypeError: it does not accept the options.
        """
        with self.lock:
            strategy = self.strategies.pop(key, None)
            if strategy is None:
                strategy = make(key, self.config.capacity)
                self.unbuilt[key] = Future()
            self.strategies[key] = strategy
            oldest = next(iter(self.strategies))
            dropped = None
            if len(self.strategies) > _MAX_INSTANCES:
                del self.strategies[oldest]
                dropped = self.unbuilt.pop(oldest, None)
            loading = self.unbuilt.get(key)
        if dropped is not None:
            dropped.set_result(None)
        return strategy, loading

    def is_current(self, epoch: int | None, since: float) -> bool:
        """Whether no purge came after a request that began at `since`, in `epoch` if that was known then."""
        return epoch in (None, self.epoch) and (self.purged_at is None or since > self.purged_at)

    def learned_prefix(self, request: int, tokens: Int32Array) -> int:
        """How many tokens of an answer, from its begin, were learned when the request was sent before. With the lock.

        Args:
            request: as `Record.request`.
        """
        learned = 0
        for record in self.log.of_request(request):
            for start in (learned, max(0, learned - OVERLAP)):
                same = record.tokens[: tokens.size - start] == tokens[start : start + record.tokens.size]
                learned = max(learned, start + int(same.size if same.all() else same.argmin()))
        return learned

    def add(self, logged: LoggedRecord) -> None:
        """A record was learned. With the lock."""
        self.log.append(logged)
        self.changed_at = time.monotonic()
        if self.learned_meanwhile is not None:
            self.learned_meanwhile.append(logged)

    def note_stored(self, records: Iterable[LoggedRecord], id_: bytes) -> None:
        """The store has records in the entry of this id."""
        with self.lock:
            for logged in records:
                self.log.stored(logged, id_)

    def first_id(self) -> bytes | None:
        """The oldest entry that the store has to keep; None if that is not known."""
        with self.lock:
            return self.log.first_id if self.loaded and self.log.trimmed else None

    def reset(self, epoch: int | None, purged_at: float | None) -> None:
        """Drops all records and begins an epoch. Live requests keep the strategies that they have."""
        fresh = {key: make(key, self.config.capacity) for key in [*self.strategies]}
        with self.lock:
            self.epoch, self.purged_at = epoch, purged_at
            self.log = RecordLog(self.config.capacity)
            self.strategies.update(fresh)
            self.learned_meanwhile = None
            self.to_learn = deque()
            self.loaded, self.position = False, b"0-0"

    def drop_aged(self) -> bool:
        """Drops the records that are too old, and those beyond a changed capacity; returns whether there were any."""
        dropped = False
        with self.lock:
            if self.resized:
                self.resized, dropped = False, True
                self.log.resize(self.config.capacity)
            max_age, now = self.config.max_age, time.monotonic()
            if max_age and now - self.aged_at >= max_age / _AGE_PARTS:
                self.aged_at = now
                dropped |= self.log.drop_older(self.config.oldest(self.clock.now()))
        return dropped

    def replace_log(self, stored: list[LoggedRecord], position: bytes) -> None:
        """The store's records, then this process's own that came while they were read, are the log. It is loaded."""
        with self.lock:
            log = RecordLog(self.config.capacity, stored)
            for logged in self.learned_meanwhile or ():
                log.append(logged)
            self.log, self.position, self.loaded, self.learned_meanwhile = log, position, True, None
            newest = max((logged.record.learned_at for logged in log), default=0)
            self.changed_at = time.monotonic() - max(0.0, self.clock.now() - newest - 1.0)  # times are in whole seconds

    def build(self, keys: list[StrategyKey], replace_empty: bool = False) -> None:
        """Replaces instances by new ones that have learned the log, and keep what the earlier ones learned besides. Not
        on the thread that drafts.

        Args:
            replace_empty: replace also if there is nothing to learn.
        """
        with self.lock:
            self.learned_meanwhile = []
            log = self.log
            records = log.records(self.config.oldest(self.clock.now()))
            earlier = {key: self.strategies[key] for key in keys if key in self.strategies}
        built = {}
        if records or replace_empty:
            for key, strategy in earlier.items():
                built[key] = remade(key, self.config.capacity, strategy)
                learn(built[key], (record.tokens for record in records))
        with self.lock:
            for strategy in built.values():
                learn(strategy, (logged.record.tokens for logged in self.learned_meanwhile or ()))
            self.learned_meanwhile = None
            if self.log is log:  # else it was purged
                self.strategies.update({key: strategy for key, strategy in built.items() if key in self.strategies})
            waiting = [self.unbuilt.pop(key) for key in keys if key in self.unbuilt]
        for future in waiting:
            future.set_result(None)


class BetweenSteps:
    """The engine's thread, as far as strategies learn on it.

    Attributes:
        run_on_engine: at once, on the caller's thread, until the engine starts.
        on_learned: called on the memory thread when a memory's strategies have learned what `learn_later` was given.
    """

    def __init__(self) -> None:
        self.run_on_engine: RunOnEngine = lambda task: task()
        self.on_learned: Callable[[], None] = lambda: None

    def learn(self, strategies: SequenceOf[Strategy], sequences: list[Int32Array]) -> Future[None] | None:
        """Lets strategies learn sequences, int32[n] each.

        Returns:
            A future that completes then; None if the engine takes no more.
        """
        done: Future[None] = Future()

        def task() -> None:
            for strategy in strategies:
                learn(strategy, sequences)
            if not done.done():
                done.set_result(None)

        try:
            self.run_on_engine(task)
        except Exception:
            return None
        return done

    def learn_later(self, resident: Resident, records: SequenceOf[Record]) -> None:
        """Lets the published strategies of a memory learn records that its log has, a batch between two steps.

        On the memory thread, which goes on meanwhile: a large import takes as long as thousands of steps. A purge ends
        it.
        """
        if records:
            resident.to_learn.append(([*resident.strategies.values()], records))
        if resident.to_learn and not resident.learns:
            resident.learning = asyncio.create_task(self._learn_all(resident))

    async def learned(self, resident: Resident) -> None:
        """Waits for what `learn_later` was given. On the memory thread."""
        if resident.learning is not None:
            await asyncio.wait([resident.learning])

    async def _learn_all(self, resident: Resident) -> None:
        while resident.to_learn:
            await self._learn_next(resident)
        self.on_learned()

    async def _learn_next(self, resident: Resident) -> None:
        queue, before = resident.to_learn, None
        strategies, records = queue.popleft()
        for batch in batched(records, _BATCH_TOKENS) if strategies else ():
            if resident.to_learn is not queue:  # it was purged
                return
            if before is not None:
                with suppress(TimeoutError):  # a long step
                    await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(before)), _LEARN_SECONDS)
            before = self.learn(strategies, [record.tokens for record in batch])
            if before is None:
                return
