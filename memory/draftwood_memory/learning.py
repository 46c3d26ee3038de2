"""One request's use of its tenant's memory: which it drafts from, and what it adds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from draftwood_memory.config import MemoryOverrides
from draftwood_memory.local.outbox import PendingRecord
from draftwood_memory.local.process import Process
from draftwood_memory.local.record_log import LoggedRecord
from draftwood_memory.local.resident import OVERLAP, Resident, StrategyKey
from draftwood_memory.records import Int32Array, Kind, Record, request_key, split
from draftwood_memory.replication.replica import Replica
from draftwood_memory.store.naming import MemoryName
from draftwood_strategies import Strategy


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
        generation: of the memory when the request began; None if it was not known.
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
        self.generation = resident.generation
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
            lapsed = self._replica is not None and self._replica.processes.lapsed
            if lapsed or not resident.is_current(self.generation, self.since):
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
                    self._process.outbox.add(PendingRecord(resident.name, self.generation, self.since, now, logged))
            has_learned = None if self.repeated else self.strategy
            others = [one for one in resident.strategies.values() if one is not has_learned]
        if self._replica is not None:
            self._wake()
        if others:
            self._process.between_steps.learn(others, [tokens])
