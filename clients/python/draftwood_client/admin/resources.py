"""Tenants and experiments as plain values. The protocol's reference says what each field means and allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A tenant's defaults of sampling; None for those of the model. Options as in `GenerateOptions`."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A strategy with its options.

    Attributes:
        strategy: one of `ModelInfo.strategies`; "" for the server's default.
        options: by name, as the strategy documents them.
        max_nodes: draft tokens of a step and request; 0 for no drafts, None for the limit of the server.
    """

    strategy: str = ""
    options: Mapping[str, Any] | None = None
    max_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """What a tenant's memory keeps; None for the settings of the server. Times in seconds.

    Attributes:
        scope: "nothing", "outputs" or "prompts_and_outputs"; "" is "outputs".
        idle_ttl: the memory is deleted this long after its last record.
        max_tokens, max_bytes: of the memory; the oldest tokens are evicted first.
        max_age: a record is dropped when it is so old.
    """

    scope: str = ""
    idle_ttl: float | None = None
    max_tokens: int | None = None
    max_bytes: int | None = None
    max_age: float | None = None


@dataclass(frozen=True, slots=True)
class QuotaConfig:
    """Limits over all servers together; None for those of the server.

    Attributes:
        requests_per_minute, tokens_per_minute: in any 60 seconds; tokens of prompt and answer.
        concurrency: requests that wait or run.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Against traffic analysis of streams; None for the settings of the server.

    Attributes:
        cadence: seconds between two deltas.
        padding_bytes: each message is filled up to a multiple of it.
        rounding: with a cadence, the number of deltas is filled up to a multiple of it.
    """

    cadence: float | None = None
    padding_bytes: int | None = None
    rounding: int | None = None


@dataclass(frozen=True, slots=True)
class Tenant:
    """The configuration of a tenant; None for the settings of the server.

    Attributes:
        name: "tenants/" and the tenant as in requests.
        etag: changes with every change; in an update, the one that must be current, "" for any.
        create_time, update_time, origin: set by the server only; `origin` is "api" or "file".
        allow_draft_override: whether requests may choose strategy and draft limit.
        weight: share of slots relative to other tenants, 0.01 to 100.
    """

    name: str = ""
    description: str = ""
    etag: str = ""
    create_time: datetime | None = None
    update_time: datetime | None = None
    origin: str = ""
    drafting: DraftConfig | None = None
    allow_draft_override: bool | None = None
    learning: LearningConfig | None = None
    quotas: QuotaConfig | None = None
    weight: float | None = None
    sampling: SamplingDefaults | None = None
    streaming: StreamConfig | None = None


@dataclass(frozen=True, slots=True)
class ExperimentArm:
    """An arm of an experiment.

    Attributes:
        id: its name in requests and reports.
        weight: share of the units relative to the other arms; None for 1.
        memory: where the arm's memory begins: "empty" or "forked" from the tenant's; "" is "empty".
    """

    id: str
    drafting: DraftConfig | None = None
    weight: float | None = None
    memory: str = ""


@dataclass(frozen=True, slots=True)
class ExperimentGuardrails:
    """What stops an arm.

    Attributes:
        slower_ttft: mean TTFT over the control's that is tolerated; None for 0.1, 10% more.
        differing: share of audited answers that may differ; None for 0.001.
        report_only: report, and stop nothing.
    """

    slower_ttft: float | None = None
    differing: float | None = None
    report_only: bool = False


@dataclass(frozen=True, slots=True)
class StoppedArm:
    """An arm that a guardrail, "errors", "ttft" or "differing", has stopped or says to stop."""

    arm: str
    guardrail: str
    reason: str
    stop_time: datetime | None = None


@dataclass(frozen=True, slots=True)
class Experiment:
    """An A/B test of drafting strategies. What follows `guardrails`, and times and origin, only the server sets.

    Attributes:
        name: "experiments/" and its id.
        etag, origin: as of a `Tenant`.
        arms: two to eight; the first is the control.
        coverage: share of the units that take part; None for 1.
        unit: "request" or "session"; "" is "request".
        tenants: whose requests take part; none for all.
        burn_in: seconds from the start that are not counted.
        alpha: probability of a false alarm for each metric; None for 0.05.
        state: "draft", "running", "stopped" or "concluded".
        winner: the arm that it was concluded with.
    """

    name: str = ""
    description: str = ""
    etag: str = ""
    create_time: datetime | None = None
    update_time: datetime | None = None
    origin: str = ""
    arms: tuple[ExperimentArm, ...] = ()
    coverage: float | None = None
    unit: str = ""
    tenants: tuple[str, ...] = ()
    burn_in: float | None = None
    alpha: float | None = None
    guardrails: ExperimentGuardrails | None = None
    state: str = ""
    start_time: datetime | None = None
    end_time: datetime | None = None
    salt: str = ""
    winner: str = ""
    stopped_arms: tuple[StoppedArm, ...] = ()
