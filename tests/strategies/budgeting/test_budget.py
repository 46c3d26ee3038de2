from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.budgeting.budget import worthwhile_score
from draftwood_strategies.budgeting.step_time import StepTimeCurve
from draftwood_strategies.draft import Float32Array

times = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12)


def of(*scores: float) -> Float32Array:
    return np.array(scores, np.float32)


@given(st.lists(st.floats(0.0, 1.0), max_size=40).map(lambda scores: of(*scores)), st.integers(1, 50), times)
def test_no_other_number_of_nodes_promises_more_tokens_a_second(
    drafted: Float32Array, base: int, seconds: dict[int, float]
) -> None:
    curve = StepTimeCurve(seconds)
    least = worthwhile_score(drafted, base, curve.between)
    scores = sorted(drafted.tolist(), reverse=True)
    rates = [(base + sum(scores[:n])) / float(curve(base + n)) for n in range(len(scores) + 1)]
    taken = sum(s >= least for s in scores)
    # Equal scores are taken together, which costs at most what the last of them brings.
    assert max(rates) == pytest.approx(max(rates[: taken + 1]), rel=1e-6)


def test_costly_width_drafts_nothing_and_free_width_everything() -> None:
    scores = of(0.9, 0.5, 0.1)
    assert math.isinf(worthwhile_score(scores, 2, StepTimeCurve({1: 1.0, 2: 2.0, 64: 64.0}).between))
    assert worthwhile_score(scores, 2, StepTimeCurve({1: 1.0, 64: 1.0}).between) == pytest.approx(0.1)
    assert worthwhile_score(of(), 2, StepTimeCurve({1: 1.0}).between) == 0.0
