"""From a tenant's message to its configuration: the one home of what is allowed. Errors name the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct

from draftwood.admin.v1 import tenants_pb2 as pb
from draftwood.v1 import generation_pb2
from draftwood_errors import InvalidInputError, InvalidValueError
from draftwood_strategies.options import OptionValue
from draftwood_strategies.registry import UnknownStrategyError, check_options, strategy_names
from draftwood_tenants.config import (
    DraftConfig,
    LearningConfig,
    LearningScope,
    StreamConfig,
    TenantConfig,
)
from draftwood_tenants.identifiers import check_identifier
from draftwood_tenants.rate_limits import RateLimits
from draftwood_tenants.shaping import DeltaShaping

PREFIX = "tenants/"
MAX_DESCRIPTION = 1000
"""Characters."""
_UNSHAPED = DeltaShaping()
_NOT_A_DEFAULT = ("n", "seed", "logit_bias")
_MAX_SECONDS = 10 * 366 * 24 * 3600.0
_SCOPES = {
    pb.LEARNING_SCOPE_UNSPECIFIED: LearningScope.OUTPUTS,
    pb.LEARNING_SCOPE_NOTHING: LearningScope.NOTHING,
    pb.LEARNING_SCOPE_OUTPUTS: LearningScope.OUTPUTS,
    pb.LEARNING_SCOPE_PROMPTS_AND_OUTPUTS: LearningScope.PROMPTS_AND_OUTPUTS,
}


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What the server's settings allow a tenant.

    Attributes:
        strategy: the server's default, which options without a strategy are for.
        memory_tokens, memory_bytes: of a tenant's memory.
        shaping: of answers, where a tenant has none.
        check_sampling: raises InvalidValueError for values of sampling that are not allowed; None where nothing uses
            them.
    """

    strategy: str
    max_draft_nodes: int
    memory_tokens: int
    memory_bytes: int
    shaping: DeltaShaping = _UNSHAPED
    check_sampling: Callable[[Mapping[str, float | int]], None] | None = None


def tenant_of(field: str, name: str) -> str:
    """The tenant of a resource's name. Raises InvalidInputError."""
    tenant = name.removeprefix(PREFIX)
    if tenant == name or not tenant:
        raise InvalidInputError(field, name, 'must be "tenants/" and the tenant, such as tenants/acme')
    return check_identifier(field, tenant)


def read_tenant(message: pb.Tenant, limits: ServerLimits) -> TenantConfig:
    """The configuration. Raises InvalidValueError for a field that is wrong."""
    require_description(message.description)
    with under("drafting"):
        drafting = read_drafting(message.drafting, limits)
    with under("learning"):
        learning = _learning(message.learning, limits)
    with under("streaming"):
        streaming = _streaming(message.streaming, limits.shaping)
    with under("quotas"):
        quotas = RateLimits(**{field.name: value for field, value in message.quotas.ListFields()})
    if message.HasField("weight"):
        require_range("weight", message.weight, 0.01, 100.0)
    return TenantConfig(
        drafting=drafting,
        allow_draft_override=message.allow_draft_override if message.HasField("allow_draft_override") else True,
        learning=learning,
        quotas=quotas,
        streaming=streaming,
        weight=message.weight if message.HasField("weight") else None,
        sampling=_sampling(message.sampling, limits),
    )


def read_drafting(message: pb.DraftConfig, limits: ServerLimits) -> DraftConfig:
    """Raises InvalidValueError."""
    name = message.strategy or limits.strategy
    if name not in strategy_names():
        raise InvalidValueError("strategy", name, f"it must be one of {', '.join(strategy_names())}")
    options = _options(message.options)
    if "learn" in options:
        raise InvalidInputError("options.learn", None, "follows from learning.scope of the tenant")
    try:
        options = check_options(name, options)
    except (ValueError, UnknownStrategyError) as error:
        option, _, problem = str(error).partition(": ")
        field = f"options.{option}" if option in options else "options"
        text = problem if option in options else str(error)
        raise InvalidInputError(field, None, f"{text} (strategy {name})") from None
    nodes = message.max_nodes if message.HasField("max_nodes") else None
    if nodes is not None:
        require_range("max_nodes", nodes, 0, limits.max_draft_nodes)
    return DraftConfig(message.strategy, tuple(sorted(options.items())), nodes)


def sampling_values(options: generation_pb2.SamplingOptions) -> dict[str, Any]:
    """The fields that are set, without n and logit_bias. A 32-bit float is read as the shortest decimal that represents
    it: 0.7 and not 0.699999988.
    """
    return {
        field.name: float(str(np.float32(value))) if isinstance(value, float) else value
        for field, value in options.ListFields()
        if field.name not in ("logit_bias", "n")
    }


def require_description(text: str) -> None:
    """Raises InvalidInputError."""
    if len(text) > MAX_DESCRIPTION:
        raise InvalidInputError("description", None, f"has {len(text)} characters; at most {MAX_DESCRIPTION}")


def require_range(field: str, value: float, low: float, high: float) -> None:
    """Raises InvalidValueError."""
    if not low <= value <= high:
        raise InvalidValueError(field, value, f"it must lie in [{low:,g}, {high:,.10g}]")


def seconds_of(field: str, message: Any, low: float, high: float = _MAX_SECONDS) -> float | None:
    """A Duration field in seconds; None if it is not set. Raises InvalidValueError."""
    if not message.HasField(field):
        return None
    duration: Duration = getattr(message, field)
    seconds = duration.seconds + duration.nanos * 1e-9
    require_range(field, seconds, low, high)
    return seconds


@contextmanager
def under(path: str) -> Iterator[None]:
    """Errors of fields name the message that the field is in."""
    try:
        yield
    except InvalidValueError as error:
        raise type(error)(f"{path}.{error.field}", error.value, error.allowed) from None


def _options(given: Struct) -> dict[str, OptionValue]:
    values: dict[str, OptionValue] = {}
    for name, value in sorted(given.fields.items()):
        kind = value.WhichOneof("kind")
        if kind == "number_value":
            number = value.number_value
            values[name] = int(number) if number.is_integer() and abs(number) < 2**53 else number
        elif kind == "string_value":
            values[name] = value.string_value
        elif kind == "bool_value":
            values[name] = value.bool_value
        else:
            raise InvalidInputError(f"options.{name}", None, "must be a number, a text, true or false")
    return values


def _learning(message: pb.LearningConfig, limits: ServerLimits) -> LearningConfig:
    if message.scope not in _SCOPES:
        raise InvalidValueError("scope", message.scope, f"it must be one of {', '.join(pb.LearningScope.keys()[1:])}")
    for field, low, high in (("max_tokens", 1024, limits.memory_tokens), ("max_bytes", 65536, limits.memory_bytes)):
        if message.HasField(field):
            require_range(field, getattr(message, field), low, high)
    return LearningConfig(
        scope=_SCOPES[message.scope],
        idle_ttl=seconds_of("idle_ttl", message, 1.0),
        max_age=seconds_of("max_age", message, 60.0),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        max_bytes=message.max_bytes if message.HasField("max_bytes") else None,
    )


def _streaming(message: pb.StreamConfig, server: DeltaShaping) -> StreamConfig:
    config = StreamConfig(
        cadence=seconds_of("cadence", message, 0.0),
        padding=message.padding_bytes if message.HasField("padding_bytes") else None,
        rounding=message.rounding if message.HasField("rounding") else None,
    )
    try:
        config.shaping(server)
    except InvalidValueError as error:
        field = "padding_bytes" if error.field == "padding" else error.field
        raise InvalidValueError(field, error.value, error.allowed) from None
    return config


def _sampling(message: generation_pb2.SamplingOptions, limits: ServerLimits) -> Mapping[str, float | int]:
    for field, _ in message.ListFields():
        if field.name in _NOT_A_DEFAULT:
            raise InvalidInputError(f"sampling.{field.name}", None, "cannot be a default of a tenant")
    values = sampling_values(message)
    if limits.check_sampling is not None:
        limits.check_sampling(values)
    return MappingProxyType(values)
