"""Decodes what the store returned of a memory: the snapshot and the log's values."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from draftwood_service.memory.codec import Codec, Record
from draftwood_service.memory.errors import CorruptValueError, NewerFormatError, UnknownKeyError
from draftwood_service.memory.replica.counters import MemoryCounters
from draftwood_service.memory.replica.residents import Resident
from draftwood_service.memory.replica.tenant_log import TenantLog
from draftwood_service.memory.store.base import MemoryStore, Page

_log = structlog.get_logger(__name__)

_READABLE_ELSEWHERE = (NewerFormatError, UnknownKeyError)


class PageReader:
    """Decodes pages. A value that cannot be decoded is counted and skipped.

    One that another process may be able to decode (a newer format, another key) makes the memory not foldable, so that
    this process writes no snapshot without it.
    """

    def __init__(self, store: MemoryStore, codec: Codec, counters: MemoryCounters) -> None:
        self._store = store
        self._codec = codec
        self._counters = counters

    async def snapshot_records(self, resident: Resident, page: Page) -> list[Record] | None:
        """The snapshot's records, [] if it is not readable here; None if it was set aside, which outdates the page."""
        if page.snapshot is None:
            return []
        try:
            snapshot = self._codec.decode_snapshot(resident.tag, page.epoch or 0, page.snapshot)
            if (snapshot.epoch, snapshot.position, snapshot.chain) != (page.epoch, page.start, page.before):
                raise CorruptValueError("the log does not continue this snapshot")
            return snapshot.records
        except CorruptValueError as error:
            self._counters.unreadable += 1
            if not (page.newer or isinstance(error, _READABLE_ELSEWHERE)):
                _log.error("snapshot set aside; serving the log only", memory=resident.tag, why=str(error))
                await self._store.set_aside(resident.tag, page.snapshot)
                return None
            _log.error("snapshot not readable here; serving the log only", memory=resident.tag, why=str(error))
            resident.foldable = False
            return []

    def append(self, resident: Resident, log: TenantLog, values: Iterable[bytes]) -> list[Record]:
        """Appends the store's values to `log`; returns the records of those that could be decoded."""
        new: list[Record] = []
        for value in values:
            record: Record | None = None
            try:
                record = self._codec.decode_record(resident.tag, resident.epoch or 0, value)
                new.append(record)
            except CorruptValueError as error:
                self._counters.unreadable += 1
                if not resident.newer:  # its log line says so for all of its records
                    _log.error("record not readable", memory=resident.tag, position=log.position + 1, why=str(error))
                resident.foldable &= not isinstance(error, _READABLE_ELSEWHERE)
            log.append(record, value)
        return new
