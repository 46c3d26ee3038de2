"""Dashboards and alerts against a real service: what they ask for is there."""

from __future__ import annotations

import pytest

from tests.monitoring.expressions import exposed, expressions, problems
from tests.monitoring.service import watched_service

PAGE = """
# TYPE a histogram
a_bucket{le="1",pod_name="x"} 1
a_bucket{le="+Inf",pod_name="x"} 1
a_count{pod_name="x"} 1
a_sum{pod_name="x"} 1
"""


@pytest.mark.system
def test_all_metrics_and_labels_are_those_of_a_running_service() -> None:
    with watched_service() as service:
        series = exposed(service.audited())
    wrong = [f"{place}: {one}" for place, text in expressions().items() for one in problems(text, series)]
    assert not wrong
    assert len(expressions()) > 80


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("histogram_quantile(0.9, sum by (le) (rate(a_bucket[5m])))", []),
        ('sum by (namespace, pod) (a_count{pod_name="x"})', []),
        ("rate(b_total[5m])", ["there is no metric b_total"]),
        ('a_count{le="1"} > 2 or a_sum', ["a_count has no label le"]),
        ("sum by (other) (a_sum) / a_count", ["no metric of ['a_sum', 'a_count'] has the label other"]),
    ],
)
def test_what_is_missing_is_found(expression: str, expected: list[str]) -> None:
    assert [*problems(expression, exposed(PAGE))] == expected
