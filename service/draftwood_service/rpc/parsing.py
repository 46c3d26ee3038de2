"""Parses requests, whose fields are counted before: a message of 2 MiB can hold a million empty ones.

Parsing makes an object of each: 4 MiB would take 0.3 s, in which all other calls wait. The count is compiled, and reads
300 MB a second; so a server that still loads imports nothing of this.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message

from draftwood_model_runner.errors import InvalidInputError

MAX_FIELDS = 100_000
"""Fields of a request, those of its messages included. Packed numbers are one."""
_DEPTH = 32
"""Nested messages that are looked into; none of ours has as many."""


class Parser:
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
        except DecodeError as error:  # gRPC itself would answer INTERNAL
            reason = str(error).rpartition(": ")[2]
            problem = f"not a serialized {self._type.DESCRIPTOR.full_name}: {reason}"
            raise InvalidInputError("request", None, problem) from None


class FieldCounter:
    """Counts the fields of messages of one type, those of the messages in them included.

    Args:
        descriptor: of the type, a protobuf `Descriptor`.
    """

    def __init__(self, descriptor: Any) -> None:
        types = _types_within(descriptor)
        highest = max((number for kind in types for number in kind.fields_by_number), default=0)
        self._children = np.full((len(types), highest + 1), -1, np.int32)
        for index, kind in enumerate(types):
            for number, field in kind.fields_by_number.items():
                if field.message_type is not None:
                    self._children[index, number] = types.index(field.message_type)

    def __call__(self, data: bytes, limit: int) -> int:
        """How many fields there are, at most `limit` + 1; those before the first broken byte if it is no message."""
        return int(_count(np.frombuffer(data, np.uint8), self._children, limit))


def compile_counter() -> None:
    """Takes half a second, and many more where no compiled code is kept; otherwise the first call does it."""
    FieldCounter(Empty.DESCRIPTOR)(b"\0", 1)


def _types_within(descriptor: Any) -> list[Any]:
    """The type and all that its messages can contain."""
    types: list[Any] = [descriptor]
    for kind in types:  # grows on the way
        for field in kind.fields:
            if field.message_type is not None and field.message_type not in types:
                types.append(field.message_type)
    return types


@numba.njit(cache=True, nogil=True)
def _count(data: npt.NDArray[np.uint8], children: npt.NDArray[np.int32], limit: int) -> int:
    kinds, ends = np.zeros(_DEPTH, np.int32), np.zeros(_DEPTH, np.int64)
    ends[0] = data.shape[0]
    depth, at, count = 0, 0, 0
    while count <= limit:
        while depth >= 0 and at >= ends[depth]:
            depth -= 1
        if depth < 0:
            break
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        count += 1
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 1:
            at += 8
        elif wire == 5:
            at += 4
        elif wire == 2:
            length, at = _varint(data, at)
            if length < 0 or at + length > ends[depth]:
                break  # broken
            child = children[kinds[depth], number] if 0 <= number < children.shape[1] else -1
            if child >= 0 and depth + 1 < _DEPTH:
                depth += 1
                kinds[depth], ends[depth] = child, at + length
            else:
                at += length
        else:
            break  # broken, or a group, which proto3 does not have
    return count


@numba.njit(cache=True, nogil=True)
def _varint(data: npt.NDArray[np.uint8], at: int) -> tuple[int, int]:
    """The varint at an offset, and the offset behind it."""
    value, shift = 0, 0
    while at < data.shape[0] and shift < 64:
        byte = int(data[at])
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            break
    return value, at
