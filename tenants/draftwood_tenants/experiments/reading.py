"""From an experiment's message to its configuration. Errors name the field."""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from draftwood.admin.v1 import experiments_pb2 as pb
from draftwood_errors import InvalidInputError, InvalidValueError
from draftwood_tenants.experiments.assignment import ExperimentError
from draftwood_tenants.experiments.definition import Arm, ExperimentConfig, ExperimentState
from draftwood_tenants.experiments.limits import Limits
from draftwood_tenants.identifiers import check_identifier
from draftwood_tenants.reading import ServerLimits, read_drafting, require_description, seconds_of, under

PREFIX = "experiments/"
MAX_TENANTS = 10_000
STATES = {
    pb.EXPERIMENT_STATE_DRAFT: ExperimentState.DRAFT,
    pb.EXPERIMENT_STATE_RUNNING: ExperimentState.RUNNING,
    pb.EXPERIMENT_STATE_STOPPED: ExperimentState.STOPPED,
    pb.EXPERIMENT_STATE_CONCLUDED: ExperimentState.CONCLUDED,
}


def experiment_of(field: str, name: str) -> str:
    """The id of an experiment's name. Raises InvalidInputError."""
    found = name.removeprefix(PREFIX)
    if found == name or not found:
        raise InvalidInputError(field, name, 'must be "experiments/" and an id')
    return check_identifier(field, found)


def read_experiment(message: pb.Experiment, limits: ServerLimits) -> ExperimentConfig:
    """The configuration of a message with name, salt and state. Raises InvalidValueError for a field that is wrong."""
    require_description(message.description)
    for field in ("unit", "state"):
        _require_known(field, message, pb.ExperimentUnit if field == "unit" else pb.ExperimentState)
    if len(message.tenants) > MAX_TENANTS:
        raise InvalidInputError("tenants", None, f"has {len(message.tenants)} items; at most {MAX_TENANTS}")
    for index, tenant in enumerate(message.tenants):
        check_identifier(f"tenants[{index}]", tenant)
        if not tenant:
            raise InvalidInputError(f"tenants[{index}]", None, "must not be empty")
    try:
        return ExperimentConfig(
            name=experiment_of("name", message.name),
            salt=_salt(message.salt),
            arms=tuple(_arm(arm, index, limits) for index, arm in enumerate(message.arms)),
            coverage=message.coverage if message.HasField("coverage") else 1.0,
            by_session=message.unit == pb.EXPERIMENT_UNIT_SESSION,
            tenants=frozenset(message.tenants) or None,
            burn_in=seconds_of("burn_in", message, 0.0) or 0.0,
            alpha=message.alpha if message.HasField("alpha") else 0.05,
            limits=_limits(message.guardrails),
            report_only=message.guardrails.report_only,
            state=STATES.get(message.state, ExperimentState.DRAFT),
            started_at=_seconds(message.start_time) if message.HasField("start_time") else None,
            stopped=frozenset(one.arm for one in message.stopped_arms),
        )
    except ExperimentError as error:
        raise invalid(error) from None


def invalid(error: ValueError) -> InvalidInputError:
    """An error whose text is "FIELD: PROBLEM"."""
    field, _, problem = str(error).partition(": ")
    return InvalidInputError(field, None, problem)


def _arm(message: pb.ExperimentArm, index: int, limits: ServerLimits) -> Arm:
    with under(f"arms[{index}]"):
        _require_known("memory", message, pb.ArmMemory)
        with under("drafting"):
            drafting = read_drafting(message.drafting, limits)
    weight = message.weight if message.HasField("weight") else 1.0
    return Arm(message.id, drafting, weight, forked=message.memory == pb.ARM_MEMORY_FORKED)


def _limits(message: pb.ExperimentGuardrails) -> Limits:
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
        raise InvalidValueError(field, getattr(message, field), f"it must be one of {', '.join(kind.keys()[1:])}")


def _seconds(time: Timestamp) -> float:
    return time.seconds + time.nanos * 1e-9
