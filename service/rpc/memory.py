"""MemoryService: statistics, warming, export, import and purge, for operators.

Knows messages, token ids and texts; what they do to memories is `service.memory.admin`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import islice

import numpy as np

from draftwood.v1 import memory_pb2 as pb
from model_runner.errors import InvalidValueError
from service.engine.memory_desk import RemoteMemory
from service.memory import MemoryName
from service.memory.admin import MemoryFacts
from service.memory.codec.records import Kind, Record
from service.rpc.calls import Call, Method
from service.rpc.requests import DEFAULT_TENANT, checked_name, require_in_vocabulary
from service.serving import ServedModel
from service.settings import Settings
from strategies.draft import Int32Array

SERVICE = pb.DESCRIPTOR.services_by_name["MemoryService"]

_KINDS = {Kind.OUTPUT: pb.MEMORY_KIND_OUTPUT, Kind.CORPUS: pb.MEMORY_KIND_CORPUS}
_PAGE = 64


class MemoryServicer:
    """The methods of MemoryService, for `rpc.handlers`."""

    def __init__(self, memory: RemoteMemory, model: ServedModel, settings: Settings) -> None:
        self._memory = memory
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
        tenant = checked_name("tenant", request.tenant) if request.tenant else None
        response = pb.GetMemoryStatisticsResponse(fingerprint=self._model.fingerprint)
        response.tenants.extend(map(_statistics, await self._memory.statistics(tenant)))
        summary = await self._memory.summary()
        counted = summary.counters
        response.store.CopyFrom(
            pb.MemoryStoreStatistics(
                store=self._named_store or summary.store,
                healthy=summary.healthy,
                outbox_records=counted.outbox_records,
                learned_records=counted.learned,
                pushed_records=counted.pushed,
                received_records=counted.received,
                dropped_records=counted.dropped,
                stale_records=counted.stale,
                unreadable_values=counted.unreadable,
                failures=counted.failures,
                reconnects=counted.reconnects,
                reloads=counted.reloads,
                folds=counted.folds,
                resident_tenants=counted.tenants,
                resident_tokens=counted.tokens,
                index_bytes=counted.index_bytes,
            )
        )
        response.store.last_lag.FromNanoseconds(round(counted.last_lag * 1e9))
        return response

    async def warm(self, requests: AsyncIterator[pb.WarmMemoryRequest], call: Call) -> None:
        """Streams progress."""
        texts = 0
        async with AsyncExitStack() as stack:
            intake = None
            async for request in requests:
                if intake is None:
                    intake = await stack.enter_async_context(self._memory.intake(_name(request.tenant)))
                await intake.add(Kind.CORPUS, await asyncio.to_thread(self._encode, [*request.texts]))
                texts += len(request.texts)
                await call.context.write(pb.WarmMemoryResponse(texts=texts, tokens=intake.tokens))

    async def export(self, request: pb.ExportMemoryRequest, call: Call) -> None:
        """Streams records."""
        arm = checked_name("arm", request.arm) if request.arm else ""
        records = iter(await self._memory.export(MemoryName(_name(request.tenant).tenant, arm)))
        first = pb.ExportMemoryResponse(fingerprint=self._model.fingerprint, model=self._model.name)
        await call.context.write(first)
        while page := [*islice(records, _PAGE)]:
            with_text = not request.without_text
            await call.context.write(await asyncio.to_thread(self._page, page, with_text))

    async def import_(self, requests: AsyncIterator[pb.ImportMemoryRequest], call: Call) -> None:
        """Streams progress."""
        async with AsyncExitStack() as stack:
            intake, same_model = None, False
            async for request in requests:
                if intake is None:
                    intake = await stack.enter_async_context(self._memory.intake(_name(request.tenant)))
                    same_model = request.fingerprint == self._model.fingerprint
                for kind, sequences in await asyncio.to_thread(self._read, request, same_model):
                    await intake.add(kind, sequences)
                await call.context.write(pb.ImportMemoryResponse(records=intake.records, tokens=intake.tokens))

    async def purge(self, request: pb.PurgeMemoryRequest, call: Call) -> pb.PurgeMemoryResponse:
        if not request.tenant:
            raise InvalidValueError("tenant", "", "it must not be empty; all tenants cannot be purged at once")
        memories, tokens = await self._memory.purge(checked_name("tenant", request.tenant))
        return pb.PurgeMemoryResponse(memories=memories, tokens=tokens)

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
        """What is to be learned, in runs of one kind."""
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
            allowed = "it must be set, for the token ids are of a model with another fingerprint"
            raise InvalidValueError(f"{field}.text", "", allowed)
        return self._model.tokenizer.encode(record.text)


def _name(tenant: str) -> MemoryName:
    return MemoryName(checked_name("tenant", tenant) if tenant else DEFAULT_TENANT)


def _statistics(facts: MemoryFacts) -> pb.TenantMemoryStatistics:
    stored = facts.stored
    message = pb.TenantMemoryStatistics(
        tenant=facts.name.tenant,
        arm=facts.name.arm,
        tokens=stored.tokens,
        stored_bytes=stored.bytes,
        log_records=stored.log_entries,
        epoch=stored.epoch,
        resident=facts.resident,
        index_bytes=facts.index_bytes,
    )
    if stored.snapshot_age is not None:
        message.snapshot_age.FromNanoseconds(round(stored.snapshot_age * 1e9))
    return message
