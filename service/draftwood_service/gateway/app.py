"""The HTTP application: OpenAI's routes, health, metrics and a page."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from importlib.resources import files
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from draftwood_client import AsyncClient, AsyncGenerationStream, DraftwoodError, ModelInfo, ToolFormat
from draftwood_service.gateway.answers import Answers, as_events
from draftwood_service.gateway.errors import (
    InvalidRequestError,
    UnknownModelError,
    body_of,
    headers_of,
    of_tools,
    status_of,
)
from draftwood_service.gateway.reading import Asked, read_chat, read_completion, with_tools

_log = structlog.get_logger(__name__)

_credential: ContextVar[str] = ContextVar("credential")
_PAGE_POLICY = "; ".join(
    [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "script-src 'unsafe-inline'",
        "connect-src 'self'",
        "img-src data:",
    ]
)
"""The page has nothing from elsewhere."""
TIMEOUT_HEADER = "x-draftwood-timeout"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_MOST_TOKEN_TEXTS = 100_000
"""Texts of tokens that are remembered, for log-probabilities. Not tuned."""


class Gateway:
    """Answers HTTP requests with the service's answers.

    Args:
        open_client: makes a client of the service; with the argument, one that sends this credential.
        page: serve the page at /.
        max_body_bytes: of a request.
    """

    def __init__(
        self, open_client: Callable[[Callable[[], str] | None], AsyncClient], page: bool, max_body_bytes: int
    ) -> None:
        self._anonymous = open_client(None)
        self._named = open_client(_credential.get)
        self._page = page
        self._max_body_bytes = max_body_bytes
        self._token_texts: dict[int, str] = {}
        self._registry = CollectorRegistry()
        self._requests = Counter("draftwood_gateway_requests", "Requests", ["path", "status"], registry=self._registry)
        self._live = Gauge("draftwood_gateway_requests_live", "Requests under way", registry=self._registry)
        self._seconds = Histogram(
            "draftwood_gateway_request_duration_seconds", "From a request to its end", ["path"], registry=self._registry
        )

    def app(self, origins: list[str]) -> Starlette:
        """The application.

        Args:
            origins: of web pages that may call, as in CORS.
        """
        routes = [
            Route("/v1/chat/completions", partial(self._answer, read_chat), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, read_completion), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        if self._page:
            routes.append(Route("/", self._show_page))
        middleware = [Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])]
        return Starlette(routes=routes, middleware=middleware if origins else [], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.gather(self._anonymous.close(), self._named.close())

    async def _answer(self, read: Callable[[Any], Asked], request: Request) -> Response:
        path, began = request.url.path, time.perf_counter()
        self._live.inc()
        ended = False
        asked: Asked | None = None

        def end(status: int) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._live.dec()
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.perf_counter() - began)

        try:
            asked = read(await self._body(request))
            client = self._client(request)
            timeout = _timeout(request)
            form = await self._tool_format(client) if asked.tools is not None else None
            if form is not None:
                asked = with_tools(asked, form)
            streams = [client.stream(prompt, timeout=timeout, **asked.options) for prompt in asked.prompts]
            model = asked.model or (await self._info(client)).model
            answers = Answers(asked, model, partial(self._text_of, client), form)
            if not asked.stream:
                completions = await asyncio.gather(*map(_completed, streams))
                response: Response = JSONResponse(
                    await answers.whole(completions), headers={"x-request-id": answers.id}
                )
                end(200)
                return response
            await asyncio.gather(*(stream.__aenter__() for stream in streams))
        except Exception as error:
            known = of_tools(error) if asked is not None and asked.tools is not None else error
            end(status_of(known))
            return _refusal(known)
        except asyncio.CancelledError:
            end(499)
            raise
        events = as_events(self._chunks(asked, answers, streams, end))
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": answers.id}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _chunks(
        self, asked: Asked, answers: Answers, streams: list[AsyncGenerationStream], end: Callable[[int], None]
    ) -> AsyncIterator[tuple[str, str]]:
        """The chunks of all prompts, one prompt after the other: (event, data). Cancels the streams if it is closed."""
        status = 499
        try:
            for chunk in answers.first():
                yield "", _json(chunk)
            for number, stream in enumerate(streams):
                async for delta in stream:
                    for chunk in await answers.delta(number, delta):
                        yield "", _json(chunk)
                completion = await stream.completion()
                samples = completion.samples or (completion,)
                for chunk in answers.finished(number, [sample.finish_reason.value for sample in samples]):
                    yield "", _json(chunk)
            ends = [stream.finished for stream in streams if stream.finished is not None]
            last = answers.last([one.usage for one in ends], [one.drafting for one in ends])
            if last is not None:
                yield "", _json(last)
            yield "", "[DONE]"
            status = 200
        except DraftwoodError as error:
            status = status_of(error)
            yield "error", _json(body_of(error))
        finally:
            for stream in streams:
                stream.cancel()
            end(status)

    async def _models(self, request: Request) -> Response:
        try:
            info = await self._info(self._client(request))
        except Exception as error:
            return _refusal(error)
        model = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "draftwood",
            "max_model_len": info.max_context_tokens,
            "draftwood": {"strategies": list(info.strategies), "default_strategy": info.default_strategy},
        }
        asked = request.path_params.get("model")
        if asked is None:
            return JSONResponse({"object": "list", "data": [model]})
        if asked != info.model:
            return _refusal(UnknownModelError(asked))
        return JSONResponse(model)

    async def _health(self, request: Request) -> Response:
        """200 while the service behind it answers."""
        try:
            await self._anonymous.model_info(timeout=2.0)
        except DraftwoodError as error:
            # A server that wants a credential is up.
            if status_of(error) not in (401, 403):
                return JSONResponse({"status": "unavailable", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _show_page(self, request: Request) -> Response:
        page = (files("draftwood_service.gateway") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    def _client(self, request: Request) -> AsyncClient:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            return self._anonymous
        _credential.set(key.strip())
        return self._named

    async def _info(self, client: AsyncClient) -> ModelInfo:
        return await client.model_info(timeout=10.0)

    async def _tool_format(self, client: AsyncClient) -> ToolFormat:
        info = await self._info(client)
        if info.tool_format is None:
            raise InvalidRequestError("tools", f"the model takes none: {info.no_tools_reason}")
        return info.tool_format

    async def _text_of(self, client: AsyncClient, token: int) -> str:
        text = self._token_texts.get(token)
        if text is None:
            text = await client.detokenize([token], include_special_tokens=True)
            if len(self._token_texts) < _MOST_TOKEN_TEXTS:
                self._token_texts[token] = text
        return text

    async def _body(self, request: Request) -> Any:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_body_bytes:
                raise InvalidRequestError("body", f"has more than {self._max_body_bytes} bytes")
            parts.append(part)
        try:
            return json.loads(b"".join(parts))
        except ValueError as error:
            raise InvalidRequestError("body", f"is not JSON: {str(error)[:200]}") from None
        except RecursionError:
            raise InvalidRequestError("body", "is nested too deeply") from None


def _timeout(request: Request) -> float | None:
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


async def _completed(stream: AsyncGenerationStream) -> Any:
    async with stream:
        return await stream.completion()


def _refusal(error: Exception) -> Response:
    status = status_of(error)
    if status == 500:
        _log.exception("internal error", exc_info=error)
    return JSONResponse(body_of(error), status, headers=headers_of(error))
