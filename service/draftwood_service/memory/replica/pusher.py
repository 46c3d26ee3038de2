"""Sends the outbox to the store."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import structlog

from draftwood_service.memory.codec import Codec, Record
from draftwood_service.memory.errors import MemoryStoreError, NewerMemoryError, StoreUnavailableError
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.outbox import Outbox
from draftwood_service.memory.replica.residents import HOT_SECONDS, Resident, Residents
from draftwood_service.memory.store.base import Append, Appended, AppendResult, Entry, LogFull, MemoryStore, Stale

_log = structlog.get_logger(__name__)

_BATCH_TOKENS = 1 << 16
_BATCH_MEMORIES = 64
_MAX_BATCHES = 16
"""One round trip appends the next 65,536 tokens of up to 64 memories, and a round has at most 16 of them. Not tuned:
they bound the size of a message and the length of a round; ordinary rounds are far below all three."""


_BATCH_EVICTED = 8
"""Evicted memories that are loaded again in one round to be sent. Not tuned: it bounds the bytes they take."""


def append_of(
    codec: Codec, resident: Resident, epoch: int, source: str, records: SequenceOf[Record], after: int = 0
) -> Append:
    """The store's `Append` of records of one source."""
    tag = resident.tag
    entries = [
        Entry(record.seq, int(record.tokens.size), codec.encode_record(tag, epoch, record)) for record in records
    ]
    return Append(tag, epoch, source, codec.encode_name(tag, resident.name), entries, after, resident.limits)


class Pusher:
    """Appends the outbox's records to the store's logs."""

    def __init__(
        self, store: MemoryStore, residents: Residents, outbox: Outbox, codec: Codec, counters: MemoryCounters
    ) -> None:
        self._store = store
        self._residents = residents
        self._outbox = outbox
        self._codec = codec
        self._counters = counters
        self._refused = False

    async def push(self) -> None:
        """Sends all that can be sent now. Raises StoreUnavailableError."""
        blocked: set[str] = set()
        for _ in range(_MAX_BATCHES):
            appends = [append for append in map(self._append, self._sendable(blocked)) if append is not None]
            if not appends:
                return
            results = await self._store.append(appends)
            for append, result in zip(appends, results, strict=True):
                if not self._handle(append, result):
                    blocked.add(append.tag)

    def _sendable(self, blocked: set[str]) -> list[Resident]:
        names = self._outbox.pending_memories()
        # Some may have been evicted while the store was away; they must be loaded, to be sent and folded.
        evicted = [name for name in names if name not in self._residents]
        for name in evicted[:_BATCH_EVICTED]:
            self._residents.open(name)
        found = [one for one in map(self._residents.get, names) if one is not None]
        return [one for one in found if one.epoch is not None and one.tag not in blocked][:_BATCH_MEMORIES]

    def _append(self, resident: Resident) -> Append | None:
        assert resident.epoch is not None
        records = [one.record for one in self._outbox.take(resident.name, _BATCH_TOKENS)]
        if not records:
            return None
        after = self._outbox.confirmed(resident.name)
        return append_of(self._codec, resident, resident.epoch, self._outbox.source, records, after)

    def _handle(self, append: Append, result: AppendResult) -> bool:
        """Whether the memory's next batch may be sent."""
        resident = self._residents.by_tag(append.tag)
        assert resident is not None
        resident.hot_until = time.monotonic() + HOT_SECONDS
        self._refused &= not isinstance(result, Appended)
        if isinstance(result, Appended):
            self._confirm(resident, append.entries[-1].seq)
            self._counters.pushed += len(append.entries)
            resident.note_append(result)
            return True
        if isinstance(result, LogFull):
            resident.fold_due = True
        elif isinstance(result, Stale):
            resident.loaded = False
        elif isinstance(result, NewerMemoryError):
            # The store will never take them from this process, and they must not take the place of others.
            self._counters.newer_records += self._outbox.discard(resident.name)
        elif isinstance(result, StoreUnavailableError):
            raise result
        elif isinstance(result, MemoryStoreError) and not self._refused:
            self._refused = True  # logged once, until the store accepts records again
            _log.error("store refuses learned records", memory=append.tag, why=str(result))
        return False

    def _confirm(self, resident: Resident, seq: int) -> None:
        waiting = self._outbox.take(resident.name, 1)
        if waiting:
            self._counters.last_lag = time.monotonic() - waiting[0].since
        self._outbox.confirm(resident.name, seq)
