"""Parses requests. Imports a compiler, so that a server which still loads does without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.parsing.malformed import Malformed, explain
from draftwood_service.rpc.parsing.wire_size import FieldCounter

MessageT = TypeVar("MessageT", bound=Message)

MAX_FIELDS = 100_000
"""Fields of a request, those of its messages included. Packed numbers are one."""


class Deserializer(Generic[MessageT]):
    """Parses requests of one type; one that is malformed or has too many fields becomes a `Malformed`."""

    def __init__(self, message_type: type[MessageT]) -> None:
        self._parse: Callable[[bytes], MessageT] = message_type.FromString
        self._descriptor: Any = message_type.DESCRIPTOR
        self._count = FieldCounter(message_type.DESCRIPTOR)

    def __call__(self, data: bytes) -> MessageT | Malformed:
        if len(data) > MAX_FIELDS and self._count(data, MAX_FIELDS) > MAX_FIELDS:
            return Malformed(InvalidInputError("request", None, f"has more than {MAX_FIELDS} fields"))
        try:
            return self._parse(data)
        except DecodeError:
            return Malformed(explain(self._descriptor, data))
