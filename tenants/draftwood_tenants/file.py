"""The file of tenants and experiments: YAML, each entry in the JSON form of its message.

tenants:
- name: tenants/acme
  drafting: {strategy: trie, options: {branch_length: 8}}
experiments:
- name: experiments/trie
  state: EXPERIMENT_STATE_RUNNING
  startTime: 2026-11-22T12:00:00Z
  arms: [{id: control}, {id: trie, drafting: {strategy: trie}}]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from google.protobuf import json_format
from google.protobuf.message import Message

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_errors import InvalidInputError
from draftwood_tenants.experiments.definition import ExperimentConfig, ExperimentState, StateError, require_no_overlap
from draftwood_tenants.followed_file import of_file
from draftwood_tenants.reading import (
    ServerLimits,
    experiment_of,
    invalid,
    read_experiment,
    read_tenant,
    tenant_of,
    under,
)
from draftwood_tenants.resources.store import EXPERIMENTS, TENANTS, Resource

SETTING = "tenants_file"
_OF_THE_SERVICE = ("etag", "create_time", "update_time", "origin", "winner", "stopped_arms")
"""Fields that a file cannot set."""
_SALT_BYTES = 16

MessageT = TypeVar("MessageT", bound=Message)
_WANTED: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64"), ("a whole number", (int,))),
    **dict.fromkeys(("float", "double"), ("a number", (int, float))),
    "bool": ("true or false", (bool,)),
    "string": ("a text", (str,)),
}
"""By the name of a field's type; what these lack is left to protobuf's parser."""


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a file defines, by tenant and by the experiment's id, in the form in which a store has it.

    Messages have their origin; a revision is a hash of its message.
    """

    tenants: Mapping[str, Resource] = field(default_factory=dict)
    experiments: Mapping[str, Resource] = field(default_factory=dict)


def read_file(path: Path, limits: ServerLimits) -> FileContent:
    """The content of a file. Raises InvalidInputError, which names file and field, such as "tenants[2].weight"."""
    with of_file(SETTING, path):
        try:
            return read_content(path.read_bytes(), limits)
        except OSError as error:
            raise InvalidInputError(SETTING, None, f"cannot be read: {error.strerror}") from None


def read_content(content: bytes, limits: ServerLimits) -> FileContent:
    """As `read_file`."""
    try:
        loaded = yaml.load(content, _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(SETTING, None, f"not valid YAML: {' '.join(str(error).split())}") from None
    loaded = {} if loaded is None else loaded
    if not isinstance(loaded, dict) or loaded.keys() - {"tenants", "experiments"}:
        raise InvalidInputError(SETTING, None, "must be a mapping with the keys tenants and experiments")
    tenants = _entries(loaded.get("tenants"), "tenants", tenants_pb2.Tenant, tenant_of)
    experiments = _entries(loaded.get("experiments"), "experiments", experiments_pb2.Experiment, experiment_of)
    for name, experiment in experiments.items():
        experiment.salt = experiment.salt or salt_of(name)
    for index, tenant in enumerate(tenants.values()):
        with under(f"tenants[{index}]"):
            read_tenant(tenant, limits)
    _require_consistent([*experiments.values()], limits)
    return FileContent(_resources(TENANTS, tenants), _resources(EXPERIMENTS, experiments))


def salt_of(name: str) -> str:
    """The salt of a file's experiment unless it is given: the same on all servers."""
    return hashlib.sha256(b"draftwood experiment\x00" + name.encode()).hexdigest()[: 2 * _SALT_BYTES]


def _resources(kind: str, messages: Mapping[str, Message]) -> dict[str, Resource]:
    resources = {}
    for name, message in messages.items():
        value = message.SerializeToString(deterministic=True)
        resources[name] = Resource(kind, name, value, int(hashlib.sha256(value).hexdigest()[:16], 16))
    return resources


class _Loader(yaml.SafeLoader):
    """Times stay text, as the JSON form has them; without aliases, which can make a small file large."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed")
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _entries(given: object, key: str, kind: type[MessageT], name_of: Callable[[str, str], str]) -> dict[str, MessageT]:
    if given is None:
        return {}
    if not isinstance(given, list):
        raise InvalidInputError(key, None, "must be a list")
    entries: dict[str, MessageT] = {}
    for index, entry in enumerate(given):
        where = f"{key}[{index}]"
        message = _message(entry, where, kind)
        name = name_of(f"{where}.name", message.name)  # type: ignore[attr-defined]
        if name in entries:
            raise InvalidInputError(f"{where}.name", name, "is in the file twice")
        entries[name] = message
    return entries


def _message(entry: object, where: str, kind: type[MessageT]) -> MessageT:
    if not isinstance(entry, dict):
        raise InvalidInputError(where, None, "must be a mapping")
    message: Any = kind()
    check_fields(entry, message.DESCRIPTOR, where)
    try:
        json_format.ParseDict(entry, message)
    except (json_format.ParseError, ValueError, TypeError, RecursionError) as error:
        raise InvalidInputError(where, None, str(error)) from None
    for set_field, _ in message.ListFields():
        if set_field.name in _OF_THE_SERVICE:
            raise InvalidInputError(f"{where}.{set_field.name}", None, "cannot be set in a file")
    message.origin = tenants_pb2.RESOURCE_ORIGIN_FILE
    parsed: MessageT = message
    return parsed


def _require_consistent(experiments: Iterable[experiments_pb2.Experiment], limits: ServerLimits) -> None:
    """Raises InvalidValueError if one is wrong, or two running ones have a tenant in common."""
    running: list[ExperimentConfig] = []
    for index, message in enumerate(experiments):
        with under(f"experiments[{index}]"):
            experiment = read_experiment(message, limits)
            if experiment.state is not ExperimentState.RUNNING:
                continue
            try:
                require_no_overlap(experiment, running)
            except StateError as error:
                raise invalid(error) from None
            if experiment.burn_in and experiment.started_at is None:
                raise InvalidInputError("startTime", None, "a running one with a burnIn needs it")
        running.append(experiment)


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
            for index, item in enumerate(value):
                _check_value(item, field, f"{where}[{index}]")
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
        names = [option.name for option in field.enum_type.values]
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
