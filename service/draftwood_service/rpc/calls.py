"""From gRPC to the servicers: a call gets its id, its caller and its message; every exception becomes one status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import grpc
import structlog
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth import (
    Principal,
    required_role,
)
from draftwood_service.errors import ClientDisconnectedError, LoadingError, ReaderStalledError
from draftwood_service.rpc.access import Gate
from draftwood_service.rpc.statuses import INTERNAL, rule_for, to_status
from draftwood_service.telemetry import CallRecord, Telemetry
from draftwood_tenants.reading import check_identifier

_log = structlog.get_logger(__name__)
_Key = TypeVar("_Key")

_ABORT_SECONDS = 2.0
"""How long an abort waits for the client to read the messages before the status."""
_MESSAGE_SECONDS = 60.0
"""In which the message of a call must have come, once its caller is known."""
_AT_ONCE = 8
"""Messages of a tenant, or of a connection without one, that are read at once."""


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC.

    Attributes:
        record: of the call, for metrics and traces.
        principal: the caller, who has the role that the method requires.
        request_id: given by the caller, or generated.
        arrived_at: on the clock of `time.perf_counter`.
    """

    context: grpc.aio.ServicerContext[Any, Any]
    principal: Principal
    request_id: str
    arrived_at: float
    record: CallRecord


class MessageReader:
    """Reads the messages of calls that have one each. A caller has few of them in memory until they are complete.

    Args:
        at_once: messages of a caller.
        seconds: for a message, the wait for those before it included.
    """

    def __init__(self, at_once: int, seconds: float) -> None:
        self._at_once = at_once
        self._seconds = seconds
        self._of_caller: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, messages: AsyncIterator[bytes], caller: str) -> bytes:
        """The message.

        Raises:
            ReaderStalledError: it does not come.
            InvalidInputError: there is none. A client that has ended the call, or sends too large a message, does not
                get that: gRPC itself has ended the call.
        """
        turn = self._of_caller.setdefault(caller, asyncio.Semaphore(self._at_once))
        try:
            async with asyncio.timeout(self._seconds), turn:
                received: Any = aiter(messages)
                message: bytes = await anext(received)
            await received.aclose()  # else gRPC keeps the message as long as the call lasts
            return message
        except TimeoutError:
            raise ReaderStalledError(self._seconds) from None
        except StopAsyncIteration:
            raise InvalidInputError("request", None, "is missing") from None


Run: TypeAlias = Callable[[Any, Call], Awaitable[Any]]
"""Answers a call: takes a request, or an iterator of them; returns the response, or None if it has streamed some."""


class ServedMethod(NamedTuple):
    """What answers the calls of a method; `parse` makes a request of its bytes, and raises InvalidInputError."""

    parse: Callable[[bytes], Any]
    run: Run


def handlers(
    service: ServiceDescriptor, served: Mapping[str, ServedMethod], gate: Gate, telemetry: Telemetry
) -> grpc.GenericRpcHandler:
    """gRPC handlers of all methods of a service, for calls that pass the gate. A method with a stream of requests has a
    stream of responses.

    To gRPC the requests of all methods are streams, which it reads when it is asked to: it would read any other request
    before its caller is known, 4 MiB of each of a thousand calls without a valid key.

    Args:
        served: by full name; calls of a method that is not there yet are refused with LoadingError.

    Raises:
        KeyError: a method has no rule in `draftwood_service.auth.principal`.
    """
    by_name: dict[str, Any] = {}
    reader = MessageReader(_AT_ONCE, _MESSAGE_SECONDS)
    for method in service.methods:
        assert method.server_streaming or not method.client_streaming
        make = (
            grpc.stream_stream_rpc_method_handler if method.server_streaming else grpc.stream_unary_rpc_method_handler
        )
        serializer = GetMessageClass(method.output_type).SerializeToString
        by_name[method.name] = make(
            _endpoint(service.full_name, method, served, gate, reader, telemetry), response_serializer=serializer
        )
    return grpc.method_handlers_generic_handler(service.full_name, by_name)


def _endpoint(
    service: str,
    method: MethodDescriptor,
    served: Mapping[str, ServedMethod],
    gate: Gate,
    reader: MessageReader,
    telemetry: Telemetry,
) -> Any:
    name, role = method.name, required_role(service, method.name)

    async def endpoint(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        arrived_at = time.perf_counter()
        request_id = uuid.uuid4().hex
        record, code = telemetry.call(f"{service}/{name}", context.invocation_metadata(), arrived_at), "OK"
        try:
            principal = await gate.admit(context, name, role)
            if (answering := served.get(method.full_name)) is None:
                raise LoadingError()
            if method.client_streaming:
                request: Any = _parsed_each(messages, answering.parse)
            else:
                request = answering.parse(await reader.read(messages, principal.tenant or context.peer()))
            given = getattr(request, "request_id", "")
            request_id = check_identifier("request_id", given) if given else request_id
            return await answering.run(request, Call(context, principal, request_id, arrived_at, record))
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED.name
            raise
        except Exception as error:
            request = None  # gRPC keeps this frame for a while, by the traceback of the error that `abort` raises
            code = rule_for(error).code.name
            gate.note(error, context, name, request_id)
            await abort(context, error, name, request_id)
        finally:
            record.end(code)

    return endpoint


@contextmanager
def counted(live: Counter[_Key], key: _Key) -> Iterator[None]:
    """Counts a call under a key while it lasts. Keys without calls are not kept."""
    live[key] += 1
    try:
        yield
    finally:
        live[key] -= 1
        if not live[key]:
            del live[key]


def _forget_frames(error: BaseException | None) -> None:
    """gRPC keeps the error of a call after its end, and with its frames all that they hold, such as the request."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


async def _parsed_each(messages: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
    async for data in messages:
        yield parse(data)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str, request_id: str) -> None:
    """Ends the call with the error's status.

    Raises:
        asyncio.CancelledError: the client is gone. A handler that returned would make gRPC send a status while the
            write that the client broke off is still pending, which it logs as an error.
    """
    if rule_for(error).code is INTERNAL.code:
        _log.error("internal error", method=method, request_id=request_id, exc_info=error)
    if isinstance(error, ClientDisconnectedError) or context.cancelled() or context.done():
        raise asyncio.CancelledError from error
    code, text, trailing = to_status(error, request_id, context.time_remaining())
    _forget_frames(error)
    try:
        async with asyncio.timeout(_ABORT_SECONDS):
            await context.abort(code, text, trailing)
    except grpc.aio.InternalError:
        return  # the call has just ended
    except TimeoutError:
        # The status is queued; a client that reads again receives it.
        _log.info("client does not read its status", method=method, request_id=request_id, code=code.name)
