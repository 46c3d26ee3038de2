"""The gateway: OpenAI's API over HTTP, answered by a client of the service; and its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from importlib.resources import files
from typing import Any, Unpack

import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from draftwood_client import (
    AsyncClient,
    AsyncGenerationStream,
    Completion,
    DraftwoodError,
    FinishReason,
    ModelInfo,
    ToolFormat,
)
from draftwood_client.options import UNSET, CallOptions, Timeout
from draftwood_service.authorization import bearer_of
from draftwood_service.gateway.answers import Answers
from draftwood_service.gateway.batch import Batch
from draftwood_service.gateway.errors import (
    ClientDisconnectedError,
    InvalidCredentialError,
    InvalidRequestError,
    body_of,
    error_body,
    of_tools,
    status_of,
)
from draftwood_service.gateway.http import (
    SMALL_BODY,
    BodyBudget,
    Events,
    LocalRequests,
    body_size,
    cancel_on_disconnect,
    discard_body,
    failed,
    no_route,
    note,
    read_json,
    read_timeout,
    refusal,
)
from draftwood_service.gateway.reading import ParsedRequest, read_chat, read_completion, with_tools

_log = structlog.get_logger(__name__)
_credential: ContextVar[str] = ContextVar("credential")
_PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""The page has nothing from elsewhere."""
_IGNORED_HEADER = "x-draftwood-ignored"
_SHOWN, _MAX_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,100}"), 20
"""Names of fields that a header and the log may have, and how many of them."""
_MAX_TOLD = 1000
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Metrics:
    """The metrics of a gateway."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("draftwood_gateway_requests", "Requests", ["path", "status"], registry=self._registry)
        self._live = Gauge("draftwood_gateway_requests_live", "Requests under way", registry=self._registry)
        self._last = Gauge(
            "draftwood_gateway_last_request_timestamp_seconds",
            "When the last request arrived, in seconds since 1970; 0 for never",
            registry=self._registry,
        )
        self._seconds = Histogram(
            "draftwood_gateway_request_duration_seconds", "From a request to its end", ["path"], registry=self._registry
        )
        self._ended = Counter(
            "draftwood_gateway_connections_ended",
            "Connections that were ended: late, full (too many), bytes (of incomplete requests)",
            ["reason"],
            registry=self._registry,
        )

    def begin(self, path: str) -> Callable[[int], None]:
        """Counts a request. Returns a function to call with the status at its end; only its first call counts."""
        began, ended = time.perf_counter(), False
        self._live.inc()
        self._last.set_to_current_time()

        def end(status: int) -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._live.dec()
                self._requests.labels(path, str(status)).inc()
                self._seconds.labels(path).observe(time.perf_counter() - began)

        return end

    def connection_ended(self, reason: str) -> None:
        """Counts a connection that the gateway ended."""
        self._ended.labels(reason).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class ServiceClient(AsyncClient):
    """A client that also asks for the service's health."""

    async def is_serving(self, **call: Unpack[CallOptions]) -> bool:
        """Whether requests are served. Raises `StatusError`."""
        check = health_pb2_grpc.HealthStub(self._calls.channel).Check
        answer = await self._calls.ask(check, health_pb2.HealthCheckRequest(), call)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class Gateway:
    """Answers HTTP requests with the service's answers.

    Args:
        open_client: makes a client of the service; with the argument, one that sends this credential.
        page: serve the page at /.
        max_body_bytes: of a request.
        strict: refuse requests with fields that nobody here knows, rather than leave these out.
        keyless: let the service answer requests without a key, rather than refuse them here.
    """

    def __init__(
        self,
        open_client: Callable[[Callable[[], str] | None], ServiceClient],
        page: bool,
        max_body_bytes: int,
        strict: bool = False,
        keyless: bool = True,
    ) -> None:
        self._anonymous = open_client(None)
        self._named = open_client(_credential.get)
        self._page = page
        self._max_body_bytes = max_body_bytes
        self._strict = strict
        self._keyless = keyless
        self._told_of = set[tuple[str, ...]]()
        self._bodies = BodyBudget()
        self.metrics = Metrics()

    def app(self, origins: list[str], hosts: Collection[str] | None = None) -> Starlette:
        """The application.

        Args:
            origins: of web pages that may call, as in CORS.
            hosts: names by which it is called besides those of this machine; None for any name, and for web pages of
                any origin.
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
        middleware: list[Middleware] = []
        if hosts is not None:
            middleware.append(Middleware(LocalRequests, hosts=hosts, origins=origins))
        if origins:
            middleware.append(
                Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
            )
        return Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={HTTPException: no_route, Exception: failed},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.gather(self._anonymous.close(), self._named.close())

    async def _answer(self, read: Callable[[Any], ParsedRequest], request: Request) -> Response:
        end = self.metrics.begin(request.url.path)
        parsed: ParsedRequest | None = None
        try:
            size = body_size(request, self._max_body_bytes)
            client = await self._client_of_body(request, size)
            async with self._bodies.taken(size):
                parsed = read(await read_json(request, self._max_body_bytes))
                ignored = self._ignored(parsed, request)
                begun = self._begin(client, parsed, read_timeout(request))
                answers, batch = await cancel_on_disconnect(request, begun)
            headers = {"x-request-id": answers.id, **ignored}
            if parsed.stream:
                return self._events(parsed, answers, batch, end, headers)
            whole = answers.whole(await cancel_on_disconnect(request, batch.completions()))
        except ClientDisconnectedError as error:
            end(status_of(error))
            return Response(status_code=status_of(error))  # nobody receives it
        except Exception as error:
            end(status_of(error))
            return refusal(error) if parsed is None else refusal(_of_request(error, parsed), parsed.caller_names)
        except asyncio.CancelledError:
            end(499)
            raise
        end(200)
        return JSONResponse(whole, headers=headers)

    async def _client_of_body(self, request: Request, size: int) -> AsyncClient:
        """The client that calls with the request's key, before its body is read: if that is large, the service knows
        the key. Raises StatusError, InvalidCredentialError."""
        try:
            client = self._client(request)
            if size > SMALL_BODY:
                await self._info(client)
            return client
        except (DraftwoodError, InvalidCredentialError):
            await discard_body(request, self._max_body_bytes)
            raise

    def _ignored(self, parsed: ParsedRequest, request: Request) -> dict[str, str]:
        """A header that tells the caller which fields are left out, logged once for each kind of client.

        Raises:
            InvalidRequestError: there is such a field, and the gateway is strict.
        """
        if not parsed.ignored:
            return {}
        if self._strict:
            raise InvalidRequestError(parsed.ignored[0], "is not known")
        shown = [path if _SHOWN.fullmatch(path) else "(a name that is not shown)" for path in parsed.ignored]
        names = ", ".join(shown[:_MAX_SHOWN])
        kind = names, request.headers.get("user-agent", "")[:100]
        if kind not in self._told_of and len(self._told_of) < _MAX_TOLD:
            self._told_of.add(kind)
            _log.warning("fields of requests are not known, and left out", fields=kind[0], user_agent=kind[1])
        return {_IGNORED_HEADER: names}

    async def _begin(self, client: AsyncClient, parsed: ParsedRequest, seconds: float | None) -> tuple[Answers, Batch]:
        """The formatter of the answers to a request, and the batch of its prompts, which the service has admitted."""
        form = await self._tool_format(client) if parsed.tools is not None else None
        if form is not None:
            parsed = with_tools(parsed, form)
        model, at_once = parsed.model, 1
        if not model or len(parsed.prompts) > 1:
            info = await self._info(client)
            model, at_once = model or info.model, max(1, info.max_running_requests // parsed.samples)
        began = time.monotonic()

        def open_stream(number: int) -> AsyncGenerationStream:
            left: Timeout = UNSET if seconds is None else seconds
            if seconds is not None and number >= at_once:  # it begins when others have ended
                left = max(seconds - (time.monotonic() - began), 0.001)
            return client.stream(parsed.prompts[number], timeout=left, **parsed.options)

        batch = Batch(open_stream, len(parsed.prompts), at_once)
        await batch.begin()
        return Answers(parsed, model, form), batch

    def _events(
        self,
        parsed: ParsedRequest,
        answers: Answers,
        batch: Batch,
        end: Callable[[int], None],
        headers: Mapping[str, str],
    ) -> Response:
        async def ended() -> None:
            await batch.close()
            end(499)  # unless its end was counted

        return Events(self._chunks(parsed, answers, batch, end), ended, headers=headers)

    async def _chunks(
        self, parsed: ParsedRequest, answers: Answers, batch: Batch, end: Callable[[int], None]
    ) -> AsyncIterator[tuple[str, str]]:
        """The chunks of all prompts, as they come: (event, data)."""
        completions: dict[int, Completion] = {}
        try:
            for chunk in answers.first():
                yield "", _json(chunk)
            async for number, event in batch.events():
                if isinstance(event, Completion):
                    completions[number] = event
                    ends = [sampled.finish_reason.value for sampled in event.samples or (event,)]
                    chunks = [
                        chunk for sample, end in enumerate(ends) for chunk in answers.finished(number, sample, end)
                    ]
                else:
                    chunks = answers.delta(number, event)
                    if event.HasField("finished"):
                        chunks += answers.finished(number, event.sample, FinishReason.of(event.finished).value)
                for chunk in chunks:
                    yield "", _json(chunk)
            last = answers.last([completions[number] for number in sorted(completions)])
            if last is not None:
                yield "", _json(last)
            end(200)
            yield "", "[DONE]"
        except DraftwoodError as error:
            end(status_of(error))
            note(error)
            yield "error", _json(body_of(_of_request(error, parsed), parsed.caller_names))

    async def _models(self, request: Request) -> Response:
        try:
            info = await self._info(self._client(request))
        except Exception as error:
            return refusal(error)
        model = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "draftwood",
            "max_model_len": info.max_context_tokens,
            "draftwood": {"strategies": list(info.strategies), "default_strategy": info.default_strategy},
        }
        named = request.path_params.get("model")
        if named is None:
            return JSONResponse({"object": "list", "data": [model]})
        if named != info.model:
            problem = f"model: there is no model {named[:200]!r}"
            return JSONResponse(error_body(404, problem, "model"), 404)
        return JSONResponse(model)

    async def _health(self, request: Request) -> Response:
        """200 while the service behind it serves requests."""
        reason = "the service does not serve requests now: it loads its model, stops or starts its engine again"
        try:
            if await self._anonymous.is_serving(timeout=2.0):
                return JSONResponse({"status": "ok"})
        except DraftwoodError as error:
            note(error)
            reason = body_of(error)["error"]["message"]
        return JSONResponse({"status": "unavailable", "reason": reason}, 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    async def _show_page(self, request: Request) -> Response:
        page = (files("draftwood_service.gateway") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    def _client(self, request: Request) -> AsyncClient:
        """The client that calls with the request's key. Raises InvalidCredentialError."""
        try:
            key = bearer_of(request.headers.getlist("authorization"))
        except ValueError as error:
            raise InvalidCredentialError(str(error)) from None
        if not key and not self._keyless:
            raise InvalidCredentialError("the request has no key, and the gateway calls for nobody with its own")
        if not key:
            return self._anonymous
        _credential.set(key)
        return self._named

    async def _info(self, client: AsyncClient) -> ModelInfo:
        return await client.model_info(timeout=10.0)

    async def _tool_format(self, client: AsyncClient) -> ToolFormat:
        info = await self._info(client)
        if not info.HasField("tool_format"):
            raise InvalidRequestError("tools", f"the model takes none: {info.no_tools_reason}")
        return info.tool_format


def _of_request(error: Exception, parsed: ParsedRequest) -> Exception:
    return error if parsed.tools is None else of_tools(error, "json_schema" in parsed.options)
