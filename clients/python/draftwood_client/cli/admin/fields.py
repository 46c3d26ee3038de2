"""Fields of messages by path, and values as people write them: `quotas.requestsPerMinute=600`, `burnIn=5m`.

Data is a message in the JSON form of protobuf: mappings with names in camel case. Names in snake case are read too.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any, cast

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from draftwood_client.convert import whole
from draftwood_client.errors import ArgumentValueError

Data = dict[str, Any]
Path = tuple[FieldDescriptor, ...]
"""From the message to a field in it."""

DURATION, STRUCT, TIMESTAMP = (f"google.protobuf.{name}" for name in ("Duration", "Struct", "Timestamp"))
_SECONDS = {"ms": "0.001", "s": "1", "m": "60", "h": "3600", "d": "86400"}
_LISTED = 30
"""Names that an error lists."""


def as_data(message: Message, *, zeros: bool = False) -> Data:
    """The fields that are set; 64-bit numbers and whole ones are integers.

    Args:
        zeros: with the fields that are zero or empty and cannot be unset.
    """
    data: Data = json_format.MessageToDict(message, always_print_fields_with_no_presence=zeros)
    kind = cast(Descriptor, message.DESCRIPTOR)
    return {name: _plain(field_named(kind, name), value) for name, value in data.items()}


def checked(data: object, kind: Descriptor, place: str = "") -> Data:
    """The data with protobuf's names and values: `5m` becomes "300s", `session` EXPERIMENT_UNIT_SESSION. None is unset.

    Raises:
        ArgumentValueError: an unknown field, or a value of a wrong type; names the place.
    """
    if not isinstance(data, Mapping):
        raise ArgumentValueError(place or kind.name, f"must be a mapping of fields, not {_shown(data)}")
    fields: Data = {}
    for name, value in data.items():
        field = field_named(kind, str(name), place)
        where = _join(place, field.json_name)
        if field.json_name in fields:
            raise ArgumentValueError(where, "is given twice")
        if value is not None:
            fields[field.json_name] = _checked_field(field, value, where)
    return fields


def parsed(data: Data, message: Message) -> None:
    """Fills a message with data of `checked`. Raises ArgumentValueError for a number out of its type's range."""
    try:
        json_format.ParseDict(data, message)
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise ArgumentValueError(message.DESCRIPTOR.name, " ".join(str(error).split())) from None


def field_named(kind: Descriptor, name: str, place: str = "", hidden: frozenset[str] = frozenset()) -> FieldDescriptor:
    """The field. Raises ArgumentValueError with the names that there are, without the `hidden` ones."""
    for field in kind.fields:
        if name in (field.name, field.json_name) and field.name not in hidden:
            return field
    names = [field.json_name for field in kind.fields if field.name not in hidden]
    raise ArgumentValueError(_join(place, name), f"there is no such field{_nearest(name, names)}")


def parts_of(field: FieldDescriptor) -> Descriptor | None:
    """The message whose fields masks can name; None if the field is changed as a whole."""
    kind = field.message_type
    return None if field.is_repeated or kind is None or kind.file.name.startswith("google/protobuf/") else kind


def mask_of(path: Path) -> str:
    """As field masks name it."""
    return ".".join(field.name for field in path)


def apply_setting(data: Data, kind: Descriptor, setting: str, hidden: frozenset[str]) -> Path:
    """Carries out `PATH=VALUE` on `data`; `null` clears. Returns the field for the mask.

    Args:
        hidden: fields of the message, in snake case, that cannot be set.

    Raises:
        ArgumentValueError: the setting is wrong.
    """
    path, equals, text = setting.partition("=")
    if not (path and equals):
        raise ArgumentValueError(setting, "must be FIELD=VALUE, such as drafting.strategy=trie; null clears a field")
    names = path.split(".")
    path_fields: list[FieldDescriptor] = []
    inner: Descriptor | None = kind
    while names and inner is not None:
        field = field_named(inner, names.pop(0), _join(*(field.json_name for field in path_fields)), hidden)
        path_fields.append(field)
        hidden = frozenset()
        inner = parts_of(field)
    *above, last = path_fields
    if names and not _is(last, STRUCT):
        what = "a list: set it as a whole, as JSON, or use `edit`" if last.is_repeated else "a single value"
        raise ArgumentValueError(path, f"{'.'.join(field.json_name for field in path_fields)} is {what}")
    node = data
    for field in above:
        node = node.setdefault(field.json_name, {})
    if names:
        node, key, value = node.setdefault(last.json_name, {}), ".".join(names), _json_or_text(text)
    else:
        key, value = last.json_name, _value(last, text, path)
    if text == "null":
        node.pop(key, None)
    else:
        node[key] = value
    return tuple(path_fields)


def changed_paths(before: Data, after: Data, kind: Descriptor, above: Path = ()) -> Iterator[Path]:
    """The smallest fields that a mask can name and that differ between two messages' data."""
    for field in kind.fields:
        old, new = before.get(field.json_name), after.get(field.json_name)
        if old == new:
            continue
        path = (*above, field)
        if (inner := parts_of(field)) is None:
            yield path
        else:
            yield from changed_paths(old or {}, new or {}, inner, path)


def copied(source: Data, target: Data, paths: Sequence[Path]) -> Data:
    """`target` with the fields of these paths as they are in `source`."""
    result: Data = json.loads(json.dumps(target))
    for *above, last in paths:
        old, new = source, result
        for field in above:
            old, new = old.get(field.json_name, {}), new.setdefault(field.json_name, {})
        new.pop(last.json_name, None)
        if last.json_name in old:
            new[last.json_name] = old[last.json_name]
    return result


def seconds(text: object, place: str) -> str:
    """A duration such as "90s", "5m" or "1h30m" in protobuf's form. Raises ArgumentValueError."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text) if isinstance(text, str) else []
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ArgumentValueError(place, f"{_shown(text)} is no duration; write it as 90s, 5m, 1h30m, 500ms or 2d")
    total = sum((Decimal(number) * Decimal(_SECONDS[unit]) for number, unit in parts), Decimal())
    return f"{total.normalize():f}s"


def _checked_field(field: FieldDescriptor, value: object, place: str) -> Any:
    if _is(field, STRUCT):
        if not isinstance(value, Mapping):
            raise ArgumentValueError(place, f"must be a mapping, not {_shown(value)}")
        return {str(name): item for name, item in value.items()}
    if field.is_repeated and not _is_map(field):
        if not isinstance(value, list):
            raise ArgumentValueError(place, f"must be a list, not {_shown(value)}")
        return [_checked_one(field, item, f"{place}[{index}]") for index, item in enumerate(value)]
    return _checked_one(field, value, place)


def _checked_one(field: FieldDescriptor, value: Any, place: str) -> Any:
    kinds = FieldDescriptor
    if _is(field, DURATION):
        return seconds(value, place)
    if _is(field, TIMESTAMP):
        return value.isoformat() if isinstance(value, datetime) else value
    if field.message_type is not None:
        return value if _is_map(field) else checked(value, field.message_type, place)
    if field.enum_type is not None:
        return _enum(field.enum_type, value, place)
    wanted: tuple[str, tuple[type, ...]] = ("a number", (int, float))
    if field.cpp_type in (kinds.CPPTYPE_INT32, kinds.CPPTYPE_INT64, kinds.CPPTYPE_UINT32, kinds.CPPTYPE_UINT64):
        wanted = "a whole number", (int,)
        value = int(value) if isinstance(value, float) and value.is_integer() else value
    elif field.cpp_type == kinds.CPPTYPE_BOOL:
        wanted = "true or false", (bool,)
    elif field.cpp_type == kinds.CPPTYPE_STRING:
        wanted = "a text", (str,)
    if not isinstance(value, wanted[1]) or (isinstance(value, bool) and bool not in wanted[1]):
        raise ArgumentValueError(place, f"must be {wanted[0]}, not {_shown(value)}")
    return value


def _enum(kind: EnumDescriptor, value: object, place: str) -> str:
    """The name of a value, which may be given without its prefix and in small letters."""
    names = [known.name for known in kind.values]
    prefix = names[0].removesuffix("UNSPECIFIED")
    word = str(value).upper().replace("-", "_")
    if full := next((name for name in names[1:] if word in (name, name.removeprefix(prefix))), None):
        return full
    short = [name.removeprefix(prefix).lower() for name in names[1:]]
    raise ArgumentValueError(place, f"{_shown(value)} is unknown{_nearest(str(value).lower(), short)}")


def _value(field: FieldDescriptor, text: str, place: str) -> Any:
    """A value on the command line, as `_checked_field` returns it."""
    if text == "null":
        return None
    if field.is_repeated:
        given = json.loads(text) if text.startswith("[") and _is_json(text) else [one for one in text.split(",") if one]
        return _checked_field(field, given, place)
    as_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING or field.enum_type or _is(field, DURATION)
    return _checked_field(field, text if as_text else _json_or_text(text), place)


def _plain(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(field, item) for item in value]
    kind = field.message_type
    if isinstance(value, dict) and kind is not None and not _is(field, STRUCT) and not _is_map(field):
        return {name: _plain(field_named(kind, name), item) for name, item in value.items()}
    if isinstance(value, str) and field.cpp_type in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
        return int(value)
    return whole(value)


def _is(field: FieldDescriptor, name: str) -> bool:
    return field.message_type is not None and field.message_type.full_name == name


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _json_or_text(text: str) -> Any:
    return json.loads(text) if _is_json(text) else text


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    asked = f"; did you mean {close[0]}?" if close else ""
    listed = ", ".join(names[:_LISTED])
    return f"{asked} ({listed})" if asked else f"; there are: {listed}"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
