"""Messages of the protocol to plain dataclasses with fields of the same names, and back.

A duration is a number of seconds, a time a `datetime` in UTC, an enum the name of its value in small letters without
its prefix, a repeated field a tuple, a map or struct a dict. A field that is not set is None where the dataclass
allows it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from draftwood_client.errors import ArgumentValueError

_Kind = TypeVar("_Kind")
_Message = TypeVar("_Message", bound=Message)


def from_message(kind: type[_Kind], message: Message, **values: Any) -> _Kind:
    """A dataclass of this kind; fields in `values` are taken from there."""
    descriptor = cast(Descriptor, message.DESCRIPTOR)
    for name, (plain, optional) in _hints(cast(Any, kind)).items():
        if name not in values:
            field = descriptor.fields_by_name[name]
            unset = optional and field.has_presence and not message.HasField(name)
            values[name] = None if unset else _plain(field, getattr(message, name), plain)
    return kind(**values)


def to_message(value: Any, make: Callable[[], _Message]) -> _Message:
    """The message of a dataclass.

    Raises:
        ArgumentValueError: a field has a value that its type in the protocol does not allow.
    """
    message = make()
    descriptor = cast(Descriptor, message.DESCRIPTOR)
    for part in fields(value):
        given = getattr(value, part.name)
        try:
            if given is not None:
                _set(message, descriptor.fields_by_name[part.name], given)
        except ArgumentValueError as error:
            raise ArgumentValueError(f"{part.name}.{error.argument}", error.args[1]) from None
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise ArgumentValueError(part.name, f"{given!r} is not allowed: {error}") from None
    return message


@cache
def _hints(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """For each field the dataclass in its type, if there is one, and whether it may be None."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        inner = (hint, *get_args(hint))
        plain = next((one for one in inner if is_dataclass(one)), None)
        found[name] = plain, type(None) in inner
    return found


def _plain(field: FieldDescriptor, value: Any, plain: Any) -> Any:
    if not field.is_repeated:
        return _plain_one(field, value, plain)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        inner = field.message_type.fields_by_name["value"]
        return {key: _plain_one(inner, one, plain) for key, one in sorted(value.items())}
    return tuple(_plain_one(field, one, plain) for one in value)


def _plain_one(field: FieldDescriptor, value: Any, plain: Any) -> Any:
    if isinstance(value, Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, Timestamp):
        return value.ToDatetime(UTC)
    if isinstance(value, Struct):
        return whole(json_format.MessageToDict(value))
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return _shortest(value)
    return value if plain is None else from_message(plain, value)


def _shortest(value: float) -> float:
    """The number with the fewest digits that is the same in 32 bits: 0.1, and not 0.10000000149."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 9))
    return next((one for one in shorter if struct.pack("f", one) == struct.pack("f", value)), value)


def whole(value: Any) -> Any:
    """JSON with integers for whole numbers, which a struct keeps as floats."""
    if isinstance(value, list):
        return [whole(one) for one in value]
    if isinstance(value, dict):
        return {name: whole(one) for name, one in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _word(kind: EnumDescriptor, number: int) -> str:
    """ "" for UNSPECIFIED; the number of a value that this client does not know."""
    known = kind.values_by_number.get(number)
    return str(number) if known is None else known.name.removeprefix(_prefix(kind)).lower() if number else ""


def _prefix(kind: EnumDescriptor) -> str:
    return kind.values[0].name.removesuffix("UNSPECIFIED")


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    target = getattr(message, field.name)
    if field.is_repeated and isinstance(value, Mapping):
        target.update(value)
    elif field.is_repeated:
        for one in value:
            target.append(to_message(one, GetMessageClass(field.message_type)) if is_dataclass(one) else one)
    elif isinstance(target, Duration):
        target.FromNanoseconds(round(value * 1e9))
        target.SetInParent()
    elif isinstance(target, Timestamp):
        target.FromDatetime(cast(datetime, value))
    elif isinstance(target, Struct):
        target.update(value)
        target.SetInParent()
    elif is_dataclass(value):
        target.CopyFrom(to_message(value, type(target)))
        target.SetInParent()
    else:
        setattr(message, field.name, _number(field.enum_type, value) if field.enum_type is not None else value)


def _number(kind: EnumDescriptor, word: str) -> int:
    """Raises ValueError for a word that is none of the enum's."""
    numbers = {_word(kind, one.number): one.number for one in kind.values}
    if word not in numbers and not word.isdecimal():
        raise ValueError(f"it must be one of {', '.join(repr(name) for name in numbers if name)}")
    return numbers[word] if word in numbers else int(word)
