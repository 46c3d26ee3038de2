"""Resources as YAML: files that people write, and what the commands print of a resource and of a change."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import typer
import yaml
from google.protobuf.descriptor import Descriptor

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_client.admin import AdminClient
from draftwood_client.cli.admin.fields import Data, as_data, checked, parsed
from draftwood_client.errors import ArgumentValueError

Resource: TypeAlias = experiments_pb2.Experiment | tenants_pb2.Tenant
_OF_THE_SERVER = frozenset({"create_time", "update_time", "origin"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of resource.

    Attributes:
        noun: "tenant" or "experiment"; the plural is the key of a list of them in a file.
        message: its class.
        output_only: further fields that cannot be set.
    """

    noun: str
    message: type[Resource]
    output_only: frozenset[str] = frozenset()

    @property
    def descriptor(self) -> Descriptor:
        return cast(Descriptor, self.message.DESCRIPTOR)

    @property
    def plural(self) -> str:
        return self.noun + "s"

    @property
    def prefix(self) -> str:
        return self.plural + "/"

    @property
    def hidden(self) -> frozenset[str]:
        """Fields, in snake case, that are no part of the definition."""
        return self.output_only | _OF_THE_SERVER | {"name", "etag"}

    @property
    def fixed(self) -> frozenset[str]:
        """The `hidden` fields in camel case."""
        return frozenset(field.json_name for field in self.descriptor.fields if field.name in self.hidden)

    def of(self, client: AdminClient) -> Any:
        """The calls for this kind: `Tenants` or `Experiments`."""
        return getattr(client, self.plural)

    def definition(self, resource: Resource) -> Data:
        """The fields that can be set."""
        return {name: value for name, value in as_data(resource).items() if name not in self.fixed}

    def resource(self, definition: Data, name: str = "", etag: str = "") -> Resource:
        """Of a definition, which is checked. Raises ArgumentValueError."""
        message = self.message()
        parsed(checked(definition, self.descriptor), message)
        for field in self.hidden:
            message.ClearField(field)
        message.name, message.etag = self.prefix + name if name else "", etag
        return message


class _Loader(yaml.SafeLoader):
    """Times stay text; without aliases, which can make a small file large; each key once."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := next((key for key in keys if keys.count(key) > 1), None):
            raise yaml.YAMLError(f"{twice} is there twice, line {node.start_mark.line + 1} and after")
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def to_yaml(data: Data) -> str:
    """Empty text for no fields."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100) if data else ""


def from_yaml(text: str, place: str) -> Any:
    """None for a document of nothing but comments. Raises ArgumentValueError."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise ArgumentValueError(place, f"is not valid YAML{line}: {problem}") from None


def read_file(file: Path) -> Any:
    """The document in a YAML or JSON file; "-" is stdin. Raises ArgumentValueError."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentValueError("FILE", f"{file} cannot be read: {error}") from None
    return from_yaml(text, str(file))


def entries(document: Any, kind: Kind, file: Path) -> list[tuple[str, Data]]:
    """(place, definition) of the resources in a file: one, or a list of them under the plural, as in a tenants file."""
    if isinstance(document, dict) and kind.plural in document:
        listed = document[kind.plural] or []
        if not isinstance(listed, list):
            raise ArgumentValueError(str(file), f"{kind.plural} must be a list")
        return [(f"{kind.plural}[{index}]", entry) for index, entry in enumerate(listed)]
    if not isinstance(document, dict):
        raise ArgumentValueError(str(file), f"must have the fields of a {kind.noun}, or a list under {kind.plural}:")
    return [("", document)]


def definition_of(entry: Any, kind: Kind, place: str) -> tuple[str, Data]:
    """Id, or "" without one, and definition of an entry. What only the server sets is dropped.

    Raises:
        ArgumentValueError: a field is wrong.
    """
    data = checked(entry, kind.descriptor, place)
    name = data.get("name", "").removeprefix(kind.prefix)
    return name, {key: value for key, value in data.items() if key not in kind.fixed}


def differences(before: Data, after: Data) -> list[str]:
    """A line for each value that differs: `weight: 1 -> 2`; the new values alone if there was nothing before."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    names = [*old, *(name for name in new if name not in old)]
    changed = [name for name in names if old.get(name) != new.get(name)]
    if not before:
        return [f"{name}: {new[name]}" for name in changed]
    return [f"{name}: {old.get(name, 'unset')} -> {new.get(name, 'unset')}" for name in changed]


def print_differences(before: Data, after: Data) -> None:
    """`differences` on stdout; "nothing changes" if there are none."""
    for line in differences(before, after) or ["nothing changes"]:
        typer.echo(f"  {line}")


def print_resource(kind: Kind, resource: Resource) -> None:
    """YAML that `apply -f` takes; what only the server sets is in comments."""
    data = as_data(resource)
    for name, value in data.items():
        if name in kind.fixed and name != "name":
            typer.echo(f"# {name}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    typer.echo(to_yaml({"name": data.get("name", ""), **kind.definition(resource)}), nl=False)


def _leaves(data: Any, place: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(data, dict) and (data or not place):
        for name, value in data.items():
            yield from _leaves(value, f"{place}.{name}" if place else name)
    elif isinstance(data, list) and any(isinstance(item, dict) for item in data):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{place}[{index}]")
    else:
        yield place, data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)


TENANT = Kind("tenant", tenants_pb2.Tenant)
EXPERIMENT = Kind(
    "experiment",
    experiments_pb2.Experiment,
    frozenset({"state", "start_time", "end_time", "salt", "winner", "stopped_arms"}),
)
