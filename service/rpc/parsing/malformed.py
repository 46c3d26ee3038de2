"""Names the field that keeps a request from being parsed. gRPC itself would answer INTERNAL without details."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from model_runner.errors import InvalidInputError
from service.rpc.parsing.wire_size import FieldCounter

MessageT = TypeVar("MessageT", bound=Message)

MAX_FIELDS = 100_000
"""Fields of a request, those of its messages included. Packed numbers are one."""
_EXPLAINED_BYTES = 16 * 1024
"""Larger requests are refused without naming the field: to look for it takes a millisecond for each KiB."""
_LENGTH_DELIMITED = 2


class Malformed:
    """Takes the place of a request that could not be parsed, until a handler can answer with `error`."""

    __slots__ = ("error",)

    def __init__(self, error: InvalidInputError) -> None:
        self.error = error


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


def explain(descriptor: Descriptor, data: bytes) -> InvalidInputError:
    """The error for the first field of serialized `data` that keeps it from being a message of type `descriptor`."""
    found = _fault(descriptor, data, "") if len(data) <= _EXPLAINED_BYTES else None
    problem = f"{len(data)} bytes are not a serialized {descriptor.full_name}"
    return found or InvalidInputError("request", None, problem)


def _fault(descriptor: Descriptor, data: bytes, path: str) -> InvalidInputError | None:
    try:
        # Parsed as a message without fields, everything is an unknown field; only a broken wire format fails.
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        problem = f"{len(data)} bytes are not a serialized {descriptor.full_name}"
        return InvalidInputError(path or "request", None, problem)
    seen: Counter[int] = Counter()
    for unknown in (fields[index] for index in range(len(fields))):
        field = descriptor.fields_by_number.get(unknown.field_number)
        if field is None or unknown.wire_type != _LENGTH_DELIMITED:
            continue
        name = f"{path}.{field.name}" if path else field.name
        if field.is_repeated:
            name += f"[{seen[unknown.field_number]}]"
        seen[unknown.field_number] += 1
        fault = _field_fault(field, unknown.data, name)
        if fault is not None:
            return fault
    return None


def _field_fault(field: FieldDescriptor, data: Any, path: str) -> InvalidInputError | None:
    if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        return _fault(field.message_type, data, path)
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            bytes(data).decode()
        except UnicodeDecodeError as error:
            return InvalidInputError(path, None, f"not valid UTF-8 at byte {error.start}")
    return None
