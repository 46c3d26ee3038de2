"""The operators' client: statistics, warm-up, export, import and purge of tenants' learned memories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import grpc

from draftwood.v1 import memory_pb2 as pb
from draftwood.v1.generation_pb2 import TokenIds
from draftwood.v1.memory_pb2_grpc import MemoryServiceStub
from draftwood_client.connection import DEFAULT_TARGET, Connection, TlsConfig, Token
from draftwood_client.retry import NO_RETRY

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Message = TypeVar("_Message")

_MESSAGE_CHARACTERS = 32_768
"""Characters per message, a token id counting as four. The server reports progress after each message; not tuned."""
_KINDS = {pb.MEMORY_KIND_OUTPUT: "output", pb.MEMORY_KIND_CORPUS: "corpus"}
_NUMBERS = {name: number for number, name in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """A token sequence in a memory.

    Attributes:
        text: the text of the tokens; "" in an export without text.
        kind: "output" for an answer, "corpus" for a text that the memory was warmed with.
    """

    token_ids: tuple[int, ...]
    text: str = ""
    kind: str = "output"


@dataclass(frozen=True, slots=True)
class MemoryExport:
    """The content of a memory.

    Attributes:
        fingerprint: of the model and tokenizer of the token ids.
        model: name of the model.
        records: oldest first, read from the server during iteration; can be iterated over once.
    """

    fingerprint: str
    model: str
    records: Iterator[MemoryRecord]


@dataclass(frozen=True, slots=True)
class Purge:
    """What a purge deleted.

    Attributes:
        memories, tokens: how many.
        final_at: None if no server drafts from it for any request that begins now. Else servers could not be asked,
            which have lost the store or were killed; those that still run have deleted it by then.
    """

    memories: int
    tokens: int
    final_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class TenantMemoryStatistics:
    """Statistics of a tenant's memory; fields as in the protocol. Sizes in bytes, ages in seconds.

    Attributes:
        snapshot_age: None without a snapshot.
    """

    tenant: str
    arm: str
    tokens: int
    stored_bytes: int
    log_records: int
    snapshot_age: float | None
    epoch: int
    resident: bool
    index_bytes: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class OrphanedMemory:
    """A memory in the store that no server uses; fields as in the protocol. Sizes in bytes, ages in seconds.

    Attributes:
        tenant: None if the server cannot decrypt it.
    """

    tag: str
    fingerprint: str
    tenant: str | None
    arm: str
    tokens: int
    stored_bytes: int
    unserved: float


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Statistics of memories and of the store.

    Attributes:
        store: the fields of the protocol's MemoryStoreStatistics, by name; `last_lag` in seconds. Empty unless
            the caller is an operator.
        fingerprint: of the served model and tokenizer.
    """

    tenants: tuple[TenantMemoryStatistics, ...]
    store: Mapping[str, Any]
    fingerprint: str


class MemoryClient:
    """A connection to a server's memory service. Constructor arguments as for `Client`; no call is retried.

        with MemoryClient("localhost:50051", tenant="acme") as memory:
            memory.warm(["a document", "another one"])

    Every method raises `StatusError` if the request fails; `tenant` defaults to that of the client.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tenant: str | None = None,
        timeout: float | None = None,
        tls: bool | TlsConfig = False,
        api_key: str | None = None,
        token: Token | None = None,
        plaintext_credentials: bool = False,
        metadata: Mapping[str, str] | None = None,
        channel_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._connection = Connection.of(
            target,
            tenant=tenant,
            timeout=timeout,
            retry=NO_RETRY,
            tls=tls,
            api_key=api_key,
            token=token,
            plaintext_credentials=plaintext_credentials,
            metadata=metadata,
            channel_options=channel_options,
        )
        self._channel = self._connection.open_channel()
        self._stub = MemoryServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        self._channel.close()

    def statistics(self, tenant: str | None = None) -> MemoryStatistics:
        """Statistics of one tenant, by default the client's; if neither is set, of all that the caller may see."""
        request = pb.GetMemoryStatisticsRequest(tenant=tenant or self._connection.tenant)
        tenants: list[TenantMemoryStatistics] = []
        while True:
            response = self._asked(lambda: self._stub.GetMemoryStatistics(request, **self._call()))
            tenants += map(_tenant_memory, response.tenants)
            request.page_token = response.next_page_token
            if not request.page_token:
                break
        store: dict[str, Any] = {}
        if response.HasField("store"):
            store = {field.name: getattr(response.store, field.name) for field in response.store.DESCRIPTOR.fields}
            store["last_lag"] = response.store.last_lag.ToTimedelta().total_seconds()
        return MemoryStatistics(tuple(tenants), store, response.fingerprint)

    def warm(
        self, texts: Iterable[str], *, tenant: str | None = None, progress: Callable[[int, int], None] | None = None
    ) -> int:
        """Adds whole documents to a tenant's memory; returns the number of their tokens.

        Args:
            progress: called with the number of texts and tokens stored so far.
        """
        name = self._tenant(tenant)
        requests = _Messages(texts, len, lambda some: pb.WarmMemoryRequest(tenant=name, texts=some))
        tokens = 0
        for response in self._answers(lambda: self._stub.WarmMemory(requests, **self._call()), requests):
            tokens = response.tokens
            if progress is not None:
                progress(response.texts, response.tokens)
        return tokens

    def export(self, *, tenant: str | None = None, arm: str = "", text: bool = True) -> MemoryExport:
        """The content of a tenant's memory.

        Args:
            text: with the text of the tokens, which a server with another model can learn.
        """
        request = pb.ExportMemoryRequest(tenant=self._tenant(tenant), arm=arm, without_text=not text)
        responses = self._answers(lambda: self._stub.ExportMemory(request, **self._call()))
        first = next(responses)
        records = (_record(one) for response in responses for one in response.records)
        return MemoryExport(first.fingerprint, first.model, records)

    def import_records(
        self,
        records: Iterable[MemoryRecord],
        *,
        fingerprint: str,
        tenant: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Adds exported records to a tenant's memory; returns the number of their tokens.

        Args:
            fingerprint: that of the export. If the server's differs, the texts of the records are learned.
            progress: called with the number of records and tokens stored so far.
        """
        name = self._tenant(tenant)
        requests = _Messages(
            records,
            lambda record: 4 * len(record.token_ids) + len(record.text),
            lambda some: pb.ImportMemoryRequest(tenant=name, fingerprint=fingerprint, records=map(_message, some)),
        )
        tokens = 0
        for response in self._answers(lambda: self._stub.ImportMemory(requests, **self._call()), requests):
            tokens = response.tokens
            if progress is not None:
                progress(response.records, response.tokens)
        return tokens

    def purge(self, tenant: str) -> Purge:
        """Deletes a tenant's memory on all servers, of all models."""
        request = pb.PurgeMemoryRequest(tenant=tenant)
        response = self._asked(lambda: self._stub.PurgeMemory(request, **self._call()))
        final_at = response.final_time.ToDatetime(UTC) if response.HasField("final_time") else None
        return Purge(response.memories, response.tokens, final_at)

    def orphans(self) -> list[OrphanedMemory]:
        """The memories in the store that no server uses."""
        request = pb.ListOrphanedMemoriesRequest()
        found: list[OrphanedMemory] = []
        while True:
            response = self._asked(lambda: self._stub.ListOrphanedMemories(request, **self._call()))
            found += map(_orphan, response.memories)
            request.page_token = response.next_page_token
            if not request.page_token:
                return found

    def purge_orphans(self, fingerprint: str = "") -> int:
        """Deletes the memories that no server uses; returns the number of tokens that they held.

        Args:
            fingerprint: only those of this model.
        """
        request = pb.PurgeOrphanedMemoriesRequest(fingerprint=fingerprint)
        return self._asked(lambda: self._stub.PurgeOrphanedMemories(request, **self._call())).tokens

    def _tenant(self, tenant: str | None) -> str:
        return tenant or self._connection.tenant or ""

    def _call(self) -> dict[str, Any]:
        return {"timeout": self._connection.timeout_for(None), "metadata": self._connection.call_metadata()}

    def _asked(self, ask: Callable[[], _Result]) -> _Result:
        try:
            return ask()
        except grpc.RpcError as error:
            raise self._connection.error(error, self._connection.timeout) from error

    def _answers(
        self, ask: Callable[[], Iterable[_Result]], requests: _Messages[Any, Any] | None = None
    ) -> Iterator[_Result]:
        try:
            yield from ask()
        except grpc.RpcError as error:
            if requests is not None and requests.error is not None:
                raise requests.error from None
            raise self._connection.error(error, self._connection.timeout) from error


class _Messages(Iterator[_Message], Generic[_Item, _Message]):
    """Groups items into messages of at most `_MESSAGE_CHARACTERS`, or of one larger item. Yields at least one message.

    Attributes:
        error: the exception of the items' iterator, which gRPC reads on another thread and drops.
    """

    def __init__(
        self, items: Iterable[_Item], size: Callable[[_Item], int], make: Callable[[Sequence[_Item]], _Message]
    ) -> None:
        self._messages = self._all(items, size, make)
        self.error: Exception | None = None

    def __next__(self) -> _Message:
        try:
            return next(self._messages)
        except StopIteration:
            raise
        except Exception as error:
            self.error = error
            raise

    @staticmethod
    def _all(
        items: Iterable[_Item], size: Callable[[_Item], int], make: Callable[[Sequence[_Item]], _Message]
    ) -> Iterator[_Message]:
        some: list[_Item] = []
        total, sent = 0, False
        for item in items:
            if some and total + size(item) > _MESSAGE_CHARACTERS:
                yield make(some)
                some, total, sent = [], 0, True
            some.append(item)
            total += size(item)
        if some or not sent:
            yield make(some)


def _message(record: MemoryRecord) -> pb.MemoryRecord:
    kind = _NUMBERS.get(record.kind, pb.MEMORY_KIND_UNSPECIFIED)
    return pb.MemoryRecord(tokens=TokenIds(ids=record.token_ids), text=record.text, kind=kind)


def _record(message: pb.MemoryRecord) -> MemoryRecord:
    return MemoryRecord(tuple(message.tokens.ids), message.text, _KINDS.get(message.kind, "output"))


def _tenant_memory(message: pb.TenantMemoryStatistics) -> TenantMemoryStatistics:
    has_snapshot = message.HasField("snapshot_age")
    return TenantMemoryStatistics(
        tenant=message.tenant,
        arm=message.arm,
        tokens=message.tokens,
        stored_bytes=message.stored_bytes,
        log_records=message.log_records,
        snapshot_age=message.snapshot_age.ToTimedelta().total_seconds() if has_snapshot else None,
        epoch=message.epoch,
        resident=message.resident,
        index_bytes=message.index_bytes,
        read_only=message.read_only,
    )


def _orphan(message: pb.OrphanedMemory) -> OrphanedMemory:
    return OrphanedMemory(
        tag=message.tag,
        fingerprint=message.fingerprint,
        tenant=message.tenant if message.HasField("tenant") else None,
        arm=message.arm,
        tokens=message.tokens,
        stored_bytes=message.stored_bytes,
        unserved=message.unserved.ToTimedelta().total_seconds(),
    )
