"""A store inside this process, lost when it ends. Tests also use it as the reference for the Redis store."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from draftwood_service.memory.errors import MemoryStoreError, NewerMemoryError
from draftwood_service.memory.naming import fingerprint_of
from draftwood_service.memory.store.base import (
    INSTANCE_SECONDS,
    SCHEMA,
    Append,
    Appended,
    AppendResult,
    Entry,
    Fold,
    Limits,
    LogFull,
    Lost,
    Page,
    ReadRequest,
    Stale,
    StoredMemoryInfo,
)
from draftwood_service.memory.store.chain import chained


@dataclass(slots=True)
class _Memory:
    """One memory. `entries[i]` has the position `position - len(entries) + 1 + i`, `before[i]` the chain before it."""

    epoch: int
    schema: int
    name: bytes = b""
    position: int = 0
    chain: str = ""
    entries: list[Entry] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    log_bytes: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    snapshot: bytes | None = None
    snapshot_position: int = 0
    snapshot_tokens: int = 0
    snapshot_records: int = 0
    snapshot_at: float = 0.0
    purged_at: float | None = None
    expires_at: float = math.inf

    @property
    def oldest(self) -> int:
        """The position of the first entry; one past the end if there is none."""
        return self.position - len(self.entries) + 1

    @property
    def bytes(self) -> int:
        return self.log_bytes + len(self.snapshot or b"")


class InProcessStore:
    """A `MemoryStore` for one process.

    Args:
        max_memories, max_bytes: of more, the memories with the oldest last write are deleted.
        shared: behaves as a store that several processes write to; for tests.
        schema: as `SCHEMA`; another one for tests.
    """

    def __init__(
        self,
        limits: Limits,
        max_memories: int = 100_000,
        max_bytes: int = 1 << 40,
        shared: bool = False,
        schema: int = SCHEMA,
    ) -> None:
        self.shared = shared
        self.description = "memory"
        self._limits = limits
        self._schema = schema
        self._max_memories = max_memories
        self._max_bytes = max_bytes
        self._memories: dict[str, _Memory] = {}
        self._active: OrderedDict[str, int] = OrderedDict()
        self._leases: dict[str, tuple[str, float]] = {}
        self._writes = 0
        self._next_expiry = math.inf
        self._kinds: dict[str, float] = {}
        self._instances: dict[str, tuple[float, str, str]] = {}

    async def append(self, appends: SequenceOf[Append]) -> list[AppendResult]:
        for append in appends:
            self._announce(append.tag)
        self._delete_expired()
        results = [self._append(append) for append in appends]
        self._delete_surplus()
        return results

    async def read(self, requests: SequenceOf[ReadRequest]) -> list[Page | MemoryStoreError]:
        self._delete_expired()
        return [self._read(request) for request in requests]

    async def activity(self, after: int) -> tuple[int, list[str]]:
        return self._writes, [tag for tag, at in self._active.items() if at > after]

    async def lease(self, tag: str, holder: str, seconds: float) -> bool:
        now = time.monotonic()
        if self._leases.get(tag, ("", 0.0))[1] > now:
            return False
        self._leases[tag] = holder, now + seconds
        return True

    async def fold(self, fold: Fold, holder: str) -> bool:
        memory = self._memories.get(fold.tag)
        if self._leases.get(fold.tag, ("", 0.0))[0] != holder:
            return False
        del self._leases[fold.tag]
        if memory is None or self._is_newer(memory) or memory.epoch != fold.epoch or memory.position < fold.position:
            return False
        covered = memory.snapshot_position
        if covered > fold.position or (covered == fold.position and memory.snapshot is not None):
            return False
        index = fold.position + 1 - memory.oldest
        if index < 0 or (memory.before[index] if index < len(memory.before) else memory.chain) != fold.chain:
            return False
        memory.snapshot, memory.snapshot_position = fold.value, fold.position
        memory.snapshot_tokens, memory.snapshot_records = fold.tokens, fold.records
        memory.snapshot_at = time.monotonic()
        self._renew(memory, fold.limits)
        gone = max(0, index - fold.tail)
        memory.log_bytes -= sum(len(entry.value) for entry in memory.entries[:gone])
        del memory.entries[:gone], memory.before[:gone]
        return True

    async def seed(self, fold: Fold) -> bool:
        if fold.tag in self._memories:
            return False
        self._announce(fold.tag)
        self._memories[fold.tag] = _Memory(
            fold.epoch,
            self._schema,
            fold.name,
            fold.position,
            fold.chain,
            marks=dict(fold.marks),
            snapshot=fold.value,
            snapshot_position=fold.position,
            snapshot_tokens=fold.tokens,
            snapshot_records=fold.records,
            snapshot_at=time.monotonic(),
        )
        self._renew(self._memories[fold.tag], fold.limits)
        return True

    async def purge(self, tag: str, at_least: int, only_raise: bool = False) -> int:
        known = self._memories.get(tag)
        if self._is_newer(known):
            raise NewerMemoryError()
        if only_raise and known is not None and known.epoch >= at_least:
            return known.epoch
        epoch = at_least
        if not only_raise:
            epoch = max(at_least, time.time_ns() // 1000, (0 if known is None else known.epoch) + 1)
        self._announce(tag)
        self._memories[tag] = _Memory(epoch, self._schema, purged_at=time.monotonic())
        self._leases.pop(tag, None)
        return epoch

    async def set_aside(self, tag: str, snapshot: bytes) -> bool:
        memory = self._memories.get(tag)
        if memory is None or self._is_newer(memory) or memory.snapshot != snapshot:
            return False
        memory.snapshot = None
        return True

    async def tags(self, fingerprint: str | None = None) -> list[str]:
        return [tag for tag in reversed(self._active) if fingerprint is None or fingerprint_of(tag) == fingerprint]

    async def register(self, kind: str, instance: str, settings: str) -> list[str]:
        now = self._kinds[kind] = time.monotonic()
        self._instances[instance] = now, kind, settings
        return [
            with_settings
            for other, (at, of, with_settings) in self._instances.items()
            if other != instance and fingerprint_of(of) == fingerprint_of(kind) and now - at <= INSTANCE_SECONDS
        ]

    async def kinds(self) -> dict[str, float]:
        now = time.monotonic()
        return {kind: now - at for kind, at in self._kinds.items()}

    async def info(self, tags: SequenceOf[str]) -> list[StoredMemoryInfo]:
        self._delete_expired()
        return [self._info(tag, self._memories[tag]) for tag in tags if tag in self._memories]

    async def close(self) -> None:
        pass

    def _is_newer(self, memory: _Memory | None) -> bool:
        return memory is not None and memory.schema > self._schema

    def _delete_expired(self) -> None:
        now = time.monotonic()
        if now > self._next_expiry:
            for tag in [tag for tag, memory in self._memories.items() if memory.expires_at < now]:
                del self._memories[tag], self._active[tag]
            self._next_expiry = min((memory.expires_at for memory in self._memories.values()), default=math.inf)

    def _delete_surplus(self) -> None:
        excess = sum(memory.bytes for memory in self._memories.values()) - self._max_bytes
        while len(self._active) > self._max_memories or (excess > 0 and len(self._active) > 1):
            tag, _ = self._active.popitem(last=False)
            gone = self._memories.pop(tag, None)
            excess -= 0 if gone is None else gone.bytes

    def _renew(self, memory: _Memory, limits: Limits | None) -> None:
        ttl = (limits or self._limits).ttl
        memory.expires_at = time.monotonic() + ttl if ttl else math.inf
        self._next_expiry = min(self._next_expiry, memory.expires_at)

    def _announce(self, tag: str) -> None:
        self._writes += 1
        self._active[tag] = self._writes
        self._active.move_to_end(tag)

    def _append(self, append: Append) -> AppendResult:
        memory = self._memories.get(append.tag)
        if self._is_newer(memory):
            return NewerMemoryError()
        if memory is not None and append.epoch < memory.epoch:
            return Stale(memory.epoch)
        same_epoch = memory is not None and memory.epoch == append.epoch
        if append.after > (memory.marks.get(append.source, 0) if memory is not None and same_epoch else 0):
            return Lost()
        if memory is None or not same_epoch:
            memory = self._memories[append.tag] = _Memory(append.epoch, self._schema)
        if memory.log_bytes > (append.limits or self._limits).log_bytes:
            return LogFull()
        memory.name, memory.schema = append.name, self._schema
        mark = memory.marks.get(append.source, 0)
        for entry in append.entries:
            if entry.seq > mark:
                memory.before.append(memory.chain)
                memory.entries.append(entry)
                memory.log_bytes += len(entry.value)
                memory.position += 1
                memory.chain = chained(memory.chain, entry.value)
                mark = entry.seq
        memory.marks[append.source] = mark
        self._renew(memory, append.limits)
        return Appended(memory.position, memory.position - memory.snapshot_position, memory.snapshot_records)

    def _read(self, request: ReadRequest) -> Page:
        memory = self._memories.get(request.tag)
        if memory is None:
            return Page(None)
        missing = memory.snapshot_position > 0 and memory.snapshot is None
        start, snapshot = request.position, None
        if start + 1 < memory.oldest or start > memory.position or start == 0:
            start = memory.oldest - 1 if missing else memory.snapshot_position
            snapshot = memory.snapshot
        first = start + 1 - memory.oldest
        return Page(
            epoch=memory.epoch,
            position=memory.position,
            chain=memory.chain,
            start=start,
            before=memory.before[first] if first < len(memory.before) else memory.chain,
            values=[entry.value for entry in memory.entries[first:]],
            snapshot=snapshot,
            snapshot_missing=missing,
            mark=memory.marks.get(request.source, 0),
            since_purge=None if memory.purged_at is None else time.monotonic() - memory.purged_at,
            expires_in=None if memory.expires_at == math.inf else memory.expires_at - time.monotonic(),
            newer=self._is_newer(memory),
        )

    def _info(self, tag: str, memory: _Memory) -> StoredMemoryInfo:
        unfolded = memory.entries[max(0, memory.snapshot_position + 1 - memory.oldest) :]
        return StoredMemoryInfo(
            tag=tag,
            name=memory.name,
            epoch=memory.epoch,
            position=memory.position,
            tokens=memory.snapshot_tokens + sum(entry.tokens for entry in unfolded),
            bytes=memory.bytes,
            log_entries=len(memory.entries),
            snapshot_age=None if memory.snapshot is None else time.monotonic() - memory.snapshot_at,
            newer=self._is_newer(memory),
        )
