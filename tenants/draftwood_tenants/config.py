"""What a tenant is configured with, checked, as the service uses it. None means the setting of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from types import MappingProxyType

from draftwood_memory.config import MemoryOverrides
from draftwood_strategies.options import Options
from draftwood_tenants.rate_limits import NO_LIMITS, RateLimits
from draftwood_tenants.shaping import DeltaShaping


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A strategy with its options. Hashable: equal configurations share their strategy's instance.

    Attributes:
        strategy: registered name; "" for the server's default.
        options: (name, value) pairs in the order of their names, which the strategy accepts.
        max_nodes: draft nodes of a step and request; None for the server's limit, 0 for no drafts.
    """

    strategy: str = ""
    options: Options = ()
    max_nodes: int | None = None


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
class TenantConfig:
    """The configuration of a tenant.

    Attributes:
        allow_draft_override: requests may choose strategy and draft limit.
        weight: share of slots relative to other tenants.
        sampling: the fields of `SamplingParams` that have a default of the tenant's own.
    """

    drafting: DraftConfig = DraftConfig()
    allow_draft_override: bool = True
    learning: LearningConfig = LearningConfig()
    quotas: RateLimits = NO_LIMITS
    streaming: StreamConfig = StreamConfig()
    weight: float | None = None
    sampling: Mapping[str, float | int] = field(default_factory=lambda: MappingProxyType({}))
