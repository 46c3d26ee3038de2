"""Parses requests. Imports a compiler, so that a server which still loads does without."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError, Message

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.rpc.parsing.malformed import explain
from draftwood_service.rpc.parsing.wire_size import FieldCounter

MAX_FIELDS = 100_000
"""Fields of a request, those of its messages included. Packed numbers are one."""


class Deserializer:
    """Parses requests of one type."""

    def __init__(self, message_type: type[Message]) -> None:
        self._type: Any = message_type
        self._count = FieldCounter(message_type.DESCRIPTOR)

    def __call__(self, data: bytes) -> Any:
        """The message. Raises InvalidInputError if it is malformed or has too many fields."""
        if len(data) > MAX_FIELDS and self._count(data, MAX_FIELDS) > MAX_FIELDS:
            raise InvalidInputError("request", None, f"has more than {MAX_FIELDS} fields")
        try:
            return self._type.FromString(data)
        except DecodeError:
            raise explain(self._type.DESCRIPTOR, data) from None
