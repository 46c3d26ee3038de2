"""Writes the pages of `docs/reference` about the protocol, one for each .proto file.

Run as `python -m tools.protocol_reference`.
All text comes from the comments in `protos/`, read from the descriptors that `buf build` makes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
"""Field numbers in FileDescriptorProto, which begin the path of an element's comment; `_PARTS` follow."""
_PARTS = 2
"""Field number of a message's fields, an enum's values and a service's methods, in each of the three."""
_ONEOFS = 8
"""Field number of a message's oneofs."""
_TYPES = {number: name.removeprefix("TYPE_").lower() for name, number in FieldDescriptorProto.Type.items()}


@dataclass(frozen=True, slots=True)
class Page:
    """One .proto file.

    Attributes:
        comments: by path, as in SourceCodeInfo.
        homes: file name of the page with each message and enum, by full name.
    """

    file: FileDescriptorProto
    comments: Mapping[tuple[int, ...], str]
    homes: Mapping[str, str]

    def text(self) -> str:
        services = [self._service(one, (_SERVICES, at)) for at, one in enumerate(self.file.service)]
        messages = [self._message(one, (_MESSAGES, at)) for at, one in enumerate(self.file.message_type)]
        enums = [self._enum(one, (_ENUMS, at)) for at, one in enumerate(self.file.enum_type)]
        head = f"# {self.file.name}\n\nGenerated from `protos/{self.file.name}`, package `{self.file.package}`."
        return "\n\n".join([head, *services, *messages, *enums]) + "\n"

    def _service(self, service: ServiceDescriptorProto, path: tuple[int, ...]) -> str:
        rows = [
            (
                f"`{method.name}`",
                ("stream of " if method.client_streaming else "") + self._link(method.input_type),
                ("stream of " if method.server_streaming else "") + self._link(method.output_type),
                self._inline((*path, _PARTS, at)),
            )
            for at, method in enumerate(service.method)
        ]
        return self._section(service.name, path, table(("method", "request", "response", ""), rows))

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> str:
        rows, groups = [], set[int]()
        for at, field in enumerate(message.field):
            parts = [self._inline((*path, _PARTS, at))]
            if field.HasField("oneof_index") and not field.proto3_optional:
                name = message.oneof_decl[field.oneof_index].name
                about = self._inline((*path, _ONEOFS, field.oneof_index)) if field.oneof_index not in groups else ""
                parts = [f"One of `{name}`.", about, *parts]
                groups.add(field.oneof_index)
            rows.append((f"`{field.name}`", self._type(field, message), " ".join(filter(None, parts))))
        return self._section(message.name, path, table(("field", "type", ""), rows) if rows else "No fields.")

    def _enum(self, enum: EnumDescriptorProto, path: tuple[int, ...]) -> str:
        rows = [
            (f"`{one.name}`", str(one.number), self._inline((*path, _PARTS, at))) for at, one in enumerate(enum.value)
        ]
        return self._section(enum.name, path, table(("value", "number", ""), rows))

    def _section(self, name: str, path: tuple[int, ...], body: str) -> str:
        return "\n\n".join(filter(None, [f"## {name}", _escaped(self.comments.get(path, "")), body]))

    def _inline(self, path: tuple[int, ...]) -> str:
        return " ".join(_escaped(self.comments.get(path, "")).split()).replace("|", "\\|")

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entry = next(
            (one for one in message.nested_type if f".{one.name}" == field.type_name[-len(one.name) - 1 :]), None
        )
        if entry is not None and entry.options.map_entry:
            key, value = entry.field
            return f"map of {self._one_type(key)} to {self._one_type(value)}"
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {self._one_type(field)}"
        return f"optional {self._one_type(field)}" if field.proto3_optional else self._one_type(field)

    def _one_type(self, field: FieldDescriptorProto) -> str:
        return self._link(field.type_name) if field.type_name else _TYPES[field.type]

    def _link(self, type_name: str) -> str:
        full = type_name.removeprefix(".")
        home, name = self.homes.get(full), full.rpartition(".")[2]
        if home is None:
            return f"`{full}`"
        return f"[{name}]({'' if home == page_name(self.file) else home}#{name.lower()})"


def page_name(file: FileDescriptorProto) -> str:
    return Path(file.name).with_suffix(".md").name


def pages() -> dict[str, str]:
    """The text of each page, by file name. Raises CalledProcessError if the protocol does not compile."""
    buf = [str(Path(sys.executable).with_name("buf")), "build", "--as-file-descriptor-set", "--output", "-"]
    built = subprocess.run(buf, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    files = [one for one in FileDescriptorSet.FromString(built.stdout).file if one.package.startswith("draftwood.")]
    homes = {f"{file.package}.{name}": page_name(file) for file in files for name in _names(file)}
    return {page_name(file): Page(file, _comments(file), homes).text() for file in files}


def _names(file: FileDescriptorProto) -> Iterator[str]:
    yield from (one.name for one in file.message_type)
    yield from (one.name for one in file.enum_type)


def _comments(file: FileDescriptorProto) -> dict[tuple[int, ...], str]:
    found = file.source_code_info.location
    return {
        tuple(one.path): "\n".join(
            line.removeprefix(" ") for line in one.leading_comments.splitlines() if not line.startswith(" buf:lint:")
        )
        for one in found
    }


def _escaped(text: str) -> str:
    return text.strip().replace("<", "&lt;")


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    return "\n".join("| " + " | ".join(row).rstrip() + " |" for row in (heads, ["---"] * len(heads), *rows))


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        PAGES.joinpath(name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
