"""The dashboards are those that the tool writes, and they and the alerts ask a real service for what is there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.monitoring.expressions import DASHBOARDS, dashboards, exposed, expressions, panels, problems
from tools.monitoring import files

UNITS = {"short", "s", "bytes", "reqps", "percentunit"}
"""Units of ours, by Grafana's ids: it shows an unknown one as a suffix."""


def test_the_committed_files_are_those_that_the_tool_writes() -> None:
    written = files()
    assert {path.name for path in DASHBOARDS.iterdir()} == written.keys()
    for name, text in written.items():
        assert (DASHBOARDS / name).read_text() == text, f"{name}: run `make dashboards`"


@pytest.mark.parametrize("name", dashboards())
def test_panels_have_unique_titles_descriptions_and_units(name: str) -> None:
    dashboard: Any = dashboards()[name]
    assert name == f"{dashboard['uid']}.json"
    titles = [panel["title"] for panel in panels(dashboard)]
    assert len({*titles}) == len(titles) > 8
    for panel in panels(dashboard):
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'namespace=~"$namespace", pod=~"$pod"' in target["expr"]
            assert target["legendFormat"]


PAGE = """
# TYPE a histogram
a_bucket{le="1",pod_name="x"} 1
a_bucket{le="+Inf",pod_name="x"} 1
a_count{pod_name="x"} 1
a_sum{pod_name="x"} 1
"""


@pytest.mark.system
@pytest.mark.timeout(600)  # as long as a service may start, and be audited
def test_all_metrics_and_labels_are_those_of_a_running_service(series: dict[str, set[str]]) -> None:
    wrong = [f"{place}: {problem}" for place, text in expressions().items() for problem in problems(text, series)]
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
