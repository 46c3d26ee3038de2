"""Names the field that keeps a request from being parsed. gRPC itself would answer INTERNAL without details."""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from draftwood_model_runner.errors import InvalidInputError

_EXPLAINED_BYTES = 16 * 1024
"""Larger requests are refused without naming the field: to look for it takes a millisecond for each KiB."""
_LENGTH_DELIMITED = 2


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
