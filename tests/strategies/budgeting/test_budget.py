from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_strategies.budgeting.budget import worthwhile_drafts, worthwhile_score
from draftwood_strategies.budgeting.step_time import StepTimeCurve
from draftwood_strategies.draft import DraftTree, DraftTrees, Float32Array

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


def rate(drafts: list[list[float]], base: int, curve: StepTimeCurve, of_draft: float) -> float:
    """Tokens per second of a step that verifies these scores."""
    seconds = float(curve(base + sum(map(len, drafts)))) + of_draft * len(drafts)
    return (base + sum(map(sum, drafts))) / seconds


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=4), min_size=1, max_size=6),
    st.floats(0.0, 0.5),
    st.floats(0.0, 3.0),
)
def test_no_other_drafts_promise_more_tokens_a_second(
    scores: list[list[float]], of_token: float, of_draft: float
) -> None:
    trees = DraftTrees.of([DraftTree.of([*range(len(one))], [-1] * len(one), sorted(one)[::-1]) for one in scores])
    base = len(scores)
    curve = StepTimeCurve({1: 2.0 + of_token, 64: 2.0 + 64 * of_token})
    chosen = worthwhile_drafts(trees, base, curve.between, of_draft)
    least = worthwhile_score(trees.scores, base, curve.between)
    each, after = ([of_all[i].scores.tolist() for i in range(base)] for of_all in (trees, chosen))
    worthwhile, found = ([k for one in of_all if (k := [s for s in one if s >= least])] for of_all in (each, after))
    others = [rate([*some], base, curve, of_draft) for n in range(base + 1) for some in combinations(worthwhile, n)]
    assert rate(found, base, curve, of_draft) == pytest.approx(max(others), rel=1e-5)
    assert all(one in ([], before) for before, one in zip(each, after, strict=True))
