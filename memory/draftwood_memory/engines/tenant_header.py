"""The tenant of a request from a header that the operator's proxy sets, and from nowhere else.

An ASGI middleware, which engines with an OpenAI API load by name (vLLM: `--middleware`). It writes the header into the
request as `vllm_xargs.draftwood_tenant`, and takes out whatever the caller has put there, at any depth. It refuses what
it cannot read: bodies that are no JSON, and web sockets. The proxy sets the header on every request, or removes it; a
caller who reaches the server through this proxy alone then has the tenant that the proxy says, or none.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from draftwood_memory.engines.options import TENANT

HEADER = b"x-draftwood-tenant"
XARGS, EXTRA = "vllm_xargs", ("sampling_params", "extra_args")
"""Where vLLM's APIs take a request's own options from."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class TenantHeader:
    """The middleware.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _body(receive)
        if body is None:
            return
        if body:
            try:
                body = with_tenant(body, _header(scope))
            except (ValueError, RecursionError):
                await _refuse(send)
                return
            headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope = {**scope, "headers": [*headers, (b"content-length", str(len(body)).encode())]}
        await self._app(scope, _replayed(body, receive), send)


def with_tenant(body: bytes, tenant: str) -> bytes:
    """A JSON body with this tenant and no other. Raises ValueError: it is no JSON."""
    content = _without_tenant(json.loads(body))
    if isinstance(content, dict):
        content[XARGS] = {**_mapping(content.get(XARGS)), TENANT: tenant}
        outer, inner = EXTRA
        if isinstance(content.get(outer), dict):
            content[outer][inner] = {**_mapping(content[outer].get(inner)), TENANT: tenant}
    return json.dumps(content).encode()


def _without_tenant(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_tenant(inner) for key, inner in value.items() if key != TENANT}
    return [_without_tenant(inner) for inner in value] if isinstance(value, list) else value


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _header(scope: Message) -> str:
    """The header's text; "" if there is none. Raises ValueError if there are several."""
    values = [value for name, value in scope["headers"] if name.lower() == HEADER]
    if len(values) > 1:
        raise ValueError(f"{HEADER.decode()} is there {len(values)} times")
    return values[0].decode("utf-8") if values else ""


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the caller has gone."""
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what comes besides."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return waiting.pop() if waiting else await receive()

    return next_message


async def _refuse(send: Send) -> None:
    problem = f"the body must be JSON, and {HEADER.decode()} there once at most, where tenants are taken from a header"
    body = json.dumps({"error": {"message": problem, "type": "invalid_request_error", "code": 415}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 415, "headers": headers})
    await send({"type": "http.response.body", "body": body})
