"""The PromQL of dashboards and alert rules, and what a service exposes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import yaml
from prometheus_client.parser import text_string_to_metric_families

REPOSITORY = Path(__file__).resolve().parents[2]
ALERTS = REPOSITORY / "helm/draftwood/files/alerts.yaml"
DASHBOARDS = REPOSITORY / "helm/draftwood/files/dashboards"
RUNBOOKS = REPOSITORY / "docs/runbooks.md"
OF_PROMETHEUS = {"namespace", "pod", "service"}
"""Labels that Prometheus adds when it scrapes the pods of a service."""


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def dashboards() -> dict[str, Any]:
    """The dashboards, by the names of their files."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def panels(dashboard: Any) -> list[Any]:
    """The graphs of a dashboard, without its rows."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """All expressions with the variables of dashboards filled in, by where they are."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in rules()}
    for name, dashboard in dashboards().items():
        for panel in panels(dashboard):
            for target in panel["targets"]:
                found[f"{name}, {panel['title']}, {target['refId']}"] = filled(target["expr"])
    return found


def variables() -> dict[str, tuple[str, str]]:
    """The variables of dashboards whose values are those of a label: series and label, by where they are."""
    found: dict[str, tuple[str, str]] = {}
    for name, dashboard in dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                [asked] = re.findall(r"^label_values\((.*), (\w+)\)$", filled(variable["query"]))
                found[f"{name}, variable {variable['name']}"] = asked
    return found


def filled(expression: str) -> str:
    """As Grafana sends it if everything is chosen."""
    for variable, value in (("$__rate_interval", "1m"), ("$namespace", ".*"), ("$model", ".*"), ("$pod", ".*")):
        expression = expression.replace(variable, value)
    return expression


def exposed(page: str) -> dict[str, set[str]]:
    """The series of a page of metrics: for each name, the labels that its samples have."""
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels[sample.name] |= {*sample.labels}
    return labels


def problems(expression: str, series: dict[str, set[str]]) -> Iterator[str]:
    """Metrics and labels of an expression that no series has.

    Raises:
        ValueError: it is no PromQL.
    """
    selectors: list[tuple[str, set[str]]] = []
    grouped: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql.VectorSelector):
            selectors.append((node.name or "", {matcher.name for matcher in node.matchers.matchers}))
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)

    promql.walk(promql.parse(expression), visit)
    for name, matched in selectors:
        if name not in series:
            yield f"there is no metric {name}"
        for label in matched - series.get(name, set()) - OF_PROMETHEUS:
            yield f"{name} has no label {label}"
    known = OF_PROMETHEUS.union(*(series.get(name, set()) for name, _ in selectors))
    for label in grouped - known:
        yield f"no metric of {[name for name, _ in selectors]} has the label {label}"
