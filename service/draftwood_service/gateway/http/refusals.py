"""Errors as HTTP answers, and in the log."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from draftwood_service.gateway.errors import body_of, error_body, headers_of, is_of_grpc, status_of

_log = structlog.get_logger(__name__)


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
