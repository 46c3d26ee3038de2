"""MemoryService: statistics, warming, export, import and purge, for operators.

Translates between messages and the operations of `service.memory.operations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import islice

import numpy as np

from draftwood.v1 import memory_pb2 as pb
from model_runner.errors import InvalidInputError
from service.engine.bridge import EngineBridge
from service.memory import MemoryName
from service.memory.codec import Kind, Record
from service.memory.operations import (
    ExportMemory,
    FillMemory,
    FillProgress,
    GetStatistics,
    PurgeMemory,
    StatisticsReport,
    TenantMemoryStatistics,
)
from service.rpc.calls import Call, Method
from service.rpc.identifiers import check_identifier, resolve_tenant
from service.rpc.requests import require_in_vocabulary
from service.serving import ServedModel
from service.settings import Settings
from strategies.draft import Int32Array

SERVICE = pb.DESCRIPTOR.services_by_name["MemoryService"]

_KINDS = {Kind.OUTPUT: pb.MEMORY_KIND_OUTPUT, Kind.CORPUS: pb.MEMORY_KIND_CORPUS}
_PAGE_RECORDS = 64
"""Records of one message of an export: about 100 KiB with 200 tokens each. Not tuned."""


class MemoryServicer:
    """The methods of MemoryService, for `calls.handlers`."""

    def __init__(self, bridge: EngineBridge, model: ServedModel, settings: Settings) -> None:
        self._bridge = bridge
        self._model = model
        self._named_store = settings.store if settings.store in ("memory", "embedded") else None

    @property
    def methods(self) -> dict[str, Method]:
        return {
            "GetMemoryStatistics": self.statistics,
            "WarmMemory": self.warm,
            "ExportMemory": self.export,
            "ImportMemory": self.import_,
            "PurgeMemory": self.purge,
        }

    async def statistics(self, request: pb.GetMemoryStatisticsRequest, call: Call) -> pb.GetMemoryStatisticsResponse:
        """Of one tenant; without one, of all."""
        tenant = resolve_tenant(request.tenant) if request.tenant else None
        report = await self._bridge.run_operation(GetStatistics(tenant))
        response = pb.GetMemoryStatisticsResponse(fingerprint=self._model.fingerprint)
        response.tenants.extend(map(_tenant_statistics, report.memories))
        response.store.CopyFrom(_store_statistics(report, self._named_store or report.store))
        return response

    async def warm(self, requests: AsyncIterator[pb.WarmMemoryRequest], call: Call) -> None:
        """Streams progress."""
        name, progress, texts = None, FillProgress(), 0
        async for request in requests:
            name = name or MemoryName(resolve_tenant(request.tenant))
            sequences = await asyncio.to_thread(self._encode, [*request.texts])
            progress = await self._bridge.run_operation(FillMemory(name, Kind.CORPUS, sequences, progress))
            texts += len(request.texts)
            await call.context.write(pb.WarmMemoryResponse(texts=texts, tokens=progress.tokens))

    async def export(self, request: pb.ExportMemoryRequest, call: Call) -> None:
        """Streams records."""
        arm = check_identifier("arm", request.arm)
        records = iter(await self._bridge.run_operation(ExportMemory(MemoryName(resolve_tenant(request.tenant), arm))))
        first = pb.ExportMemoryResponse(fingerprint=self._model.fingerprint, model=self._model.name)
        await call.context.write(first)
        while page := [*islice(records, _PAGE_RECORDS)]:
            with_text = not request.without_text
            await call.context.write(await asyncio.to_thread(self._page, page, with_text))

    async def import_(self, requests: AsyncIterator[pb.ImportMemoryRequest], call: Call) -> None:
        """Streams progress."""
        name, progress, same_model = None, FillProgress(), False
        async for request in requests:
            if name is None:
                name = MemoryName(resolve_tenant(request.tenant))
                same_model = request.fingerprint == self._model.fingerprint
            for kind, sequences in await asyncio.to_thread(self._read, request, same_model):
                progress = await self._bridge.run_operation(FillMemory(name, kind, sequences, progress))
            await call.context.write(pb.ImportMemoryResponse(records=progress.records, tokens=progress.tokens))

    async def purge(self, request: pb.PurgeMemoryRequest, call: Call) -> pb.PurgeMemoryResponse:
        if not request.tenant:
            raise InvalidInputError("tenant", None, "must not be empty; all tenants cannot be purged at once")
        purged = await self._bridge.run_operation(PurgeMemory(resolve_tenant(request.tenant)))
        return pb.PurgeMemoryResponse(memories=purged.memories, tokens=purged.tokens)

    def _encode(self, texts: list[str]) -> list[Int32Array]:
        return [ids for text in texts if (ids := self._model.tokenizer.encode(text)).size]

    def _page(self, records: list[Record], with_text: bool) -> pb.ExportMemoryResponse:
        response = pb.ExportMemoryResponse()
        for record in records:
            message = response.records.add(kind=_KINDS[record.kind])
            message.tokens.ids.extend(record.tokens.tolist())
            if with_text:
                message.text = self._model.tokenizer.decode(record.tokens)
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


def _tenant_statistics(memory: TenantMemoryStatistics) -> pb.TenantMemoryStatistics:
    stored = memory.stored
    message = pb.TenantMemoryStatistics(
        tenant=memory.name.tenant,
        arm=memory.name.arm,
        tokens=stored.tokens,
        stored_bytes=stored.bytes,
        log_records=stored.log_entries,
        epoch=stored.epoch,
        read_only=stored.newer,
        resident=memory.resident,
        index_bytes=memory.index_bytes,
    )
    if stored.snapshot_age is not None:
        message.snapshot_age.FromNanoseconds(round(stored.snapshot_age * 1e9))
    return message


def _store_statistics(report: StatisticsReport, store: str) -> pb.MemoryStoreStatistics:
    counters = report.counters
    message = pb.MemoryStoreStatistics(
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
        folds=counters.folds,
        resident_tenants=counters.tenants,
        resident_tokens=counters.tokens,
        index_bytes=counters.index_bytes,
        resident_bytes=counters.resident_bytes,
        max_bytes=report.max_bytes,
        evicted_tenants=counters.evicted,
        late_memories=counters.late,
        read_only_memories=counters.newer_memories,
        read_only_records=counters.newer_records,
    )
    message.last_lag.FromNanoseconds(round(counters.last_lag * 1e9))
    return message
