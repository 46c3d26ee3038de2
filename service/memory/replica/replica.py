"""Keeps the memories of this process and those of the store the same: sends what was learned here, reads what others
learned, folds logs into snapshots.

Knows nothing of threads, requests or Redis. `round` is called again and again; whatever fails in it is done in a later
one. Of two copies that came apart the store's counts: a memory whose chain of digests does not go on where ours ends is
read anew, and what the store lost of ours is sent again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from collections.abc import Sequence as SequenceOf

import structlog

from service.memory.codec import snapshots
from service.memory.codec.records import Record, unpack
from service.memory.codec.sealed import Sealed
from service.memory.errors import (
    CorruptValueError,
    ForeignValueError,
    MemoryStoreError,
    NewerFormatError,
    StoreFullError,
    StoreUnavailableError,
    UnknownKeyError,
)
from service.memory.replica.counters import MemoryCounters
from service.memory.replica.outbox import Outbox
from service.memory.replica.residents import Resident, Residents, learn, make
from service.memory.replica.tenant_log import TenantLog
from service.memory.store.base import Append, Appended, Fold, LogFull, MemoryStore, Page, Stale, Want

_log = structlog.get_logger(__name__)

HOT_SECONDS = 1.5
"""How long a memory that somebody wrote to is read in every round."""
CHECK_SECONDS = 10.0
"""A memory in use is compared with the store's at least so often."""
_LEASE_SECONDS = 15.0
_BATCH_TOKENS = 1 << 16
_BATCH_MEMORIES = 64
_MOST_BATCHES = 16
_FOLD_ENTRIES = 256
_FOLD_SHARE = 4
_TAIL_ENTRIES = 256
_TAIL_SHARE = 4
_EVICT_SECONDS = 1.0
_HOLD_SECONDS = 30.0
_EXPIRY_SECONDS = 0.05

Teach = Callable[[Resident, SequenceOf[Record]], Awaitable[None]]
"""Lets the published strategies of a memory learn records, on the thread that they belong to."""


class Replica:
    """One process's copy of the memories that it uses."""

    def __init__(
        self,
        store: MemoryStore,
        residents: Residents,
        outbox: Outbox,
        sealed: Sealed,
        teach: Teach,
        counters: MemoryCounters,
    ) -> None:
        self.store = store
        self.residents = residents
        self.outbox = outbox
        self.sealed = sealed
        self.counters = counters
        self._teach = teach
        self._turn = 0
        self._check_all = False
        self._full = False
        self._evicted_at = time.monotonic()

    async def round(self) -> None:
        """One round with the store.

        Raises:
            MemoryStoreError: it failed; nothing is lost but time.
        """
        self.counters.polls += 1
        try:
            await self._load()
            await self._push()
            await self._follow()
            await self.fold()
        except MemoryStoreError:
            self._check_all = True
            raise
        if time.monotonic() - self._evicted_at > _EVICT_SECONDS:
            self._evicted_at = time.monotonic()
            self.residents.evict(frozenset(self.outbox.names()))

    async def refresh(self, resident: Resident) -> None:
        """Brings one memory to where the store's stands. Raises MemoryStoreError."""
        for _ in range(8):
            position = resident.log.position if resident.loaded else 0
            [page] = await self.store.read([Want(resident.tag, position, self.outbox.source)])
            if isinstance(page, MemoryStoreError):
                raise page
            await self._take(resident, page, position)
            if resident.loaded:
                break
        await self._build_wanted(resident)

    def grew(self, resident: Resident, result: Appended) -> None:
        """Somebody here added to a memory: it is to be read again, and perhaps folded."""
        resident.hot_until = time.monotonic() + HOT_SECONDS
        resident.fold_due |= result.unfolded >= max(_FOLD_ENTRIES, result.folded // _FOLD_SHARE)

    async def _load(self) -> None:
        """Reads memories that came just now, and gives strategies that came just now what is known."""
        now = time.monotonic()
        for resident in self.residents.all():
            if not resident.loaded and resident.held_until < now:
                await self._refresh_or_hold(resident)
            elif resident.loaded and resident.wanted:
                await self._build_wanted(resident)

    async def _refresh_or_hold(self, resident: Resident) -> None:
        """One memory that the store cannot serve must not keep the others from being served."""
        try:
            await self.refresh(resident)
        except StoreUnavailableError:
            raise
        except MemoryStoreError as error:
            resident.held_until = time.monotonic() + _HOLD_SECONDS
            _log.error("a memory cannot be read", memory=resident.tag, why=str(error))

    async def _push(self) -> None:
        blocked: set[str] = set()
        for _ in range(_MOST_BATCHES):
            appends = [append for append in map(self._append, self._sendable(blocked)) if append is not None]
            if not appends:
                return
            results = await self.store.append(appends)
            for append, result in zip(appends, results, strict=True):
                if not self._appended(append, result):
                    blocked.add(append.tag)

    def _sendable(self, blocked: set[str]) -> list[Resident]:
        found = [self.residents.open(name) for name in self.outbox.names()]
        return [one for one in found if one.epoch is not None and one.tag not in blocked][:_BATCH_MEMORIES]

    def _append(self, resident: Resident) -> Append | None:
        epoch = resident.epoch
        assert epoch is not None
        waiting = self.outbox.take(resident.name, _BATCH_TOKENS)
        if not waiting:
            return None
        entries = [self.sealed.entry(resident.tag, one.record) for one in waiting]
        name = self.sealed.name(resident.tag, resident.name)
        return Append(resident.tag, epoch, self.outbox.source, name, entries, self.outbox.confirmed(resident.name))

    def _appended(self, append: Append, result: object) -> bool:
        """Whether the next batch may go on."""
        resident = self.residents.tagged(append.tag)
        assert resident is not None
        resident.hot_until = time.monotonic() + HOT_SECONDS
        self._full &= not isinstance(result, Appended)
        if isinstance(result, Appended):
            self._confirm(resident, append.entries[-1].seq)
            self.counters.pushed += len(append.entries)
            self.grew(resident, result)
            return True
        if isinstance(result, LogFull):
            resident.fold_due = True
        elif isinstance(result, Stale):
            resident.loaded = False
        elif isinstance(result, StoreUnavailableError):
            raise result
        elif isinstance(result, MemoryStoreError) and not self._full:
            self._full = True  # said once, until it takes something again
            _log.error("the store does not take what was learned", memory=append.tag, why=str(result))
        return False

    def _confirm(self, resident: Resident, seq: int) -> None:
        waiting = self.outbox.take(resident.name, 1)
        if waiting:
            self.counters.last_lag = time.monotonic() - waiting[0].since
        self.outbox.confirm(resident.name, seq)

    async def _follow(self) -> None:
        """Reads the memories that somebody wrote to, and those in use that were not compared for a while."""
        now = time.monotonic()
        if self.store.shared:
            turn, tags = await self.store.activity(self._turn)
            if turn < self._turn:
                self._check_all = True  # the store lost its latest writes, those of memories perhaps among them
            self._turn = turn
            for tag in tags:
                if (resident := self.residents.tagged(tag)) is not None:
                    resident.hot_until = now + HOT_SECONDS
        due = [resident for resident in self.residents.all() if resident.loaded and self._is_due(resident, now)]
        self._check_all = False
        for start in range(0, len(due), _BATCH_MEMORIES):
            some = due[start : start + _BATCH_MEMORIES]
            wants = [Want(resident.tag, resident.log.position, self.outbox.source) for resident in some]
            for resident, want, page in zip(some, wants, await self.store.read(wants), strict=True):
                if isinstance(page, StoreUnavailableError):
                    raise page
                if isinstance(page, Page):
                    await self._take(resident, page, want.position)
                if isinstance(page, MemoryStoreError) or not resident.loaded:
                    await self._refresh_or_hold(resident)

    def _is_due(self, resident: Resident, now: float) -> bool:
        if self._check_all or now < resident.hot_until:
            return True
        return (
            self.store.shared and resident.used_at > resident.checked_at and now - resident.checked_at > CHECK_SECONDS
        )

    async def _take(self, resident: Resident, page: Page, asked: int) -> None:
        """Goes on with what the store holds after the position `asked`, or from its beginning where that is gone.

        Where it takes another look from the beginning, `loaded` is unset.
        """
        now = resident.checked_at = time.monotonic()
        known = resident.epoch
        if page.epoch is None:
            await self._take_nothing(resident)
            return
        if known is not None and page.epoch < known:
            # A failover brought back what was purged.
            await self.store.purge(resident.tag, known, only_raise=True)
            resident.loaded = False
            return
        purged_at = None if page.since_purge is None else now - page.since_purge
        if known is not None and page.epoch > known:
            self.counters.purges += 1
            resident.renew(page.epoch, purged_at)
            self.counters.stale += self.outbox.settle(resident.name, page.epoch, page.since_purge)
            return
        with resident.lock:
            resident.epoch, resident.purged_at = page.epoch, purged_at
            resident.expires_at = None if page.expires_in is None else now + page.expires_in
        stale = self.outbox.settle(resident.name, page.epoch, page.since_purge)
        self.counters.stale += stale
        self.outbox.rewind(resident.name, page.mark)
        if resident.loaded and page.start == resident.log.position and page.before == resident.log.chain:
            await self._go_on(resident, page)
        else:
            await self._begin_anew(resident, page, asked, stale > 0)
        if page.snapshot_missing and resident.foldable and resident.loaded:
            resident.fold_due = True

    async def _take_nothing(self, resident: Resident) -> None:
        """The store holds nothing of a memory: it is new, was forgotten after its time, or the store lost its data."""
        resident.loaded = True
        if resident.epoch is None:
            self._settle(resident, 0)
        if resident.log.position == 0:
            if resident.epoch:  # a purge, which others may not have heard of
                await self.store.purge(resident.tag, resident.epoch, only_raise=True)
            self.outbox.rewind(resident.name, 0)
            return
        if resident.expires_at is not None and time.monotonic() > resident.expires_at - _EXPIRY_SECONDS:
            resident.renew(resident.epoch or 0, resident.purged_at)
            resident.loaded = True
            self.outbox.forget(resident.name)
        elif resident.foldable and await self._seed(resident):
            self.counters.seeds += 1
            _log.warning("the store had lost a memory and got it back", memory=resident.tag)
            self.outbox.rewind(resident.name, resident.log.marks.get(self.outbox.source, 0))
        else:
            resident.loaded = False
            if not resident.foldable:
                resident.renew(resident.epoch or 0, resident.purged_at)

    async def _seed(self, resident: Resident) -> bool:
        try:
            return await self.store.seed(self._snapshot(resident))
        except StoreFullError:
            return False

    def _settle(self, resident: Resident, epoch: int) -> None:
        with resident.lock:
            resident.epoch = epoch
        self.outbox.settle(resident.name, epoch, None)

    async def _go_on(self, resident: Resident, page: Page) -> None:
        new = self._append_values(resident, resident.log, page.values)
        own = self.outbox.source
        others = [record for record in new if record.source != own]
        if others:
            self.counters.received += len(others)
            await self._teach(resident, others)
        if (resident.log.position, resident.log.chain) != (page.position, page.chain):
            resident.loaded = False

    async def _begin_anew(self, resident: Resident, page: Page, asked: int, was_purged: bool) -> None:
        """Takes the store's log for ours; `was_purged`: strategies learned what a purge took."""
        again = resident.loaded
        if again:
            self.counters.reloads += 1
            _log.info("a memory is read anew", memory=resident.tag, ours=resident.log.position, stores=page.position)
        if asked and page.start == asked:
            resident.loaded = False  # the page does not begin at the beginning
            return
        log = TenantLog(resident.capacity)
        resident.foldable = True
        records = await self._open_snapshot(resident, page)
        if records is None:
            resident.loaded = False
            return
        log.restore(records, page.start, page.before)
        if page.start and page.snapshot is None:
            resident.foldable = False
        self._append_values(resident, log, page.values)
        if (log.position, log.chain) != (page.position, page.chain):
            _log.error("a memory's log does not add up", memory=resident.tag, position=log.position)
            log.position, log.chain = page.position, page.chain
            resident.foldable = False
        resident.log = log
        resident.loaded = True
        await self._build(resident, [*resident.strategies], again or was_purged)

    async def _open_snapshot(self, resident: Resident, page: Page) -> list[Record] | None:
        """The snapshot's records, none where it is not for us; None where it was moved out of the way."""
        if page.snapshot is None:
            return []
        try:
            snapshot = self.sealed.snapshot(resident.tag, page.snapshot)
            if (snapshot.epoch, snapshot.position, snapshot.chain) != (page.epoch, page.start, page.before):
                raise CorruptValueError("it is not the one that the log goes on from")
            return snapshot.records
        except (NewerFormatError, UnknownKeyError) as error:
            _log.error("a snapshot is left alone and the log alone is served", memory=resident.tag, why=str(error))
            self.counters.unreadable += 1
            resident.foldable = False
            return []
        except (CorruptValueError, ForeignValueError) as error:
            _log.error("a snapshot is set aside and the log alone is served", memory=resident.tag, why=str(error))
            self.counters.unreadable += 1
            await self.store.set_aside(resident.tag, page.snapshot)
            return None

    def _append_values(self, resident: Resident, log: TenantLog, values: Iterable[bytes]) -> list[Record]:
        new: list[Record] = []
        for value in values:
            record: Record | None = None
            try:
                [record] = unpack(self.sealed.open_entry(resident.tag, value))
            except (CorruptValueError, ValueError) as error:
                self.counters.unreadable += 1
                _log.error("a record cannot be read", memory=resident.tag, position=log.position + 1, why=str(error))
                resident.foldable &= not isinstance(error, (NewerFormatError, UnknownKeyError))
            log.append(record, value)
            if record is not None:
                new.append(record)
        return new

    async def _build_wanted(self, resident: Resident) -> None:
        if resident.wanted:
            await self._build(resident, [*resident.wanted])

    async def _build(self, resident: Resident, names: list[str], replace_empty: bool = False) -> None:
        """New instances of strategies, made of the log and what the store does not know yet, in the place of the old.

        Args:
            replace_empty: also where there is nothing to make them of.
        """
        own = self.outbox.source
        with resident.lock:
            resident.late = []
            unknown = self.outbox.records(resident.name, resident.log.marks.get(own, 0))
        records = [*resident.log, *unknown]
        built = {}
        if records or replace_empty:
            for name in names:
                built[name] = make(name, resident.capacity)
                learn(built[name], (record.tokens for record in records))
        with resident.lock:
            for strategy in built.values():
                learn(strategy, resident.late or ())
            resident.late = None
            resident.strategies.update(built)
            waiting = [resident.wanted.pop(name) for name in names if name in resident.wanted]
        for future in waiting:
            future.set_result(None)

    def _snapshot(self, resident: Resident) -> Fold:
        log = resident.log
        records = [*log]
        snapshot = snapshots.Snapshot(self.sealed.fingerprint, resident.epoch or 0, log.position, log.chain, records)
        return Fold(
            tag=resident.tag,
            epoch=resident.epoch or 0,
            position=log.position,
            chain=log.chain,
            value=self.sealed.seal_snapshot(resident.tag, snapshot),
            tokens=log.tokens,
            records=len(records),
            name=self.sealed.name(resident.tag, resident.name),
            marks=log.marks,
            tail=_tail(records, resident.capacity.bytes // _TAIL_SHARE),
        )

    async def fold(self) -> None:
        """Writes the snapshots that are due. Raises StoreUnavailableError."""
        for resident in self.residents.all():
            if not (resident.fold_due and resident.foldable and resident.loaded and resident.log.position):
                continue
            resident.fold_due = False
            try:
                if await self.store.lease(resident.tag, self.outbox.source, _LEASE_SECONDS):
                    self.counters.folds += await self.store.fold(self._snapshot(resident), self.outbox.source)
            except StoreUnavailableError:
                raise
            except MemoryStoreError as error:
                _log.error("a memory cannot be folded", memory=resident.tag, why=str(error))


def _tail(records: SequenceOf[Record], most_bytes: int) -> int:
    """How many of the newest records stay in the log beside the snapshot, for processes that lag a little."""
    for count, record in enumerate(reversed(records)):
        most_bytes -= record.weight
        if count == _TAIL_ENTRIES or most_bytes < 0:
            return count
    return len(records)
