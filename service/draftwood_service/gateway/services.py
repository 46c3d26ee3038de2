"""The services behind a gateway: which one a request is for, and what each says of itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias, Unpack, cast

from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_client import AsyncClient, DraftwoodError, GenerateOptions
from draftwood_client.options import CallOptions
from draftwood_service.gateway.errors import InvalidRequestError, UnknownModelError, body_of
from draftwood_service.gateway.http import note
from draftwood_service.gateway.reading import ParsedRequest

INFO_SECONDS = 10.0
"""For a service to say what it serves."""
_LIST_SECONDS = 2.0
"""The same, or whether it serves, where others are waited for as well."""
_STARTING = "the service does not serve requests now: it loads its model, stops or starts its engine again"
_credential: ContextVar[str] = ContextVar("credential")


class ServiceClient(AsyncClient):
    """A client that also asks for the service's health."""

    async def is_serving(self, **call: Unpack[CallOptions]) -> bool:
        """Whether requests are served. Raises `StatusError`."""
        check = health_pb2_grpc.HealthStub(self._calls.channel).Check
        answer = await self._calls.ask(check, health_pb2.HealthCheckRequest(), call)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


OpenClient: TypeAlias = Callable[[Callable[[], str] | None], ServiceClient]
"""Makes a client of a service; with the argument, one that sends this credential."""


class Service:
    """A service.

    Attributes:
        model: by which requests name it; "" for one that is alone and names its model itself.
    """

    def __init__(self, model: str, open_client: OpenClient) -> None:
        self.model = model
        self._anonymous = open_client(None)
        self._with_key = open_client(_credential.get)

    def client(self, key: str) -> ServiceClient:
        """The client that calls with a request's key; "" for none."""
        if not key:
            return self._anonymous
        _credential.set(key)
        return self._with_key

    def named(self, parsed: ParsedRequest) -> ParsedRequest:
        """The request as the service takes it, which knows its model by a name of its own."""
        if not self.model:
            return parsed
        options = {name: value for name, value in parsed.options.items() if name != "model"}
        return replace(parsed, model=self.model, options=cast(GenerateOptions, options))

    async def entry(self, key: str, seconds: float = INFO_SECONDS) -> dict[str, Any]:
        """Its model in OpenAI's form. Raises StatusError."""
        info = await self.client(key).model_info(timeout=seconds)
        return {
            "id": self.model or info.model,
            "object": "model",
            "created": 0,
            "owned_by": "draftwood",
            "max_model_len": info.max_context_tokens,
            "draftwood": {"strategies": list(info.strategies), "default_strategy": info.default_strategy},
        }

    async def problem(self) -> str:
        """Why it serves no requests; "" if it does."""
        try:
            return "" if await self._anonymous.is_serving(timeout=_LIST_SECONDS) else _STARTING
        except DraftwoodError as error:
            note(error)
            return str(body_of(error)["error"]["message"])

    async def close(self) -> None:
        await asyncio.gather(self._anonymous.close(), self._with_key.close())


class Services:
    """All of a gateway, each for one model.

    Args:
        servers: see `Gateway`.
    """

    def __init__(self, servers: Mapping[str, OpenClient]) -> None:
        assert servers
        assert len(servers) == 1 or all(servers)
        self._by_model = {model: Service(model, open_client) for model, open_client in servers.items()}

    def __iter__(self) -> Iterator[Service]:
        return iter(self._by_model.values())

    def of(self, model: object) -> Service:
        """The service of a request that names a model, or none. Raises InvalidRequestError, UnknownModelError."""
        if not model or [*self._by_model] == [""]:
            return next(iter(self))
        if not isinstance(model, str):
            raise InvalidRequestError("model", "must be a text")
        if model not in self._by_model:
            raise UnknownModelError(model, self._by_model)
        return self._by_model[model]

    async def entries(self, key: str) -> list[dict[str, Any]]:
        """The models of all services that answer the caller. Raises the first one's error if none does."""
        seconds = _LIST_SECONDS if len(self._by_model) > 1 else INFO_SECONDS
        answers = await asyncio.gather(*(one.entry(key, seconds) for one in self), return_exceptions=True)
        entries, errors = [], []
        for answer in answers:
            if isinstance(answer, DraftwoodError):
                errors.append(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                entries.append(answer)
        if not entries:
            raise errors[0]
        for error in errors:
            note(error)
        return entries

    async def require_caller(self, key: str) -> None:
        """Raises StatusError, the first service's, if no service answers a caller with this key."""
        asked = [asyncio.ensure_future(one.client(key).model_info(timeout=INFO_SECONDS)) for one in self]
        try:
            for answer in asyncio.as_completed(asked):
                try:
                    await answer
                except DraftwoodError:
                    continue
                return
            asked[0].result()
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            del asked  # an error would hold itself by them and its traceback

    async def problems(self) -> dict[str, str]:
        """By model, why its service serves no requests; "" if it does."""
        return dict(zip(self._by_model, await asyncio.gather(*(one.problem() for one in self)), strict=True))

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self))
