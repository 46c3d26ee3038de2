"""The operators' client: statistics, warm-up, export, import and purge of tenants' learned memories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Unpack

from draftwood.v1 import memory_pb2 as pb
from draftwood.v1.generation_pb2 import TokenIds
from draftwood.v1.memory_pb2_grpc import MemoryServiceStub
from draftwood_client.calls import BlockingClient, Call, Calls, unary
from draftwood_client.connection import Connection, ConnectionArguments
from draftwood_client.errors import StatusError
from draftwood_client.options import CallOptions
from draftwood_client.request import text as checked_text
from draftwood_client.request import token_ids as checked_token_ids

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


class MemoryClient(BlockingClient):
    """A connection to a server's memory service. Constructor arguments as for `Client`; no call is retried.

        with MemoryClient("localhost:50051", tenant="acme") as memory:
            memory.warm(["a document", "another one"])

    Every method raises `StatusError` if the request fails; `tenant` defaults to that of the client. Every call takes
    `timeout` and `metadata`, as in `CallOptions`.
    """

    _stub_type = MemoryServiceStub

    def __init__(self, target: str | None = None, **arguments: Unpack[ConnectionArguments]) -> None:
        connection = Connection.without_retries(target, arguments)
        self._default_tenant = connection.tenant
        self._bulk_timeout = connection.bulk_timeout
        self._calls = Calls(connection)

    def statistics(self, tenant: str | None = None, **call: Unpack[CallOptions]) -> pb.GetMemoryStatisticsResponse:
        """Statistics of one tenant, by default the client's; if neither is set, of all that the caller may see.

        The store's are set for operators only.
        """
        request = pb.GetMemoryStatisticsRequest(tenant=tenant or self._default_tenant)
        statistics = pb.GetMemoryStatisticsResponse()
        while True:
            statistics.MergeFrom(page := self._calls.ask(self._stub.GetMemoryStatistics, request, call))
            if not page.next_page_token:
                return statistics
            request.page_token = page.next_page_token
            statistics.ClearField("store")

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
        checked = (checked_text(f"texts[{number}]", item) for number, item in enumerate(texts))
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
        records = (_record(record) for response in responses for record in response.records)
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

    @unary
    def purge(self, tenant: str, **call: Unpack[CallOptions]) -> Call[pb.PurgeMemoryResponse]:
        """Deletes a tenant's memory on all servers, of all models.

        `final_time` is set if servers could not be asked, which have lost the store or were killed; those that still
        run have deleted it by then.
        """
        return Call("PurgeMemory", pb.PurgeMemoryRequest(tenant=tenant), call)

    def orphans(self, **call: Unpack[CallOptions]) -> list[pb.OrphanedMemory]:
        """The memories in the store that no server uses; without a tenant if the server cannot decrypt it."""
        request = pb.ListOrphanedMemoriesRequest()
        listed: Call[pb.OrphanedMemory] = Call("ListOrphanedMemories", request, call, items="memories")
        return [*self._calls.results(MemoryServiceStub, listed)]

    @unary
    def purge_orphans(self, fingerprint: str = "", **call: Unpack[CallOptions]) -> Call[int]:
        """Deletes the memories that no server uses; returns the number of tokens that they held.

        Args:
            fingerprint: only those of this model.
        """
        request = pb.PurgeOrphanedMemoriesRequest(fingerprint=fingerprint)
        return Call("PurgeOrphanedMemories", request, call, lambda response: response.tokens)

    def _tenant(self, tenant: str | None) -> str:
        return tenant or self._default_tenant or ""

    @property
    def _stub(self) -> MemoryServiceStub:
        return self._calls.stub(MemoryServiceStub)

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
