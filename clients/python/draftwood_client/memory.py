"""The operators' client: statistics, warm-up, export, import and purge of tenants' learned memories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from draftwood.v1 import memory_pb2 as pb
from draftwood.v1.generation_pb2 import TokenIds
from draftwood.v1.memory_pb2_grpc import MemoryServiceStub
from draftwood_client.admin.calls import Calls
from draftwood_client.connection import Connection, ConnectionArguments
from draftwood_client.errors import StatusError
from draftwood_client.options import CallOptions
from draftwood_client.protocol.convert import from_message
from draftwood_client.protocol.request import text as checked_text
from draftwood_client.protocol.request import token_ids as checked_token_ids

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Message = TypeVar("_Message")

_MESSAGE_CHARACTERS = 32_768
"""Characters per message, a token id counting as four. The server reports progress after each message."""
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
        log_records: entries in the store, of one record or several.
        snapshot_age: always None: there are no snapshots any more.
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
class MemoryStoreStatistics:
    """Health of the store, and counters since this server started; fields as in the protocol, `last_lag` in seconds."""

    store: str
    healthy: bool
    outbox_records: int
    learned_records: int
    pushed_records: int
    received_records: int
    dropped_records: int
    stale_records: int
    unreadable_values: int
    failures: int
    reconnects: int
    reloads: int
    folds: int
    last_lag: float
    resident_tenants: int
    resident_tokens: int
    index_bytes: int
    resident_bytes: int
    max_bytes: int
    evicted_tenants: int
    late_memories: int
    read_only_memories: int
    read_only_records: int


@dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Statistics of memories and of the store.

    Attributes:
        store: None unless the caller is an operator.
        fingerprint: of the served model and tokenizer.
    """

    tenants: tuple[TenantMemoryStatistics, ...]
    store: MemoryStoreStatistics | None
    fingerprint: str


class MemoryClient:
    """A connection to a server's memory service. Constructor arguments as for `Client`; no call is retried.

        with MemoryClient("localhost:50051", tenant="acme") as memory:
            memory.warm(["a document", "another one"])

    Every method raises `StatusError` if the request fails; `tenant` defaults to that of the client. Every call takes
    `timeout` and `metadata`, as in `CallOptions`.
    """

    def __init__(self, target: str | None = None, **arguments: Unpack[ConnectionArguments]) -> None:
        connection = Connection.without_retries(target, arguments)
        self._default_tenant = connection.tenant
        self._bulk_timeout = connection.bulk_timeout
        self._calls = Calls(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels requests under way and closes the connection. May be called twice."""
        self._calls.close()

    def statistics(self, tenant: str | None = None, **call: Unpack[CallOptions]) -> MemoryStatistics:
        """Statistics of one tenant, by default the client's; if neither is set, of all that the caller may see."""
        request = pb.GetMemoryStatisticsRequest(tenant=tenant or self._default_tenant)
        pages = [*self._calls.pages(self._stub.GetMemoryStatistics, request, call)]
        tenants = tuple(from_message(TenantMemoryStatistics, one) for page in pages for one in page.tenants)
        last = pages[-1]
        store = from_message(MemoryStoreStatistics, last.store) if last.HasField("store") else None
        return MemoryStatistics(tenants, store, last.fingerprint)

    def warm(
        self,
        texts: Iterable[str],
        *,
        tenant: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        **call: Unpack[CallOptions],
    ) -> int:
        """Adds whole documents to a tenant's memory; returns the number of their tokens.

        Args:
            progress: called with the number of texts and tokens stored so far.

        Raises:
            ArgumentError: a text cannot be encoded; those before it are learned.
        """
        name = self._tenant(tenant)
        checked = (checked_text(f"texts[{number}]", one) for number, one in enumerate(texts))
        requests = _Messages(checked, len, lambda some: pb.WarmMemoryRequest(tenant=name, texts=some))
        tokens = 0
        for response in self._progress(self._stub.WarmMemory, requests, call):
            tokens = response.tokens
            if progress is not None:
                progress(response.texts, response.tokens)
        return tokens

    def export(
        self, *, tenant: str | None = None, arm: str = "", text: bool = True, **call: Unpack[CallOptions]
    ) -> MemoryExport:
        """The content of a tenant's memory.

        Args:
            text: with the text of the tokens, which a server with another model can learn.
        """
        request = pb.ExportMemoryRequest(tenant=self._tenant(tenant), arm=arm, without_text=not text)
        responses = self._calls.stream(self._stub.ExportMemory, request, call, self._bulk_timeout)
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
        **call: Unpack[CallOptions],
    ) -> int:
        """Adds exported records to a tenant's memory; returns the number of their tokens.

        Args:
            fingerprint: that of the export. If the server's differs, the texts of the records are learned.
            progress: called with the number of records and tokens stored so far.

        Raises:
            ArgumentError: a record or `fingerprint` cannot be encoded; the records before it may be learned.
        """
        name, of_model = self._tenant(tenant), checked_text("fingerprint", fingerprint)
        requests = _Messages(
            (_message(f"records[{number}]", record) for number, record in enumerate(records)),
            lambda record: 4 * len(record.tokens.ids) + len(record.text),
            lambda some: pb.ImportMemoryRequest(tenant=name, fingerprint=of_model, records=some),
        )
        tokens = 0
        for response in self._progress(self._stub.ImportMemory, requests, call):
            tokens = response.tokens
            if progress is not None:
                progress(response.records, response.tokens)
        return tokens

    def purge(self, tenant: str, **call: Unpack[CallOptions]) -> Purge:
        """Deletes a tenant's memory on all servers, of all models."""
        request = pb.PurgeMemoryRequest(tenant=tenant)
        response = self._calls.ask(self._stub.PurgeMemory, request, call)
        final_at = response.final_time.ToDatetime(UTC) if response.HasField("final_time") else None
        return Purge(response.memories, response.tokens, final_at)

    def orphans(self, **call: Unpack[CallOptions]) -> list[OrphanedMemory]:
        """The memories in the store that no server uses."""
        pages = self._calls.pages(self._stub.ListOrphanedMemories, pb.ListOrphanedMemoriesRequest(), call)
        return [from_message(OrphanedMemory, one) for page in pages for one in page.memories]

    def purge_orphans(self, fingerprint: str = "", **call: Unpack[CallOptions]) -> int:
        """Deletes the memories that no server uses; returns the number of tokens that they held.

        Args:
            fingerprint: only those of this model.
        """
        request = pb.PurgeOrphanedMemoriesRequest(fingerprint=fingerprint)
        return self._calls.ask(self._stub.PurgeOrphanedMemories, request, call).tokens

    def _tenant(self, tenant: str | None) -> str:
        return tenant or self._default_tenant or ""

    @property
    def _stub(self) -> MemoryServiceStub:
        return MemoryServiceStub(self._calls.channel)

    def _progress(
        self, method: Callable[..., Iterator[_Result]], requests: _Messages[Any, Any], call: CallOptions
    ) -> Iterator[_Result]:
        """The responses; raises the error of the items' iterator, if that is why there are no more."""
        try:
            yield from self._calls.stream(method, requests, call, self._bulk_timeout)
        except StatusError:
            if requests.error is not None:
                raise requests.error from None
            raise


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


def _message(name: str, record: MemoryRecord) -> pb.MemoryRecord:
    """Raises ArgumentError."""
    ids, text = checked_token_ids(f"{name}.token_ids", record.token_ids), checked_text(f"{name}.text", record.text)
    kind = _NUMBERS.get(record.kind, pb.MEMORY_KIND_UNSPECIFIED)
    return pb.MemoryRecord(tokens=TokenIds(ids=ids), text=text, kind=kind)


def _record(message: pb.MemoryRecord) -> MemoryRecord:
    return MemoryRecord(tuple(message.tokens.ids), message.text, _KINDS.get(message.kind, "output"))
