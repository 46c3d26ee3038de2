"""Checks the protocol against the rules of Google's API guidelines (AIPs) that buf does not know; `make check` runs it.

Run as `python -m tools.protocol_rules`. Prints one line for each element that breaks a rule.

AIP-127, HTTP annotations, does not apply: the service speaks gRPC, and the gateway OpenAI's API.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[1]
DOMAIN = "draftwood.dev"
_RESOURCE, _BEHAVIOR, _REFERENCE = 1053, 1052, 1055
"""Field numbers of Google's annotations in the options of messages and fields."""
_REQUIRED, _OUTPUT_ONLY, _IDENTIFIER = 2, 3, 8
_TIME, _DURATION = ".google.protobuf.Timestamp", ".google.protobuf.Duration"
_OF_SERVER = ("create_time", "update_time")
_Field = FieldDescriptorProto


@dataclass(frozen=True, slots=True)
class Resource:
    """The annotation of a message (AIP-123)."""

    type: str
    patterns: list[str]
    plural: str
    singular: str


def violations(files: Iterable[FileDescriptorProto]) -> list[str]:
    """One line for each: where, the rule, and what it asks for."""
    files = list(files)
    messages = {f".{file.package}.{one.name}": one for file in files for one in file.message_type}
    found = [line for name, message in messages.items() for line in _of_message(name[1:], message)]
    for file in files:
        for service in file.service:
            for method in service.method:
                where = f"{file.package}.{service.name}.{method.name}"
                found += [f"{where}: {problem}" for problem in _of_method(method, messages)]
    return found


def _of_message(where: str, message: DescriptorProto) -> Iterator[str]:
    for field in message.field:
        place = f"{where}.{field.name}"
        if field.type == _Field.TYPE_FLOAT:
            yield f"{place}: must be double, which needs no rounding"
        if (field.type_name == _TIME) != field.name.endswith("_time"):
            yield f"{place}: AIP-142: a Timestamp, and nothing else, has a name that ends with _time"
        if field.type_name == _DURATION and field.name.endswith(("_seconds", "_ms")):
            yield f"{place}: AIP-142: a Duration has no unit in its name"
        if field.name == "etag" and field.type != _Field.TYPE_STRING:
            yield f"{place}: AIP-154: must be a string"
    resource = _resource(message)
    if resource is None:
        return
    if resource.type != f"{DOMAIN}/{message.name}":
        yield f"{where}: AIP-123: the type must be {DOMAIN}/{message.name}, not {resource.type}"
    if resource.patterns != [f"{resource.plural}/{{{resource.singular}}}"] or not resource.plural:
        yield f"{where}: AIP-122: the pattern must be the plural, and the singular in braces"
    first = message.field[0]
    if (first.name, first.type) != ("name", _Field.TYPE_STRING) or _IDENTIFIER not in _numbers(first, _BEHAVIOR):
        yield f"{where}: AIP-122: the first field must be the string name, with the behavior IDENTIFIER"
    for field in message.field:
        if field.name in _OF_SERVER and _OUTPUT_ONLY not in _numbers(field, _BEHAVIOR):
            yield f"{where}.{field.name}: AIP-148: must have the behavior OUTPUT_ONLY"


def _of_method(method: MethodDescriptorProto, messages: dict[str, DescriptorProto]) -> Iterator[str]:
    request, response = messages[method.input_type], messages.get(method.output_type)
    fields = {field.name: field for field in request.field}
    pages = [field.name for field in request.field if field.name in ("page_size", "page_token")]
    if pages or method.name.startswith("List"):
        yield from _of_pages(fields, response)
    resource = _resource(response) if response is not None else None
    verb = next((verb for verb in ("Get", "Create", "Update", "Delete") if method.name.startswith(verb)), "")
    noun = method.name.removeprefix(verb)
    if resource is not None and verb in ("Create", "Update"):
        singular = resource.singular
        if not _is(fields.get(singular), _REQUIRED, message=method.output_type):
            yield f"AIP-133, 134: the request must have the required resource {singular}"
        if verb == "Create" and not _is(fields.get(f"{singular}_id"), _REQUIRED):
            yield f"AIP-133: the request must have the required {singular}_id"
        if verb == "Update" and not _is(fields.get("update_mask"), message=".google.protobuf.FieldMask"):
            yield "AIP-134: the request must have an update_mask"
    elif "name" in fields:
        name = fields["name"]
        references = _options(name.options.SerializeToString(), _REFERENCE)
        types = {kind.decode() for reference in references for kind in _options(reference, 1)}
        known = {one.type for message in messages.values() if (one := _resource(message)) is not None}
        if not _is(name, _REQUIRED) or not types or not types <= known:
            yield "AIP-131, 135, 136: name must be required, with the type of the resource"
    elif resource is not None and f"{DOMAIN}/{noun}" == resource.type:
        yield "AIP-131: the request must have the name of the resource"


def _of_pages(fields: dict[str, FieldDescriptorProto], response: DescriptorProto | None) -> Iterator[str]:
    size, token = fields.get("page_size"), fields.get("page_token")
    if size is None or size.type != _Field.TYPE_INT32 or token is None or token.type != _Field.TYPE_STRING:
        yield "AIP-158: the request must have the int32 page_size and the string page_token"
    answered = [] if response is None else [field.name for field in response.field]
    if "next_page_token" not in answered:
        yield "AIP-158: the response must have next_page_token"
    elif response is not None and response.field[0].label != _Field.LABEL_REPEATED:
        yield "AIP-158: the first field of the response must be the items"


def _is(field: FieldDescriptorProto | None, *behaviors: int, message: str = "") -> bool:
    """Whether a field is there, with these behaviors, and of the type of a message."""
    if field is None or (message and field.type_name != message):
        return False
    return {*behaviors} <= {*_numbers(field, _BEHAVIOR)}


def _resource(message: DescriptorProto) -> Resource | None:
    found = _options(message.options.SerializeToString(), _RESOURCE)
    if not found:
        return None
    texts = {number: [value.decode() for value in _options(found[0], number)] for number in (1, 2, 5, 6)}
    single = {number: (texts[number] or [""])[0] for number in (1, 5, 6)}
    return Resource(single[1], texts[2], single[5], single[6])


def _numbers(field: FieldDescriptorProto, option: int) -> list[int]:
    return [number for value in _options(field.options.SerializeToString(), option) for number in value]


def _options(data: bytes, wanted: int) -> list[bytes]:
    """The values of a field in a serialized message: numbers below 128 as one byte."""
    found, at = [], 0
    while at < len(data):
        tag, at = _varint(data, at)
        value, at = _varint(data, at)
        content = bytes([value & 127])
        if tag & 7 == 2:
            content, at = data[at : at + value], at + value
        if tag >> 3 == wanted:
            found.append(content)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def built() -> list[FileDescriptorProto]:
    """The protocol's files. Raises CalledProcessError if it does not compile."""
    buf = [str(Path(sys.executable).with_name("buf")), "build", "--as-file-descriptor-set", "--output", "-"]
    done = subprocess.run(buf, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return [one for one in FileDescriptorSet.FromString(done.stdout).file if one.package.startswith("draftwood.")]


if __name__ == "__main__":
    problems = violations(built())
    print("\n".join(problems) or "protocol: no AIP rule is broken")
    sys.exit(bool(problems))
