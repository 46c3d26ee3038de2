"""Which HTTP requests are answered; reads their body and deadline; cancels their work when the client disconnects."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import asynccontextmanager
from itertools import islice
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from draftwood_service.gateway.errors import (
    ClientDisconnectedError,
    InvalidRequestError,
    body_of,
    error_body,
    headers_of,
    is_of_grpc,
    status_of,
)
from draftwood_service.starting import is_loopback

_log = structlog.get_logger(__name__)

TIMEOUT_HEADER = "x-draftwood-timeout"

_DISCARDED = 4
"""A body is read to its end, and refused, if it is up to so many times too large: a client that cannot send the rest of
a body may not read why."""

MAX_VALUES = 100_000
"""Texts, lists and objects of a body: as many as a request of the service may have fields. Numbers cost less."""
_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A text in JSON, or one that does not end: so that each byte is looked at once."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""How JSON may write what is no text, half of a surrogate pair; two make a character."""

SMALL_BODY = 64 * 1024
"""Bytes of a body that waits for no others: as many are in each connection's buffers anyway."""
LARGE_BODIES = 16 * 2**20
"""Bytes of all larger bodies that are read at once. Once it is read, a body may take twenty times its bytes."""

_NOT_SERVED = {
    "/v1/embeddings": "is not served: the model writes text, and has no embeddings",
    "/v1/audio": "is not served: audio is neither read nor written",
    "/v1/images": "is not served: images are neither read nor made",
    "/v1/responses/": "is not served: answers are not stored",
}
"""By the beginning of a path."""

_T = TypeVar("_T")

_log = structlog.get_logger(__name__)


class BodyBudget:
    """The bytes of large bodies that are read at once. A body waits for those before it.

    Args:
        limit: bytes; a body that has more is read alone.
    """

    def __init__(self, limit: int = LARGE_BODIES) -> None:
        self._free = self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size: int) -> AsyncIterator[None]:
        """While a body of so many bytes is read, and its request admitted."""
        if size <= SMALL_BODY:
            yield
            return
        size, turn = min(size, self._limit), asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            self._free += 0 if turn.cancelled() else size
            self._admit()

    def _admit(self) -> None:
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= size
                turn.set_result(None)


def body_size(request: Request, limit: int) -> int:
    """Bytes of the body, as its header says; `limit` if it does not."""
    return min(int(request.headers.get("content-length", limit)), limit)


class LocalRequests:
    """Keeps web pages from a gateway that only this machine reaches: a visitor's browser is on this machine, too.

    A page of any site may send requests here, and one whose name is made to mean this machine (DNS rebinding) reads the
    answers. Browsers tell both in headers that pages cannot change.

    Args:
        hosts: names by which a proxy on this machine may pass requests on.
        origins: of web pages that may call.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.lower() for host in hosts}
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = self._refused(Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refused is None else refused)(scope, receive, send)

    def _refused(self, headers: Headers) -> JSONResponse | None:
        """The answer to a request that is refused."""
        for host in headers.getlist("host"):
            if (name := _host_name(host)) not in self._hosts and not is_loopback(name):
                text = f"host: {host[:200]!r} is not a name of this machine's; a proxy's is allowed by --allowed-host"
                return JSONResponse(error_body(421, text, "host"), 421)
        for origin in headers.getlist("origin"):
            same = urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
            if not (same or {origin, "*"} & {*self._origins}):
                text = f"origin: web pages of {origin[:200]!r} may not call; --cors-origin allows it"
                return JSONResponse(error_body(403, text, "origin"), 403)
        return None


def _host_name(host: str) -> str:
    """Of a Host header, without the port; "" if it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


async def read_json(request: Request, limit: int) -> Any:
    """The body.

    Args:
        limit: bytes.

    Raises:
        InvalidRequestError: it is too large, has too many values, is no JSON, or has half of a surrogate pair.
        ClientDisconnectedError: the client disconnected before its end.
    """
    parts, size = [], 0
    async for part in _parts(request, limit):
        size += len(part)
        if size <= limit:
            parts.append(part)
    if size > limit:
        raise InvalidRequestError("body", f"has more than {limit} bytes")
    body = b"".join(parts)
    if _values(body) > MAX_VALUES:
        raise InvalidRequestError("body", f"has more than {MAX_VALUES} texts, lists and objects")
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_float=_finite, parse_constant=_finite)
    except UnicodeDecodeError as error:
        raise InvalidRequestError("body", f"is not UTF-8: byte {error.start} is {error.object[error.start]}") from None
    except ValueError as error:
        raise InvalidRequestError("body", f"is not JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None
    if _SURROGATE.search(body):
        _require_text(value)
    return value


def _finite(number: str) -> float:
    """The number, which an answer may repeat. Raises ValueError: it is NaN, or infinite, also by its size."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number[:40]} is no finite number")
    return value


async def discard_body(request: Request, limit: int) -> None:
    """Reads the body of a request that is refused, and keeps nothing of it. Raises ClientDisconnectedError."""
    async for _ in _parts(request, limit):
        pass


async def _parts(request: Request, limit: int) -> AsyncIterator[bytes]:
    """The pieces of a body, as far as it is read. Raises ClientDisconnectedError."""
    size = 0
    try:
        async for part in request.stream():
            yield part
            size += len(part)
            if size > _DISCARDED * limit:
                return
    except ClientDisconnect:
        raise ClientDisconnectedError from None


def read_timeout(request: Request) -> float | None:
    """Seconds that the request has, from its header; None for no deadline but the service's own."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise InvalidRequestError(TIMEOUT_HEADER, "must be a number of seconds above 0")
    return seconds


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of some work for a request whose body was read. Cancelled as soon as the client disconnects.

    Raises:
        ClientDisconnectedError: it did.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnectedError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))
        del working, leaving  # an error would hold itself by them and its traceback, and the request with it


def _values(body: bytes) -> int:
    """Texts, lists and objects in JSON; of few an upper bound, and of many no more than show that."""
    bound = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if bound <= MAX_VALUES:
        return bound
    texts = sum(1 for _ in islice(_TEXT.finditer(body), MAX_VALUES + 1))
    if texts > MAX_VALUES:
        return texts
    rest = _TEXT.sub(b"", body)
    return texts + rest.count(b"[") + rest.count(b"{")


def _require_text(body: object) -> None:
    """Raises InvalidRequestError if a text or the name of a field is none, and could neither be sent on nor shown."""
    containers: list[tuple[str, object]] = [("", body)]
    while containers:
        name, value = containers.pop()
        if isinstance(value, dict):
            for key in value:
                _require_encodable(name or "body", "has a name in which ", key)
            containers += [(f"{name}.{key}" if name else key, item) for key, item in value.items()]
        elif isinstance(value, list):
            containers += [(f"{name}[{at}]", item) for at, item in enumerate(value)]
        elif isinstance(value, str):
            _require_encodable(name, "", value)


def _require_encodable(name: str, begin: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"{begin}character {error.start} is the unpaired surrogate {text[error.start]!r}, which is not text"
        raise InvalidRequestError(name or "body", problem) from None


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """A stream of events.

    Args:
        events: (event name or "", data).
        ended: awaited once the answer has ended, or its client has left, however far it came.
        headers: more of them.
    """

    def __init__(
        self,
        events: AsyncIterator[tuple[str, str]],
        ended: Callable[[], Awaitable[None]],
        headers: Mapping[str, str],
    ) -> None:
        more = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
        super().__init__(_bytes(events), media_type="text/event-stream", headers=more)
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._ended()


async def _bytes(events: AsyncIterator[tuple[str, str]]) -> AsyncIterator[bytes]:
    async for event, data in events:
        yield (f"event: {event}\n" if event else "").encode() + b"data: " + data.encode() + b"\n\n"


def refusal(error: Exception, caller_names: Mapping[str, str] = MappingProxyType({}), model: str = "") -> JSONResponse:
    """The answer to a request that failed.

    Args:
        caller_names, model: see `body_of`.
    """
    note(error)
    return JSONResponse(body_of(error, caller_names, model), status_of(error), headers=headers_of(error))


def note(error: Exception) -> None:
    """Logs an error that is the operator's to mend."""
    if is_of_grpc(error):
        _log.warning("a call of the service failed", error=str(error))
    elif status_of(error) == 500:
        _log.exception("internal error", exc_info=error)


async def no_route(request: Request, error: Exception) -> Response:
    """For a path that is not served, or not with this method."""
    assert isinstance(error, HTTPException)
    route, code = f"{request.method} {request.url.path[:200]}", None
    text = f"{route}: {error.detail}"
    if error.status_code == 404:
        why = next((why for path, why in _NOT_SERVED.items() if request.url.path.startswith(path)), "is unknown")
        routes = ", ".join(f"POST /v1/{name}" for name in ("chat/completions", "completions", "responses", "messages"))
        text = f"{route} {why}; there are {routes} and GET /v1/models"
        code = "unknown_url"
    elif error.status_code == 405:
        text = f"{route} is not served; use {(error.headers or {}).get('Allow', 'another method')}"
        code = "method_not_supported"
    return JSONResponse(error_body(error.status_code, text, None, code), error.status_code, headers=error.headers)


async def failed(request: Request, error: Exception) -> Response:
    """For what is wrong with the gateway itself; Starlette raises it again, and uvicorn logs it."""
    return JSONResponse(body_of(error), 500)
