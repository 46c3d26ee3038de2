"""MemoryService: statistics, warming, export, import, purge and orphaned memories, for operators.

Translates between messages and the operations of `draftwood_memory.operations`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from weakref import WeakValueDictionary

import numpy as np

from draftwood.v1 import memory_pb2 as pb
from draftwood_memory.config import MemoryOverrides
from draftwood_memory.operations import (
    ExportMemory,
    FillMemory,
    FillProgress,
    GetStatistics,
    ListOrphans,
    MemoryStatistics,
    OrphanedMemory,
    PurgeMemory,
    PurgeOrphans,
    StatisticsReport,
)
from draftwood_memory.records import Kind, Record
from draftwood_memory.store.naming import MemoryName
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth import Principal, Role
from draftwood_service.engine.bridge import EngineBridge
from draftwood_service.rpc.answers import Writer
from draftwood_service.rpc.calls import Call, Run
from draftwood_service.rpc.prompts import require_in_vocabulary
from draftwood_service.rpc.request_log import audited
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_strategies.arrays import Int32Array
from draftwood_tenants.config import TenantConfig
from draftwood_tenants.reading import check_identifier
from draftwood_tenants.resources.store import ResourceMissingError

_KINDS = {Kind.OUTPUT: pb.MEMORY_KIND_OUTPUT, Kind.CORPUS: pb.MEMORY_KIND_CORPUS}
_PAGE_BYTES = 256 * 1024
_RECORD_BYTES = 2 * 2**20
"""A message of an export has a new record as long as it is below `_PAGE_BYTES`, so that it has at most `_RECORD_BYTES`
more: gRPC clients accept 4 MiB. A record has 8,192 tokens at most; its text is cut off if it would not fit."""
_PAUSE = 3.0
"""As long as the piece of work before it, so many times."""
_MAX_PAGE = 1000
"""Memories of a page of a list: 200 KiB with long names."""


class MemoryTurn:
    """The work on the memory of one tenant, one piece at a time. If more of it waits, a pause comes before the next
    piece, in which the engine and the service have their time for others."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._waiting = 0

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        self._waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._waiting -= 1
        began = time.perf_counter()
        try:
            yield
        finally:
            pause = _PAUSE * (time.perf_counter() - began) if self._waiting else 0.0
            asyncio.get_running_loop().call_later(pause, self._lock.release)


class MemoryServicer:
    """The methods of MemoryService.

    Args:
        config_of: a tenant's configuration.
        is_configured: whether a tenant has one of its own.
    """

    def __init__(
        self,
        bridge: EngineBridge,
        model: ServedModel,
        settings: Settings,
        config_of: Callable[[str], TenantConfig],
        is_configured: Callable[[str], bool],
    ) -> None:
        self._bridge = bridge
        self._config_of = config_of
        self._is_configured = is_configured
        self._model = model
        self._stall_seconds = settings.stall_timeout
        self._turns: WeakValueDictionary[str, MemoryTurn] = WeakValueDictionary()
        self._named_store = settings.store if settings.store in ("memory", "embedded") else None

    @property
    def methods(self) -> dict[str, Run]:
        """What answers each method of the service."""
        return {
            "GetMemoryStatistics": self.get_memory_statistics,
            "WarmMemory": self.warm_memory,
            "ExportMemory": self.export_memory,
            "ImportMemory": self.import_memory,
            "PurgeMemory": self.purge_memory,
            "ListOrphanedMemories": self.list_orphaned_memories,
            "PurgeOrphanedMemories": self.purge_orphaned_memories,
        }

    async def get_memory_statistics(
        self, request: pb.GetMemoryStatisticsRequest, call: Call
    ) -> pb.GetMemoryStatisticsResponse:
        """Statistics of one tenant; if none is named, of all that the caller may see."""
        principal = call.principal
        is_operator = principal.role is Role.OPERATOR
        named = request.HasField("tenant") or not is_operator
        tenant = principal.tenant_for(request.tenant) if named else None
        first, limit = _page_of(request.page_size, request.page_token)
        async with self._turn(tenant):
            report = await self._bridge.run_operation(GetStatistics(tenant, first, limit))
        if tenant is not None and not report.exists:
            self._require_configured(tenant, principal)
        following = "" if report.following is None else str(report.following)
        response = pb.GetMemoryStatisticsResponse(fingerprint=self._model.fingerprint, next_page_token=following)
        response.tenants.extend(map(_tenant_statistics, report.memories))
        if is_operator:
            response.store.CopyFrom(_store_statistics(report, self._named_store or report.store))
        return response

    def _turn(self, tenant: str | None) -> AbstractAsyncContextManager[None]:
        """While a piece of work on a tenant's memory runs; None for all memories, which operators see."""
        return self._turns.setdefault(tenant or "", MemoryTurn()).taken()

    def _overrides(self, name: MemoryName) -> MemoryOverrides:
        return self._config_of(name.tenant).learning.overrides

    async def warm_memory(self, requests: AsyncIterator[pb.WarmMemoryRequest], call: Call) -> None:
        """Streams progress."""
        name, progress = None, FillProgress()
        with audited(call, "memory", action="warm", tenant=None, records=0) as audit:
            async with Writer(call.context, self._stall_seconds) as writer:
                async for request in writer.reading(requests):
                    if name is None:
                        name = MemoryName(call.principal.tenant_for(request.tenant))
                        audit["tenant"] = name.tenant
                    async with self._turn(name.tenant):
                        sequences = await asyncio.to_thread(self._encode, [*request.texts])
                        fill = FillMemory(name, Kind.CORPUS, sequences, progress, self._overrides(name))
                        progress = await self._bridge.run_operation(fill)
                    audit["records"] += len(request.texts)
                    await writer.write(pb.WarmMemoryResponse(texts=audit["records"], tokens=progress.tokens))

    async def export_memory(self, request: pb.ExportMemoryRequest, call: Call) -> None:
        """Streams records."""
        name = MemoryName(call.principal.tenant_for(request.tenant), check_identifier("arm", request.arm))
        with audited(call, "memory", action="export", tenant=name.tenant, records=0) as audit:
            async with self._turn(name.tenant):
                if not await self._has_memory(name.tenant):
                    self._require_configured(name.tenant, call.principal)
                records = deque(await self._bridge.run_operation(ExportMemory(name)))
            if name.arm and not records:
                raise ResourceMissingError(f"tenants/{name.tenant}/arms/{name.arm}")
            async with Writer(call.context, self._stall_seconds) as writer:
                await writer.write(pb.ExportMemoryResponse(fingerprint=self._model.fingerprint, model=self._model.name))
                while records:
                    async with self._turn(name.tenant):
                        page = await asyncio.to_thread(self._page, records, not request.without_text)
                    await writer.write(page)
                    audit["records"] += len(page.records)

    async def import_memory(self, requests: AsyncIterator[pb.ImportMemoryRequest], call: Call) -> None:
        """Streams progress."""
        name, progress, same_model = None, FillProgress(), False
        with audited(call, "memory", action="import", tenant=None, records=0) as audit:
            async with Writer(call.context, self._stall_seconds) as writer:
                async for request in writer.reading(requests):
                    if name is None:
                        name = MemoryName(call.principal.tenant_for(request.tenant))
                        audit["tenant"] = name.tenant
                        same_model = request.fingerprint == self._model.fingerprint
                    async with self._turn(name.tenant):
                        for kind, sequences in await asyncio.to_thread(self._read, request, same_model):
                            fill = FillMemory(name, kind, sequences, progress, self._overrides(name))
                            progress = await self._bridge.run_operation(fill)
                            audit["records"] = progress.records
                    await writer.write(pb.ImportMemoryResponse(records=progress.records, tokens=progress.tokens))

    async def purge_memory(self, request: pb.PurgeMemoryRequest, call: Call) -> pb.PurgeMemoryResponse:
        tenant = call.principal.tenant_for(request.tenant)
        with audited(call, "memory", action="purge", tenant=tenant) as audit:
            was_known = await self._has_memory(tenant)
            purged = await self._bridge.run_operation(PurgeMemory(tenant))
            audit |= {"memories": purged.memories, "tokens": purged.tokens}
            if not (was_known or purged.tokens):
                self._require_configured(tenant, call.principal)
        final = datetime.now(UTC) + timedelta(seconds=purged.final_in) if purged.final_in else None
        return pb.PurgeMemoryResponse(memories=purged.memories, tokens=purged.tokens, final_time=final)

    async def list_orphaned_memories(
        self, request: pb.ListOrphanedMemoriesRequest, call: Call
    ) -> pb.ListOrphanedMemoriesResponse:
        first, limit = _page_of(request.page_size, request.page_token)
        orphans = await self._bridge.run_operation(ListOrphans())
        following = str(first + limit) if first + limit < len(orphans) else ""
        page = map(_orphaned_memory, orphans[first : first + limit])
        return pb.ListOrphanedMemoriesResponse(memories=page, next_page_token=following)

    async def purge_orphaned_memories(
        self, request: pb.PurgeOrphanedMemoriesRequest, call: Call
    ) -> pb.PurgeOrphanedMemoriesResponse:
        with audited(call, "memory", action="purge orphans", tenant=None) as audit:
            purged = await self._bridge.run_operation(PurgeOrphans(request.fingerprint))
            audit |= {"memories": purged.memories, "tokens": purged.tokens}
        return pb.PurgeOrphanedMemoriesResponse(memories=purged.memories, tokens=purged.tokens)

    async def _has_memory(self, tenant: str) -> bool:
        return (await self._bridge.run_operation(GetStatistics(tenant, 0, 1))).exists

    def _require_configured(self, tenant: str, caller: Principal) -> None:
        """Raises ResourceMissingError for a tenant without a memory that has no configuration either, and is not the
        caller's own.
        """
        if tenant != caller.tenant_for("") and not self._is_configured(tenant):
            raise ResourceMissingError(f"tenants/{tenant}", "has no memory and no configuration")

    def _encode(self, texts: list[str]) -> list[Int32Array]:
        return [ids for text in texts if (ids := self._model.tokenizer.encode(text)).size]

    def _page(self, records: deque[Record], with_text: bool) -> pb.ExportMemoryResponse:
        """A message of the first records, which are removed."""
        response, size = pb.ExportMemoryResponse(), 0
        while records and size < _PAGE_BYTES:
            record = records.popleft()
            message = response.records.add(kind=_KINDS[record.kind])
            message.tokens.ids.extend(record.tokens.tolist())
            if with_text:
                message.text = self._model.tokenizer.decode(record.tokens)
                if message.ByteSize() > _RECORD_BYTES:
                    message.text = ""
            size += message.ByteSize()
        return response

    def _read(self, request: pb.ImportMemoryRequest, same_model: bool) -> list[tuple[Kind, list[Int32Array]]]:
        """The request's sequences, grouped into runs of one kind."""
        runs: list[tuple[Kind, list[Int32Array]]] = []
        for index, record in enumerate(request.records):
            kind = Kind.OUTPUT if record.kind == pb.MEMORY_KIND_OUTPUT else Kind.CORPUS
            tokens = self._tokens(record, f"records[{index}]", same_model)
            if not runs or runs[-1][0] is not kind:
                runs.append((kind, []))
            if tokens.size:
                runs[-1][1].append(tokens)
        return runs

    def _tokens(self, record: pb.MemoryRecord, field: str, same_model: bool) -> Int32Array:
        if same_model:
            tokens = np.array(record.tokens.ids, np.int32)
            require_in_vocabulary(f"{field}.tokens.ids", tokens, self._model.vocab_size)
            return tokens
        if not record.text:
            problem = "must be set, since the token ids belong to a model with another fingerprint"
            raise InvalidInputError(f"{field}.text", None, problem)
        return self._model.tokenizer.encode(record.text)


def _page_of(size: int, token: str) -> tuple[int, int]:
    """First item and number of items of a page of a list. Raises InvalidInputError."""
    if size < 0:
        raise InvalidInputError("page_size", size, "must not be negative")
    if token and not (token.isascii() and token.isdecimal() and len(token) < 10):
        raise InvalidInputError("page_token", token, "must be empty or the next_page_token of another page")
    return int(token or 0), min(size or _MAX_PAGE, _MAX_PAGE)


def _orphaned_memory(memory: OrphanedMemory) -> pb.OrphanedMemory:
    stored, name = memory.stored, memory.name
    return pb.OrphanedMemory(
        tag=stored.tag,
        fingerprint=memory.fingerprint,
        tokens=stored.tokens,
        stored_bytes=stored.bytes,
        tenant=name.tenant if name else "",
        arm=name.arm if name else "",
        unserved_duration=timedelta(seconds=round(memory.unserved)),
    )


def _tenant_statistics(memory: MemoryStatistics) -> pb.TenantMemoryStatistics:
    stored = memory.stored
    return pb.TenantMemoryStatistics(
        tenant=memory.name.tenant,
        arm=memory.name.arm,
        tokens=stored.tokens,
        stored_bytes=stored.bytes,
        log_records=stored.entries,
        purge_time=datetime.fromtimestamp(stored.epoch / 1e6, UTC) if stored.epoch else None,
        read_only=stored.newer,
        resident=memory.resident,
        index_bytes=memory.index_bytes,
    )


def _store_statistics(report: StatisticsReport, store: str) -> pb.MemoryStoreStatistics:
    counters = report.counters
    return pb.MemoryStoreStatistics(
        store=store,
        healthy=report.healthy,
        outbox_records=counters.outbox_records,
        learned_records=counters.learned,
        pushed_records=counters.pushed,
        received_records=counters.received,
        dropped_records=counters.dropped,
        stale_records=counters.stale,
        unreadable_values=counters.unreadable,
        failures=counters.failures,
        reconnects=counters.reconnects,
        reloads=counters.reloads,
        resident_tenants=counters.tenants,
        resident_tokens=counters.tokens,
        index_bytes=counters.index_bytes,
        resident_bytes=counters.resident_bytes,
        max_bytes=report.max_bytes,
        evicted_tenants=counters.evicted,
        late_memories=counters.late,
        read_only_memories=counters.newer_memories,
        read_only_records=counters.newer_records,
        last_lag=timedelta(seconds=counters.last_lag),
    )
