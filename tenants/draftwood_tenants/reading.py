"""From a message to the configuration of a tenant or experiment, with all that is allowed. Errors name the field."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from draftwood.admin.v1 import experiments_pb2, tenants_pb2
from draftwood.v1 import generation_pb2
from draftwood_errors import InvalidInputError, InvalidValueError
from draftwood_memory.store.naming import TENANT_ID, TENANT_ID_ALLOWED
from draftwood_strategies.drafting import DraftChoice, require_strategy
from draftwood_strategies.options import OptionValue
from draftwood_strategies.registry import UnknownStrategyError, check_options
from draftwood_tenants.config import (
    DeltaShaping,
    LearningConfig,
    LearningScope,
    RateLimits,
    StreamConfig,
    TenantConfig,
)
from draftwood_tenants.experiments.assignment import ExperimentError, Limits
from draftwood_tenants.experiments.definition import Arm, ExperimentConfig, ExperimentState

MAX_IDENTIFIER_BYTES = 256
TENANT_PREFIX = "tenants/"
MAX_DESCRIPTION = 1000
"""Characters."""
_UNSHAPED = DeltaShaping()
_NOT_A_DEFAULT = ("n", "seed", "logit_bias")
_MAX_SECONDS = 10 * 366 * 24 * 3600.0
_SCOPES = {
    tenants_pb2.LEARNING_SCOPE_UNSPECIFIED: LearningScope.OUTPUTS,
    tenants_pb2.LEARNING_SCOPE_NOTHING: LearningScope.NOTHING,
    tenants_pb2.LEARNING_SCOPE_OUTPUTS: LearningScope.OUTPUTS,
    tenants_pb2.LEARNING_SCOPE_PROMPTS_AND_OUTPUTS: LearningScope.PROMPTS_AND_OUTPUTS,
}
EXPERIMENT_PREFIX = "experiments/"
MAX_TENANTS = 10_000
STATES = {
    experiments_pb2.EXPERIMENT_STATE_DRAFT: ExperimentState.DRAFT,
    experiments_pb2.EXPERIMENT_STATE_RUNNING: ExperimentState.RUNNING,
    experiments_pb2.EXPERIMENT_STATE_STOPPED: ExperimentState.STOPPED,
    experiments_pb2.EXPERIMENT_STATE_CONCLUDED: ExperimentState.CONCLUDED,
}


def check_identifier(field: str, given: str) -> str:
    """`given`, if it is valid.

    Raises:
        InvalidInputError: it has more than `MAX_IDENTIFIER_BYTES` bytes of UTF-8, or control characters.
    """
    if len(given.encode()) > MAX_IDENTIFIER_BYTES:
        raise InvalidInputError(field, None, f"must have at most {MAX_IDENTIFIER_BYTES} bytes of UTF-8")
    if any(unicodedata.category(character) == "Cc" for character in given):
        raise InvalidInputError(field, None, "must not contain control characters")
    return given


def check_tenant(field: str, given: str) -> str:
    """`given`, if it may be the id of a tenant. Raises InvalidInputError."""
    if not TENANT_ID.fullmatch(given):
        shown = given if len(given) <= MAX_IDENTIFIER_BYTES else None
        raise InvalidInputError(field, shown, f"must be {TENANT_ID_ALLOWED}")
    return given


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
    tenant = name.removeprefix(TENANT_PREFIX)
    if tenant == name or not tenant:
        raise InvalidInputError(field, name, 'must be "tenants/" and the id of the tenant, such as tenants/acme')
    return check_tenant(field, tenant)


def read_tenant(message: tenants_pb2.Tenant, limits: ServerLimits) -> TenantConfig:
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


def read_drafting(message: tenants_pb2.DraftConfig, limits: ServerLimits) -> DraftChoice:
    """Raises InvalidValueError."""
    name = message.strategy or limits.strategy
    require_strategy("strategy", name)
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
    return DraftChoice(message.strategy or None, tuple(sorted(options.items())), nodes)


def sampling_values(options: generation_pb2.SamplingOptions) -> dict[str, Any]:
    """The fields that are set, without n and logit_bias."""
    return {field.name: value for field, value in options.ListFields() if field.name not in ("logit_bias", "n")}


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


def _learning(message: tenants_pb2.LearningConfig, limits: ServerLimits) -> LearningConfig:
    if message.scope not in _SCOPES:
        raise InvalidValueError("scope", message.scope, _one_of(tenants_pb2.LearningScope))
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


def _streaming(message: tenants_pb2.StreamConfig, server: DeltaShaping) -> StreamConfig:
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


def experiment_of(field: str, name: str) -> str:
    """The id of an experiment's name. Raises InvalidInputError."""
    experiment = name.removeprefix(EXPERIMENT_PREFIX)
    if experiment == name or not experiment:
        raise InvalidInputError(field, name, 'must be "experiments/" and an id')
    return check_identifier(field, experiment)


def read_experiment(message: experiments_pb2.Experiment, limits: ServerLimits) -> ExperimentConfig:
    """The configuration of a message with name, salt and state. Raises InvalidValueError for a field that is wrong."""
    require_description(message.description)
    _require_known("unit", message, experiments_pb2.ExperimentUnit)
    _require_known("state", message, experiments_pb2.ExperimentState)
    if len(message.tenants) > MAX_TENANTS:
        raise InvalidInputError("tenants", None, f"has {len(message.tenants)} items; at most {MAX_TENANTS}")
    for index, tenant in enumerate(message.tenants):
        check_tenant(f"tenants[{index}]", tenant)
    try:
        return ExperimentConfig(
            name=experiment_of("name", message.name),
            salt=_salt(message.salt),
            arms=tuple(_arm(arm, index, limits) for index, arm in enumerate(message.arms)),
            coverage=message.coverage if message.HasField("coverage") else 1.0,
            by_session=message.unit == experiments_pb2.EXPERIMENT_UNIT_SESSION,
            tenants=frozenset(message.tenants) or None,
            burn_in=seconds_of("burn_in", message, 0.0) or 0.0,
            alpha=message.alpha if message.HasField("alpha") else 0.05,
            limits=_limits(message.guardrails),
            report_only=message.guardrails.report_only,
            state=STATES.get(message.state, ExperimentState.DRAFT),
            started_at=_seconds(message.start_time) if message.HasField("start_time") else None,
            stopped=frozenset(ended.arm for ended in message.stopped_arms),
        )
    except ExperimentError as error:
        raise invalid(error) from None


def invalid(error: ValueError) -> InvalidInputError:
    """An error whose text is "FIELD: PROBLEM"."""
    field, _, problem = str(error).partition(": ")
    return InvalidInputError(field, None, problem)


def _arm(message: experiments_pb2.ExperimentArm, index: int, limits: ServerLimits) -> Arm:
    with under(f"arms[{index}]"):
        _require_known("memory", message, experiments_pb2.ArmMemory)
        with under("drafting"):
            drafting = read_drafting(message.drafting, limits)
    weight = message.weight if message.HasField("weight") else 1.0
    return Arm(message.id, drafting, weight, forked=message.memory == experiments_pb2.ARM_MEMORY_FORKED)


def _limits(message: experiments_pb2.ExperimentGuardrails) -> Limits:
    given = {name: getattr(message, name) for name in ("slower_ttft", "differing") if message.HasField(name)}
    with under("guardrails"):
        try:
            return Limits(**given)
        except ValueError as error:
            raise invalid(error) from None


def _salt(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise InvalidInputError("salt", text, "must be hexadecimal digits") from None


def _require_known(field: str, message: Any, kind: Any) -> None:
    if getattr(message, field) not in kind.values():
        raise InvalidValueError(field, getattr(message, field), _one_of(kind))


def _one_of(kind: Any) -> str:
    """What an enumeration allows, as errors say it."""
    return f"it must be one of {', '.join(kind.keys()[1:])}"


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos * 1e-9
