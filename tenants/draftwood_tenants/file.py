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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from google.protobuf import json_format
from google.protobuf.message import Message

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_errors import InvalidInputError
from draftwood_tenants.experiments.definition import ExperimentConfig, ExperimentState, StateError, require_no_overlap
from draftwood_tenants.experiments.reading import experiment_of, invalid, read_experiment
from draftwood_tenants.fields import check_fields
from draftwood_tenants.followed_file import of_file
from draftwood_tenants.reading import ServerLimits, read_tenant, tenant_of, under
from draftwood_tenants.resources.base import EXPERIMENTS, TENANTS, Resource

SETTING = "tenants_file"
_OF_THE_SERVICE = ("etag", "create_time", "update_time", "origin", "winner", "stopped_arms")
"""Fields that a file cannot set."""
_SALT_BYTES = 16

MessageT = TypeVar("MessageT", bound=Message)


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
    found = {}
    for name, message in messages.items():
        value = message.SerializeToString(deterministic=True)
        found[name] = Resource(kind, name, value, int(hashlib.sha256(value).hexdigest()[:16], 16))
    return found


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
    found: dict[str, MessageT] = {}
    for index, entry in enumerate(given):
        where = f"{key}[{index}]"
        message = _message(entry, where, kind)
        name = name_of(f"{where}.name", message.name)  # type: ignore[attr-defined]
        if name in found:
            raise InvalidInputError(f"{where}.name", name, "is in the file twice")
        found[name] = message
    return found


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
    found: MessageT = message
    return found


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
