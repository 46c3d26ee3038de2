"""The gateway: OpenAI's API over HTTP, answered by clients of services; and its metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
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
from draftwood_client.options import UNSET, Timeout
from draftwood_service.authorization import bearer_of
from draftwood_service.gateway.answers import Answers, Shape
from draftwood_service.gateway.batch import Batch
from draftwood_service.gateway.errors import (
    ClientDisconnectedError,
    InvalidCredentialError,
    InvalidRequestError,
    UnknownModelError,
    body_of,
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
from draftwood_service.gateway.messages import MessageAnswers, read_message
from draftwood_service.gateway.reading import ParsedRequest, read_chat, read_completion, with_tools, with_variables
from draftwood_service.gateway.responses import ResponseAnswers, read_response
from draftwood_service.gateway.services import INFO_SECONDS, OpenClient, Service, Services

_log = structlog.get_logger(__name__)
_IGNORED_HEADER = "x-draftwood-ignored"
_SHOWN, _MAX_SHOWN = re.compile(r"[A-Za-z0-9_.-]{1,100}"), 20
"""Names of fields that a header and the log may have, and how many of them."""
_MAX_TOLD = 1000
_TRACE = {
    "traceparent": re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "tracestate": re.compile("[!-~ ]{1,512}"),
}
"""Headers of W3C's trace context."""
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Metrics:
    """The metrics of a gateway."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "draftwood_gateway_requests", "Requests", ["path", "status", "model"], registry=self._registry
        )
        self._live = Gauge("draftwood_gateway_requests_live", "Requests under way", registry=self._registry)
        self._last = Gauge(
            "draftwood_gateway_last_request_timestamp_seconds",
            "When the last request arrived, in seconds since 1970; 0 for never",
            registry=self._registry,
        )
        self._seconds = Histogram(
            "draftwood_gateway_request_duration_seconds",
            "From a request to its end",
            ["path", "model"],
            registry=self._registry,
        )
        self._ended = Counter(
            "draftwood_gateway_connections_ended",
            "Connections that were ended: late, full (too many), bytes (of incomplete requests)",
            ["reason"],
            registry=self._registry,
        )

    def begin(self, path: str) -> Callable[..., None]:
        """Counts a request. Returns a function to call at its end with the status, and the model if there are several;
        only its first call counts."""
        began, ended = time.perf_counter(), False
        self._live.inc()
        self._last.set_to_current_time()

        def end(status: int, *, model: str = "") -> None:
            nonlocal ended
            if not ended:
                ended = True
                self._live.dec()
                self._requests.labels(path, str(status), model).inc()
                self._seconds.labels(path, model).observe(time.perf_counter() - began)

        return end

    def connection_ended(self, reason: str) -> None:
        """Counts a connection that the gateway ended."""
        self._ended.labels(reason).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self._registry)


class Gateway:
    """Answers HTTP requests with the answers of services.

    Args:
        servers: what makes clients of each service, by the model that requests name. Requests without a model are the
            first one's. With one service under the name "", requests name its model as it does itself, or none.
        max_body_bytes: of a request.
        strict: refuse requests with fields that nobody here knows, rather than leave these out.
        keyless: let the service answer requests without a key, rather than refuse them here.
    """

    def __init__(
        self,
        servers: Mapping[str, OpenClient],
        max_body_bytes: int,
        strict: bool = False,
        keyless: bool = True,
    ) -> None:
        self._services = Services(servers)
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
            Route("/v1/chat/completions", partial(self._answer, read_chat, Answers), methods=["POST"]),
            Route("/v1/completions", partial(self._answer, read_completion, Answers), methods=["POST"]),
            Route("/v1/responses", partial(self._answer, read_response, ResponseAnswers), methods=["POST"]),
            Route("/v1/messages", partial(self._answer, read_message, MessageAnswers), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{model:path}", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
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
            await self._services.close()

    async def _answer(
        self,
        read: Callable[[Any], ParsedRequest],
        shape: Callable[[ParsedRequest, str], Shape],
        request: Request,
    ) -> Response:
        end = self.metrics.begin(request.url.path)
        parsed: ParsedRequest | None = None
        model = ""
        try:
            size = body_size(request, self._max_body_bytes)
            key = await self._key_of_body(request, size)
            async with self._bodies.taken(size):
                parsed = read(await read_json(request, self._max_body_bytes))
                service = self._services.of(parsed.model)
                parsed, model = service.named(parsed), service.model
                end = partial(end, model=model)
                begun = self._begin(request, service.client(key), parsed, shape)
                answers, batch, ignored = await cancel_on_disconnect(request, begun)
            headers = {"x-request-id": answers.id, **ignored}
            if parsed.stream:
                return self._events(parsed, answers, batch, end, headers, model)
            whole = answers.whole(await cancel_on_disconnect(request, batch.completions()))
        except ClientDisconnectedError as error:
            end(status_of(error))
            return Response(status_code=status_of(error))  # nobody receives it
        except Exception as error:
            end(status_of(error))
            if parsed is None:
                return refusal(error)
            return refusal(_of_request(error, parsed), parsed.caller_names, model)
        except asyncio.CancelledError:
            end(499)
            raise
        end(200)
        return JSONResponse(whole, headers=headers)

    async def _key_of_body(self, request: Request, size: int) -> str:
        """The request's key, before its body is read: if that is large, a service knows the key. Raises StatusError,
        InvalidCredentialError."""
        try:
            key = self._key(request)
            if size > SMALL_BODY:
                await self._services.require_caller(key)
            return key
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

    async def _begin(
        self,
        request: Request,
        client: AsyncClient,
        parsed: ParsedRequest,
        shape: Callable[[ParsedRequest, str], Shape],
    ) -> tuple[Shape, Batch, dict[str, str]]:
        """What shapes the answers to a request, the batch of its prompts, which the service has admitted, and the
        header of what is left out."""
        seconds, model, at_once = read_timeout(request), parsed.model, 1
        if not model or len(parsed.prompts) > 1 or parsed.tools is not None or parsed.variables:
            info = await client.model_info(timeout=INFO_SECONDS)
            model, at_once = model or info.model, max(1, info.max_running_requests // parsed.samples)
            parsed = with_variables(parsed, info.template_kwargs)
            if parsed.tools is not None:
                parsed = with_tools(parsed, _tool_format(info))
        ignored = self._ignored(parsed, request)
        began, trace = time.monotonic(), _trace_of(request)

        def open_stream(number: int) -> AsyncGenerationStream:
            left: Timeout = UNSET if seconds is None else seconds
            if seconds is not None and number >= at_once:  # it begins when others have ended
                left = max(seconds - (time.monotonic() - began), 0.001)
            return client.stream(parsed.prompts[number], timeout=left, metadata=trace, **parsed.options)

        batch = Batch(open_stream, len(parsed.prompts), at_once)
        await batch.begin()
        return shape(parsed, model), batch, ignored

    def _events(
        self,
        parsed: ParsedRequest,
        answers: Shape,
        batch: Batch,
        end: Callable[[int], None],
        headers: Mapping[str, str],
        model: str,
    ) -> Response:
        async def ended() -> None:
            await batch.close()
            end(499)  # unless its end was counted

        return Events(self._chunks(parsed, answers, batch, end, model), ended, headers=headers)

    async def _chunks(
        self, parsed: ParsedRequest, answers: Shape, batch: Batch, end: Callable[[int], None], model: str
    ) -> AsyncIterator[tuple[str, str]]:
        """The chunks of all prompts, as they come: (event, data)."""
        completions: dict[int, Completion] = {}
        try:
            for chunk in answers.first():
                yield chunk.get("type", ""), _json(chunk)
            async for number, event in batch.events():
                if isinstance(event, Completion):
                    completions[number] = event
                    ends = [sampled.finish_reason for sampled in event.samples or (event,)]
                    chunks = [
                        chunk for sample, end in enumerate(ends) for chunk in answers.finished(number, sample, end)
                    ]
                else:
                    chunks = answers.delta(number, event)
                    if event.result is not None:
                        chunks += answers.finished(number, event.sample, FinishReason.of(event.result))
                for chunk in chunks:
                    yield chunk.get("type", ""), _json(chunk)
            for chunk in answers.last([completions[number] for number in sorted(completions)]):
                yield chunk.get("type", ""), _json(chunk)
            end(200)
            if answers.done:
                yield "", answers.done
        except DraftwoodError as error:
            end(status_of(error))
            note(error)
            for chunk in answers.failed(body_of(_of_request(error, parsed), parsed.caller_names, model)):
                yield chunk.get("type", "error"), _json(chunk)

    async def _models(self, request: Request) -> Response:
        named = request.path_params.get("model")
        service: Service | None = None
        try:
            key = self._key(request)
            if named is None:
                return JSONResponse({"object": "list", "data": await self._services.entries(key)})
            service = self._services.of(named)
            entry = await service.entry(key)
            if entry["id"] != named:
                raise UnknownModelError(named, [entry["id"]])
            return JSONResponse(entry)
        except Exception as error:
            return refusal(error, model="" if service is None else service.model)

    async def _health(self, request: Request) -> Response:
        """200 while a service serves requests."""
        problems = await self._services.problems()
        ready = not all(problems.values())
        answer: dict[str, Any] = {"status": "ok" if ready else "unavailable"}
        if len(problems) > 1:
            answer["models"] = {model: problem or "ok" for model, problem in problems.items()}
        elif not ready:
            [answer["reason"]] = problems.values()
        return JSONResponse(answer, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=self.metrics.content_type)

    def _key(self, request: Request) -> str:
        """The request's key; "" if it has none. Raises InvalidCredentialError."""
        try:
            key = bearer_of(request.headers.getlist("authorization"))
        except ValueError as error:
            raise InvalidCredentialError(str(error)) from None
        key = key or request.headers.get("x-api-key", "")  # where Anthropic's clients have it
        if not key and not self._keyless:
            raise InvalidCredentialError("the request has no key, and the gateway calls for nobody with its own")
        return key or ""


def _tool_format(info: ModelInfo) -> ToolFormat:
    if not info.HasField("tool_format"):
        raise InvalidRequestError("tools", f"the model takes none: {info.no_tools_reason}")
    return info.tool_format


def _trace_of(request: Request) -> dict[str, str]:
    """Headers of the caller's trace, which the service's is a part of; those that are none are left out."""
    given = {name: request.headers.get(name, "") for name in _TRACE}
    trace = {name: value for name, value in given.items() if _TRACE[name].fullmatch(value)}
    return trace if "traceparent" in trace else {}


def _of_request(error: Exception, parsed: ParsedRequest) -> Exception:
    return error if parsed.tools is None else of_tools(error, "json_schema" in parsed.options)
