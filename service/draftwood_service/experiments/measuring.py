"""The outcome of a request in the arm of its experiment."""

from __future__ import annotations

import time

from draftwood_model_runner.statistics import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_tenants.experiments.outcomes import Outcome

_ANSWERED = frozenset({"stop", "length"})
_ERRED = frozenset({"internal", "model_failed", "engine_stopped", "deadline_exceeded"})
"""Errors that an arm may cause. A time limit is among them: an arm that is too slow for it would otherwise look faster
without its slowest requests. The caller's cancellation and mistakes, quotas and a full queue are not counted."""


def outcome_of(result: str, samples: list[Sample], arrived_at: float) -> Outcome | None:
    """What is counted of a request; None for nothing.

    Args:
        result: the finish reason, or the reason of an error.
        arrived_at: on the clock of `time.perf_counter`.
    """
    if not samples or result not in _ANSWERED | _ERRED:
        return None
    began = time.time() - (time.perf_counter() - arrived_at)
    prompt_tokens = int(samples[0].request.prompt.size)
    if result in _ERRED:
        return Outcome(began, prompt_tokens, erred=True)
    stats = SequenceStats.over([sample.stats for sample in samples])
    return Outcome(
        arrived_at=began,
        prompt_tokens=prompt_tokens,
        tokens=sum(max(sample.completion_tokens - 1, 0) for sample in samples),
        steps=sum(max(sample.stats.decode_steps - 1, 0) for sample in samples),
        decode_seconds=sum(sample.stats.finished_at - sample.stats.first_token_at for sample in samples),
        ttft_seconds=stats.first_token_at - arrived_at,
        draft_nodes=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
    )
