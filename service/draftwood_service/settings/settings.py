"""All settings together, and what they mean for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from draftwood_model_runner.engine_config import EngineConfig
from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings.engine import ModelSettings, ProcessSettings, SchedulingSettings
from draftwood_service.settings.groups import (
    AuthSettings,
    DraftingSettings,
    ListenSettings,
    QuotaSettings,
    RequestSettings,
    SettingsGroup,
    StoreSettings,
    StreamSettings,
    TelemetrySettings,
)
from draftwood_strategies.built_in import LOADED_BY
from draftwood_strategies.drafting import require_strategy

if TYPE_CHECKING:
    from draftwood_tenants.reading import ServerLimits


_FILES = ("tls_cert", "tls_key", "tls_client_ca", "auth_file", "tenants_file")


class Settings(
    ModelSettings,
    ListenSettings,
    AuthSettings,
    SchedulingSettings,
    RequestSettings,
    StreamSettings,
    QuotaSettings,
    DraftingSettings,
    StoreSettings,
    ProcessSettings,
    TelemetrySettings,
):
    """One consistent, frozen set of settings. Durations are in seconds, sizes in bytes or with a suffix K, M or G."""

    @property
    def engine_config(self) -> EngineConfig:
        """The engine's part. Raises InvalidValueError for a value outside its range."""
        names = {field.name for field in fields(EngineConfig)} & {*type(self).model_fields}
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def tenant_limits(self) -> ServerLimits:
        """What a tenant may be configured with."""
        # Imported here: --help need not wait for it.
        from draftwood_model_runner.request import SamplingParams
        from draftwood_tenants.reading import ServerLimits

        def check_sampling(values: Mapping[str, Any]) -> None:
            SamplingParams(**values)

        memory = self.memory_tokens, self.memory_bytes
        return ServerLimits(self.strategy, self.max_draft_nodes, *memory, self.delta_shaping, check_sampling)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _ = self.engine_config, self.delta_shaping
        self.check_engine()
        self._check_strategy()
        self._check_ports()
        for key in _FILES:
            path: Path | None = getattr(self, key)
            if path is not None and not path.is_file():
                raise InvalidInputError(key, path, "no such file")
        if self.auth != "open" and not (self.has_credentials or self.is_local):
            problem = (
                "is not a loopback address, and without authentication anyone could call: set auth_file (API keys, made"
                " by `draftwood key create`, or client certificates) or jwt_jwks (tokens), or ask for it with"
                " --auth open"
            )
            raise InvalidInputError("host", self.host, problem)
        return self

    def _check_strategy(self) -> None:
        """Raises InvalidValueError for one that drafts by a model that is not to be loaded."""
        if self.strategy in LOADED_BY and self.strategy not in self.model_strategies:
            require_strategy("strategy", self.strategy)

    def _check_ports(self) -> None:
        """Raises InvalidInputError for a port that is wanted twice. 0 is any free one."""
        ports: dict[str, int | None] = {"health_port": self.health_port}
        if self.metrics_host in (None, self.host):
            ports["metrics_port"] = self.metrics_port
        taken: set[int | None] = {self.port}
        for key, port in ports.items():
            if port and port in taken:
                raise InvalidInputError(key, port, "another port has this number; each needs its own")
            taken.add(port)


GROUPS: tuple[type[SettingsGroup], ...] = tuple(base for base in Settings.__bases__ if issubclass(base, SettingsGroup))
"""In the order of help and documentation."""


def default_shown(key: str) -> str:
    """The default of a field as a user writes it; "unset" if there is none, or it is empty."""
    default: Any = Settings.model_fields[key].default
    if default in (None, {}, ()):
        return "unset"
    if isinstance(default, tuple):
        return ",".join(default)
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:.15g}" if isinstance(default, float) else str(default)
