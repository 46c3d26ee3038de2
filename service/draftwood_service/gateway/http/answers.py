"""HTTP answers: streams of server-sent events, and errors, which are logged where they are the operator's to mend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from draftwood_service.gateway.errors import body_of, error_body, headers_of, is_of_grpc, status_of

_log = structlog.get_logger(__name__)


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


def refusal(error: Exception, caller_names: Mapping[str, str] = MappingProxyType({})) -> Response:
    """The answer to a request that failed.

    Args:
        caller_names: see `ParsedRequest.caller_names`.
    """
    note(error)
    return JSONResponse(body_of(error, caller_names), status_of(error), headers=headers_of(error))


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
        text = f"{route} is unknown; there are POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
        code = "unknown_url"
    elif error.status_code == 405:
        text = f"{route} is not served; use {(error.headers or {}).get('Allow', 'another method')}"
        code = "method_not_supported"
    return JSONResponse(error_body(error.status_code, text, None, code), error.status_code, headers=error.headers)


async def failed(request: Request, error: Exception) -> Response:
    """For what is wrong with the gateway itself; Starlette raises it again, and uvicorn logs it."""
    return JSONResponse(body_of(error), 500)
