"""Reads the body and the deadline of an HTTP request, and cancels its work when its client disconnects."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from draftwood_service.gateway.errors import ClientDisconnectedError, InvalidRequestError

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

_T = TypeVar("_T")


async def read_json(request: Request, most: int) -> Any:
    """The body.

    Args:
        most: bytes.

    Raises:
        InvalidRequestError: it is too large, has too many values, is no JSON, or has half of a surrogate pair.
        ClientDisconnectedError: the client disconnected before its end.
    """
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= most:
                parts.append(part)
            elif size > _DISCARDED * most:
                break
    except ClientDisconnect:
        raise ClientDisconnectedError from None
    if size > most:
        raise InvalidRequestError("body", f"has more than {most} bytes")
    body = b"".join(parts)
    if _values(body) > MAX_VALUES:
        raise InvalidRequestError("body", f"has more than {MAX_VALUES} texts, lists and objects")
    try:
        value = json.loads(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequestError("body", f"is not UTF-8: byte {error.start} is {error.object[error.start]}") from None
    except ValueError as error:
        raise InvalidRequestError("body", f"is not JSON: {str(error)[:200]}") from None
    except RecursionError:
        raise InvalidRequestError("body", "is nested too deeply") from None
    if _SURROGATE.search(body):
        _require_text(value)
    return value


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


def _values(body: bytes) -> int:
    """Texts, lists and objects in JSON; of few an upper bound, and of many no more than show that."""
    most = body.count(b'"') // 2 + body.count(b"[") + body.count(b"{")
    if most <= MAX_VALUES:
        return most
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
