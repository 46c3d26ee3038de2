"""What a tenant is configured with, checked, as the service uses it. None means the setting of the server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from types import MappingProxyType

from draftwood_errors import InvalidValueError
from draftwood_memory.config import MemoryOverrides
from draftwood_strategies.drafting import NO_CHOICE, DraftChoice


class LearningScope(Enum):
    NOTHING = "nothing"
    OUTPUTS = "outputs"
    PROMPTS_AND_OUTPUTS = "prompts_and_outputs"


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """What a memory keeps, and how much of it.

    Attributes:
        idle_ttl: seconds after the last record until the memory is deleted.
        max_age: seconds until a record is dropped.
        max_tokens, max_bytes: of the memory.
    """

    scope: LearningScope = LearningScope.OUTPUTS
    idle_ttl: float | None = None
    max_age: float | None = None
    max_tokens: int | None = None
    max_bytes: int | None = None

    @property
    def with_prompts(self) -> bool:
        """An answer is kept together with its prompt."""
        return self.scope is LearningScope.PROMPTS_AND_OUTPUTS

    @property
    def overrides(self) -> MemoryOverrides:
        """Of the tenant's memory."""
        return MemoryOverrides(
            max_tokens=self.max_tokens,
            max_bytes=self.max_bytes,
            idle_ttl=self.idle_ttl,
            max_age=self.max_age,
        )


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Against traffic analysis: the fields of `DeltaShaping`."""

    cadence: float | None = None
    padding: int | None = None
    rounding: int | None = None

    def shaping(self, default: DeltaShaping) -> DeltaShaping:
        """With the server's values where there are none."""
        return replace(default, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, slots=True)
class RateLimits:
    """Limits of a tenant over all replicas; None for no limit.

    Attributes:
        requests_per_minute: admitted in any 60 s.
        tokens_per_minute: of prompts and answers of the requests admitted in any 60 s.
        concurrency: requests that run or wait at once.

    Raises:
        InvalidValueError: a limit is below 1.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        for column in fields(self):
            value = getattr(self, column.name)
            if value is not None and value < 1:
                raise InvalidValueError(column.name, value, "it must be at least 1")

    def with_defaults(self, default: RateLimits) -> RateLimits:
        """With those of `default` where there are none."""
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        return replace(default, **{name: value for name, value in values.items() if value is not None})

    @property
    def any(self) -> bool:
        """Whether there is any limit."""
        return self != NO_LIMITS


NO_LIMITS = RateLimits()


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """The configuration of a tenant.

    Attributes:
        allow_draft_override: requests may choose strategy and draft limit.
        weight: share of slots relative to other tenants.
        sampling: the fields of `SamplingParams` that have a default of the tenant's own.
    """

    drafting: DraftChoice = NO_CHOICE
    allow_draft_override: bool = True
    learning: LearningConfig = LearningConfig()
    quotas: RateLimits = NO_LIMITS
    streaming: StreamConfig = StreamConfig()
    weight: float | None = None
    sampling: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))


MIN_CADENCE, MAX_CADENCE = 0.01, 60.0
MAX_PADDING = 65_536
MAX_ROUNDING = 10_000


@dataclass(frozen=True, slots=True)
class DeltaShaping:
    """How the deltas of an answer are shaped; by default they are not.

    Attributes:
        cadence: seconds. Each sample gets one delta at each multiple of it after Started, with or without new tokens,
            until all of them have ended; 0 sends tokens as they come.
        padding: bytes. Each message is filled up to a multiple of it with random bytes; 0 fills up none. With a cadence
            also the size of a delta: tokens beyond it wait for the next one.
        rounding: with a cadence, empty deltas fill up their number to a multiple of this.

    Raises:
        InvalidValueError: a value is outside its range. Its field is the name of the attribute.
    """

    cadence: float = 0.0
    padding: int = 0
    rounding: int = 1

    def __post_init__(self) -> None:
        if self.cadence and not MIN_CADENCE <= self.cadence <= MAX_CADENCE:
            allowed = f"it must be 0, or from {MIN_CADENCE:g} to {MAX_CADENCE:g} seconds"
            raise InvalidValueError("cadence", self.cadence, allowed)
        if not 0 <= self.padding <= MAX_PADDING:
            raise InvalidValueError("padding", self.padding, f"it must be from 0 to {MAX_PADDING} bytes")
        if not 1 <= self.rounding <= MAX_ROUNDING:
            raise InvalidValueError("rounding", self.rounding, f"it must be from 1 to {MAX_ROUNDING}")
        if self.rounding > 1 and not self.cadence:
            raise InvalidValueError("rounding", self.rounding, "it must be 1 without a cadence")

    def holding(self, size: int) -> DeltaShaping:
        """With so large a multiple of `padding` that messages of so many bytes have the size of others."""
        if not self.padding or size <= self.max_delta_bytes:
            return self
        return replace(self, padding=self.padding * math.ceil((size + 2) / self.padding))

    @property
    def max_delta_bytes(self) -> float:
        """Of a delta at a cadence without its padding; infinity for no limit."""
        # One byte less than a multiple cannot be filled up: an entry of `padding` takes two.
        return max(self.padding - 2, 1) if self.padding else math.inf
