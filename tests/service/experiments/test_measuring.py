"""What a finished request counts for."""

from __future__ import annotations

import time

import numpy as np
import pytest

from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.statistics import SequenceStats
from draftwood_service.engine.stream import Sample
from draftwood_service.experiments.measuring import outcome_of

ARRIVED = time.perf_counter() - 100


def sample(tokens: int, steps: int, first: float, last: float) -> Sample:
    request = Request(request_id="r", prompt=np.arange(7, dtype=np.int32), stop=StopParams(99), arrived_at=ARRIVED)
    stats = SequenceStats(
        arrived_at=ARRIVED,
        first_token_at=ARRIVED + first,
        finished_at=ARRIVED + last,
        decode_steps=steps,
        draft_tokens=12,
        accepted_tokens=5,
    )
    return Sample(request, tokens, stats)


def test_times_and_tokens_are_those_after_the_first_of_each_sample() -> None:
    found = outcome_of("stop", [sample(21, 11, 0.5, 2.5), sample(11, 6, 0.25, 1.25)], ARRIVED)
    assert found is not None
    assert (found.prompt_tokens, found.tokens, found.steps) == (7, 30, 15)
    assert (found.decode_seconds, found.ttft_seconds) == pytest.approx((3.0, 0.25))
    assert (found.draft_nodes, found.accepted_tokens, found.erred) == (24, 10, False)
    assert found.arrived_at == pytest.approx(time.time() - (time.perf_counter() - ARRIVED), abs=0.5)


@pytest.mark.parametrize("result", ["internal", "model_failed", "engine_stopped", "deadline_exceeded"])
def test_errors_that_an_arm_may_cause(result: str) -> None:
    found = outcome_of(result, [sample(3, 2, 0.5, 0.0)], ARRIVED)
    assert found is not None
    assert found.erred
    assert (found.tokens, found.decode_seconds) == (0, 0.0)
    assert outcome_of(result, [], ARRIVED) is None  # it was not read


OF_OTHERS = ("cancelled", "invalid_value", "queue_full", "reader_stalled", "shutting_down", "permission_denied")


@pytest.mark.parametrize("result", [*OF_OTHERS, "quota_exceeded"])
def test_what_the_caller_or_the_server_ended_counts_for_nothing(result: str) -> None:
    assert outcome_of(result, [sample(3, 2, 0.5, 0.0)], ARRIVED) is None
