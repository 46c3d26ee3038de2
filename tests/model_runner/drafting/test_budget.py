from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood_model_runner.drafting.budget import worthwhile_score
from draftwood_model_runner.drafting.step_time import StepTimeCurve
from draftwood_strategies import EMPTY_TREE, DraftTree

times = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 1.0), min_size=1, max_size=12)


def chain(*scores: float) -> DraftTree:
    return DraftTree.of(range(len(scores)), scores=list(scores))


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=12).map(lambda s: chain(*sorted(s, reverse=True))), max_size=4),
    st.integers(1, 50),
    times,
)
def test_no_other_number_of_nodes_promises_more_tokens_a_second(
    trees: list[DraftTree], base: int, seconds: dict[int, float]
) -> None:
    curve = StepTimeCurve(seconds)
    least = worthwhile_score(trees, base, curve.between)
    scores = sorted((s for tree in trees for s in tree.scores.tolist()), reverse=True)
    rates = [(base + sum(scores[:n])) / float(curve(base + n)) for n in range(len(scores) + 1)]
    taken = sum(s >= least for s in scores)
    # Equal scores are taken together, which costs at most what the last of them brings.
    assert max(rates) == pytest.approx(max(rates[: taken + 1]), rel=1e-6)


def test_costly_width_drafts_nothing_and_free_width_everything() -> None:
    trees = [chain(0.9, 0.5, 0.1), EMPTY_TREE]
    assert math.isinf(worthwhile_score(trees, 2, StepTimeCurve({1: 1.0, 2: 2.0, 64: 64.0}).between))
    assert worthwhile_score(trees, 2, StepTimeCurve({1: 1.0, 64: 1.0}).between) == pytest.approx(0.1)
    assert worthwhile_score([], 2, StepTimeCurve({1: 1.0}).between) == 0.0
