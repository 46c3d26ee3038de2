"""Checks what a file gives for the fields of a message, in words that say where it is wrong: protobuf's parser names
its own types.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

from draftwood_errors import InvalidInputError

_WANTED: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), ("a whole number", (int,))),
    **dict.fromkeys(("float", "double"), ("a number", (int, float))),
    "bool": ("true or false", (bool,)),
    "string": ("a text", (str,)),
}
"""By the name of a field's type; what these lack is left to protobuf's parser."""


def check_fields(data: Mapping[Any, Any], kind: Any, path: str) -> None:
    """Raises InvalidInputError: a field of this message's descriptor does not exist, or has a value of a wrong type.

    Args:
        path: of the data, such as "tenants[2]".
    """
    fields = {name: field for field in kind.fields for name in (field.name, field.json_name)}
    for name, value in data.items():
        where = f"{path}.{name}"
        field = fields.get(name)
        if field is None:
            near = get_close_matches(str(name), fields, 1)
            meant = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(f.name for f in kind.fields)}"
            raise InvalidInputError(where, None, f"there is no such field{meant}")
        if value is None or _is_free(field):
            continue
        if not field.is_repeated:
            _check_value(value, field, where)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                _check_value(one, field, f"{where}[{index}]")
        else:
            raise InvalidInputError(where, value, "must be a list")


def _is_free(field: Any) -> bool:
    """A map, or a type of protobuf's own with a JSON form of its own."""
    kind = field.message_type
    return kind is not None and (kind.GetOptions().map_entry or kind.file.name.startswith("google/protobuf/"))


def _check_value(value: Any, field: Any, where: str) -> None:
    if field.message_type is not None:
        if not isinstance(value, Mapping):
            raise InvalidInputError(where, value, "must be a mapping")
        check_fields(value, field.message_type, where)
    elif field.enum_type is not None:
        names = [one.name for one in field.enum_type.values]
        if type(value) not in (str, int) or value not in (*names, *field.enum_type.values_by_number):
            raise InvalidInputError(where, value, f"must be one of {', '.join(names[1:])}")
    else:
        _check_scalar(value, field, where)


def _check_scalar(value: Any, field: Any, where: str) -> None:
    names = {getattr(field, f"TYPE_{name.upper()}"): name for name in _WANTED}
    wanted, types = _WANTED.get(names.get(field.type, ""), ("", ()))
    if isinstance(value, float) and value.is_integer() and types == (int,):
        return
    if isinstance(value, str) and bool not in types:
        with suppress(ValueError):  # JSON's form of 64 bits, and "NaN"
            float(value)
            return
    if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
        raise InvalidInputError(where, value, f"must be {wanted}")
