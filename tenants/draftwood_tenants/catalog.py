"""All configured tenants and experiments, from the file and the store, in RAM.

Built for 100,000 small tenants. What the file names hides a stored resource of the same name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood_errors import InvalidValueError
from draftwood_tenants.config import LearningConfig, LearningScope, TenantConfig
from draftwood_tenants.experiments.definition import ExperimentConfig
from draftwood_tenants.file import FileContent
from draftwood_tenants.followed_file import FollowedFile
from draftwood_tenants.reading import STATES, ServerLimits, read_experiment, read_tenant
from draftwood_tenants.resources.follower import ResourceFollower
from draftwood_tenants.resources.store import EXPERIMENTS, STOPS, TENANTS, ConfigurationUnknownError, Resource, Write

_log = logging.getLogger(__name__)
_DEFAULT = TenantConfig()
_UNREAD = TenantConfig(learning=LearningConfig(scope=LearningScope.NOTHING))
"""Of a tenant without configuration, until the store was read once: it may have one by now."""
_MAY_LACK = frozenset(("drafting", "sampling", "weight", "description"))
"""Parts of a tenant that bound nothing: without them the server's settings hold."""
_MAX_READ = 200_000

MessageT = TypeVar("MessageT", bound=Message)


class Catalog:
    """Tenants and experiments. Answers at once, with what is known, to any thread: it looks at one resource, or copies
    the list of them, while another thread follows the store.

    Args:
        file: None without one.
    """

    def __init__(self, stored: ResourceFollower, file: FollowedFile[FileContent] | None, limits: ServerLimits) -> None:
        self._stored = stored
        self._file = file
        self._tenants = _ParsedConfigs(lambda resource: _lenient(resource, limits), keeps=True)
        self._stops = _ParsedConfigs(lambda resource: experiments_pb2.Experiment.FromString(resource.value))
        self._experiments = _ParsedConfigs(
            lambda resource: read_experiment(message_of(resource, experiments_pb2.Experiment), limits)
        )

    @property
    def file(self) -> FileContent:
        """What the file defines."""
        return FileContent() if self._file is None else self._file.value

    @property
    def version(self) -> object:
        """Compares equal while nothing has changed."""
        return self._stored.revision, self.file

    def config_of(self, tenant: str) -> TenantConfig:
        """The configuration of a tenant; the default one if it has none.

        Raises:
            ConfigurationUnknownError: it may have one that was never read here.
        """
        resource = self.file.tenants.get(tenant) or self._stored.of_kind(TENANTS).get(tenant)
        if resource is None:
            if self._stored.is_unknown(TENANTS, tenant):
                raise ConfigurationUnknownError(tenant)
            return _DEFAULT if self._stored.read else _UNREAD
        config: TenantConfig | None = self._tenants.of(resource)
        if config is None:
            raise ConfigurationUnknownError(tenant)
        return config

    def experiments(self) -> Iterator[ExperimentConfig]:
        """All experiments, those of the file first."""
        in_file, stored = self.file.experiments, [*self._stored.of_kind(EXPERIMENTS).items()]
        resources = chain(in_file.values(), (resource for name, resource in stored if name not in in_file))
        for resource in resources:
            config: ExperimentConfig | None = self._experiments.of(resource)
            if config is not None:
                yield self._with_stops(config)

    def tenant_message(self, tenant: str) -> tenants_pb2.Tenant | None:
        """With etag and origin."""
        resource = self.file.tenants.get(tenant) or self._stored.of_kind(TENANTS).get(tenant)
        return None if resource is None else message_of(resource, tenants_pb2.Tenant)

    def experiment_message(self, name: str) -> experiments_pb2.Experiment | None:
        """As `tenant_message`."""
        resource = self.file.experiments.get(name) or self._stored.of_kind(EXPERIMENTS).get(name)
        if resource is None:
            return None
        message = message_of(resource, experiments_pb2.Experiment)
        config = self._experiments.of(resource) if name in self.file.experiments else None
        if config is not None and (stop := self._stop_of(config)) is not None:
            message.stopped_arms.extend(stop.stopped_arms)
            if stop.state:
                message.state = stop.state
                message.end_time.CopyFrom(stop.end_time)
        return message

    def stops_revision(self, name: str) -> int:
        """Of the stop of an experiment of the file; 0 if there is none."""
        resource = self._stored.of_kind(STOPS).get(name)
        return 0 if resource is None else resource.revision

    def _with_stops(self, config: ExperimentConfig) -> ExperimentConfig:
        stop = self._stop_of(config) if config.name in self.file.experiments else None
        if stop is None:
            return config
        stopped = frozenset(arm.arm for arm in stop.stopped_arms)
        return replace(config, stopped=stopped, state=STATES.get(stop.state, config.state))

    def _stop_of(self, config: ExperimentConfig) -> experiments_pb2.Experiment | None:
        """None unless it is of this definition."""
        stop: experiments_pb2.Experiment | None = self._stops.of(self._stored.of_kind(STOPS).get(config.name))
        return stop if stop is not None and stop.salt == config.digest else None

    def names(self, kind: str) -> list[str]:
        """Of all resources of a kind, sorted."""
        in_file: Mapping[str, object] = self.file.tenants if kind == TENANTS else self.file.experiments
        return sorted({*in_file, *self._stored.of_kind(kind)})


class _ParsedConfigs:
    """The configurations of resources, read when they are first asked for.

    Args:
        keeps: a configuration that cannot be read leaves the previous one in use.
    """

    def __init__(self, read: Callable[[Resource], Any], keeps: bool = False) -> None:
        self._read = read
        self._keeps = keeps
        self._parsed: dict[str, tuple[int, Any]] = {}

    def of(self, resource: Resource | None) -> Any:
        """None without a resource, or if it was never read, which is logged once."""
        if resource is None:
            return None
        known = self._parsed.get(resource.name)
        if known is None or known[0] != resource.revision:
            try:
                known = resource.revision, self._read(resource)
            except (InvalidValueError, DecodeError) as error:
                before = known[1] if known is not None and self._keeps else None
                in_use = "none" if before is None else "the last one that was valid"
                text = "a stored resource is not valid here: %s: %s; in use: %s"
                _log.error(text, f"{resource.kind}/{resource.name}", error, in_use)
                known = resource.revision, before
            if len(self._parsed) == _MAX_READ:
                self._parsed.clear()  # most of them are of resources that were deleted
            self._parsed[resource.name] = known
        return known[1]


def message_of(resource: Resource, kind: type[MessageT]) -> MessageT:
    """The message, with its etag."""
    message: Any = kind.FromString(resource.value)
    message.etag = f"{resource.revision:x}"
    return message  # type: ignore[no-any-return]


def write_of(message: tenants_pb2.Tenant | experiments_pb2.Experiment) -> Write:
    """The write of a changed resource over the revision of its etag, without which it is new. Takes off its etag, and
    sets its update time."""
    kind, _, name = message.name.partition("/")
    expected = int(message.etag or "0", 16)
    message.ClearField("etag")
    message.update_time.GetCurrentTime()
    return Write(kind, name, message.SerializeToString(), expected)


def _lenient(resource: Resource, limits: ServerLimits) -> TenantConfig:
    """The configuration without the parts that this server does not allow, such as a strategy that it does not have:
    quotas must not fall with them. A tenant with a wrong `learning` learns nothing.

    Raises:
        InvalidValueError: a part that bounds the tenant is wrong.
        DecodeError: the value is no message.
    """
    message = message_of(resource, tenants_pb2.Tenant)
    while True:
        try:
            return read_tenant(message, limits)
        except InvalidValueError as error:
            part = error.field.partition(".")[0]
            if part not in _MAY_LACK and (part != "learning" or not message.HasField("learning")):
                raise
            _log.error("a part of a stored tenant is not valid here: %s: %s", resource.name, error)
            message.ClearField(part)
            if part == "learning":
                message.learning.scope = tenants_pb2.LEARNING_SCOPE_NOTHING
