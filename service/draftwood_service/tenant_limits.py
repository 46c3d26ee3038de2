"""What a server's settings allow its tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftwood_model_runner.request import SamplingParams
from draftwood_service.settings import Settings
from draftwood_tenants.reading import ServerLimits


def tenant_limits(settings: Settings) -> ServerLimits:
    return ServerLimits(
        settings.strategy,
        settings.max_draft_nodes,
        settings.memory_tokens,
        settings.memory_bytes,
        settings.delta_shaping,
        _check_sampling,
    )


def _check_sampling(values: Mapping[str, Any]) -> None:
    SamplingParams(**values)
