"""Sends what this process learned, and its outbox holds, to the store."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from draftwood_memory.errors import MemoryStoreError, StoreUnavailableError, WrongTypeError
from draftwood_memory.local.outbox import Waiting
from draftwood_memory.local.process import Process
from draftwood_memory.local.resident import Resident
from draftwood_memory.records import Record, runs
from draftwood_memory.replication.record_store import Batch, RecordStore
from draftwood_memory.store.memories import Memories
from draftwood_memory.store.naming import MemoryName
from draftwood_memory.store.stored import Head

_log = logging.getLogger(__name__)

_PUSH_TOKENS = 1 << 18
"""Sent in one round trip at most. Not tuned: it bounds the size of a message."""


class Sender:
    """Runs on the memory thread.

    Args:
        agree: is told what the store says of a memory in this process.
    """

    def __init__(
        self,
        memories: Memories,
        records: RecordStore,
        process: Process,
        agree: Callable[[Resident, Head], Awaitable[None]],
    ) -> None:
        self._memories = memories
        self._records = records
        self._process = process
        self._outbox, self._counters = process.outbox, process.counters
        self._agree = agree
        self._refused = False

    async def push(self) -> None:
        """Sends the outbox. Raises StoreUnavailableError."""
        refused = frozenset[MemoryName]()
        while taken := self._outbox.take(_PUSH_TOKENS, refused):
            unsent = taken
            try:
                unsent = await self._send(taken)
            finally:
                self._outbox.settle(unsent)
            refused |= {one.name for one in unsent}

    async def _send(self, taken: list[Waiting]) -> list[Waiting]:
        """Those that could not be sent now."""
        groups: dict[MemoryName, list[Waiting]] = {}
        for one in taken:
            groups.setdefault(one.name, []).append(one)
        heads = await self._heads(groups)
        sent: list[tuple[MemoryName, int, list[Waiting]]] = []
        unsent: list[Waiting] = []
        for name, waiting in groups.items():
            if (head := heads[name]) is None:
                unsent += waiting
            elif head.newer:
                self._counters.newer_records += len(waiting)
            else:
                current = [one for one in waiting if head.is_current(one.generation, one.began)]
                self._counters.stale += len(waiting) - len(current)
                sent += [(name, head.generation, run) for run in runs(current, record=_record_of)]
        for _, _, run in sent:
            for one in run:  # its time was this process's, if it was learned before the store's was known
                one.held.record = replace(_record_of(one), learned_at=int(self._memories.clock.at(one.learned)))
        batches = [Batch(name, generation, [*map(_record_of, run)]) for name, generation, run in sent]
        answers = await self._records.write(batches)
        for (name, generation, run), answer in zip(sent, answers, strict=True):
            if isinstance(answer, MemoryStoreError):
                unsent += run
                self._refuse(name, answer)
            else:
                await self._sent(name, generation, run, *answer)
        return unsent

    async def _heads(self, names: Iterable[MemoryName]) -> dict[MemoryName, Head | None]:
        """What is known here of each memory, or, if it is not in this process, to the store; None: nothing yet."""
        found: dict[MemoryName, Head | None] = {}
        elsewhere = []
        for name in names:
            if (resident := self._process.residents.get(name)) is None:
                elsewhere.append(name)
            elif resident.generation is None or resident.problem:
                found[name] = None
            else:
                since = None if resident.purged_at is None else time.monotonic() - resident.purged_at
                found[name] = Head(resident.generation, True, resident.newer, since)
        heads = await self._memories.heads([self._process.naming.tag(name) for name in elsewhere])
        for name, head in zip(elsewhere, heads, strict=True):
            if isinstance(head, WrongTypeError):
                self._refuse(name, head)
            found[name] = head if isinstance(head, Head) else None
        return found

    async def _sent(self, name: MemoryName, generation: int, run: list[Waiting], id_: bytes, head: Head) -> None:
        self._refused = False
        if head.generation > generation:
            self._counters.stale += len(run)
            await self._memories.unlink(self._process.naming.tag(name), generation)
        else:
            self._counters.pushed += len(run)
            self._counters.last_lag = time.monotonic() - run[0].learned
            for one in run:
                one.held.id = id_
        resident = self._process.residents.get(name)
        if resident is not None and resident.generation == generation:
            await self._agree(resident, head)

    def _refuse(self, name: MemoryName, error: MemoryStoreError) -> None:
        if isinstance(error, StoreUnavailableError):
            raise error
        if not self._refused:
            self._refused = True  # logged once, until the store accepts records again
            _log.error("store refuses learned records of %s: %s", self._process.naming.tag(name), error)


def _record_of(one: Waiting) -> Record:
    return one.held.record
