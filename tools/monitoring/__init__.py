"""Grafana dashboards from `boards.yaml`. `python -m tools.monitoring` writes them into the chart's folder.

Queries are over chosen models, namespaces and pods: variables of the dashboard, whose values occur together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode

FOLDER = Path(__file__).resolve().parents[2] / "helm/draftwood/files/dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_BUILD = "draftwood_build"
"""The metric with the labels of a replica: variables have the values that occur in it together."""
_VARIABLES = {"namespace": "namespace", "model": "gen_ai_request_model", "pod": "pod"}
"""Labels by variable, each of which narrows the choice of those after it."""
_SELECT = ", ".join(f'{name}=~"${name}"' for name in ("namespace", "pod"))


def files() -> dict[str, str]:
    """The dashboards as JSON, by the names of their files."""
    boards = yaml.safe_load(Path(__file__).with_name("boards.yaml").read_text(encoding="utf-8"))
    made = {uid: _dashboard(uid, board).build() for uid, board in boards.items()}
    return {f"{uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n" for uid, board in made.items()}


def _dashboard(uid: str, board: dict[str, Any]) -> dashboard.Dashboard:
    made = (
        dashboard.Dashboard(board["title"])
        .uid(uid)
        .description(board["description"])
        .tags(["draftwood"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    before: list[str] = []
    for name, label in _VARIABLES.items():
        made.with_variable(_choice(name, f"label_values({_BUILD}{{{', '.join(before)}}}, {label})"))
        before.append(f'{label}=~"${name}"')
    for title, graphs in board["rows"].items():
        made.with_row(dashboard.Row(title))
        for name, graph in graphs.items():
            made.with_panel(_panel(name, graph))
    return made


def _choice(name: str, query: str) -> dashboard.QueryVariable:
    """Of the values that occur together with those chosen before. "All" is every series but for pods, also those that
    lack the label, as outside of Kubernetes."""
    made = (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .multi(True)
        .current(models.VariableOption(text="All", value="$__all", selected=True))
    )
    return made if name == "pod" else made.all_value(".*")


def _panel(title: str, graph: dict[str, Any]) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    stacked = graph.get("stacked", False)
    panel = (
        timeseries.Panel()
        .title(title)
        .description(graph["description"])
        .datasource(SOURCE)
        .unit(graph.get("unit", "short"))
        .min(0)
        .span(8)
        .height(8)
        .fill_opacity(20 if stacked else 5)
        .legend(legend.show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(common.StackingConfig().mode("normal"))  # type: ignore[arg-type]
    if "most" in graph:
        panel.max(graph["most"])
    queries = _quantiles(graph["quantiles"]) if "quantiles" in graph else graph["queries"]
    for number, (of_series, expression) in enumerate(queries.items()):
        expression = expression.replace("SELECT", _SELECT).replace("[RATE]", "[$__rate_interval]")
        target = prometheus.Dataquery().expr(expression).legend_format(of_series).ref_id(chr(ord("A") + number))
        panel.with_target(target.datasource(SOURCE))
    return panel


def _quantiles(histogram: str) -> dict[str, str]:
    """The median and two higher quantiles of a histogram, over all chosen replicas."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{SELECT}}[RATE]))"
    return {f"p{round(100 * q)}": f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.95, 0.99)}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        Path(FOLDER, name).write_text(text, encoding="utf-8")
