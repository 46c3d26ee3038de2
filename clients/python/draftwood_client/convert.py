"""Plain values of messages: for JSON and tables, and where Python has a better type than the protocol."""

from __future__ import annotations

from datetime import UTC
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp


def plain(message: Message) -> dict[str, Any]:
    """All fields by name.

    A duration is a number of seconds, a time a `datetime` in UTC, an enum the name of its value in small letters
    without its prefix, a message or map a dict. A field that is not set is None if it can tell.
    """
    return {name: value_of(message, name) for name in cast(Descriptor, message.DESCRIPTOR).fields_by_name}


def value_of(message: Message, name: str) -> Any:
    """A field as in `plain`; None if it is not set."""
    field = cast(Descriptor, message.DESCRIPTOR).fields_by_name[name]
    if field.has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    if not field.is_repeated:
        return _plain(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _plain(inner, item) for key, item in sorted(value.items())}
    return [_plain(field, item) for item in value]


def seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def word(message: Message, name: str) -> str:
    """The value of an enum as in `plain`: "" for UNSPECIFIED, its number if this client does not know it."""
    return str(value_of(message, name))


def whole(value: Any) -> Any:
    """JSON with integers for whole numbers, which a struct keeps as floats."""
    if isinstance(value, list):
        return [whole(item) for item in value]
    if isinstance(value, dict):
        return {name: whole(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Duration):
        return seconds(value)
    if isinstance(value, Timestamp):
        return value.ToDatetime(UTC)
    if isinstance(value, Struct):
        return whole(json_format.MessageToDict(value))
    if isinstance(value, Message):
        return plain(value)
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    return value


def _word(kind: EnumDescriptor, number: int) -> str:
    known = kind.values_by_number.get(number)
    prefix = kind.values[0].name.removesuffix("UNSPECIFIED")
    return str(number) if known is None else known.name.removeprefix(prefix).lower() if number else ""
