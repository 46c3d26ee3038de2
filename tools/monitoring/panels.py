"""What our dashboards are made of: graphs of Prometheus queries, in rows, over chosen models, namespaces and pods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_EVERY = ".*"
"""As a value of a variable: also series that lack the label, as outside of Kubernetes."""
_BUILD = "draftwood_build"
"""The metric with the labels of a replica: variables have the values that occur in it together."""


@dataclass(frozen=True, slots=True)
class Query:
    """An expression of PromQL, and the legend of its series.

    In the expression, SELECT stands for the matchers of the chosen namespaces and pods.
    """

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph over time.

    Attributes:
        unit: Grafana's id of a unit, such as "s" or "percentunit".
        stacked: series are drawn on top of each other.
        most: upper end of the axis; None for that of the data.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    stacked: bool = False
    most: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard.

    Attributes:
        rows: graphs by the title of their row.
    """

    uid: str
    title: str
    description: str
    rows: dict[str, Sequence[Graph]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above the dashboard: the values of a label of replicas.

    Attributes:
        matched: queries match it; one that is not narrows the choice of those after it.
    """

    name: str
    label: str
    matched: bool = True


def per_second(counter: str, legend: str, by: Sequence[str] = (), where: str = "") -> Query:
    """How much a counter grows a second, over all chosen replicas, by labels, of the series that match `where`."""
    matchers = f"{where}, SELECT" if where else "SELECT"
    return Query(f"{_sum(by)}(rate({counter}{{{matchers}}}[$__rate_interval]))", legend)


def quantiles(histogram: str) -> list[Query]:
    """The median and two higher quantiles of a histogram, over all chosen replicas."""
    buckets = f"sum by (le) (rate({histogram}_bucket{{SELECT}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({q}, {buckets})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def ratio(part: str, whole: str, legend: str, by: Sequence[str] = ()) -> Query:
    """How much one counter grows for each one of another, for all together or by labels."""
    return Query(" / ".join(per_second(counter, "", by).expression for counter in (part, whole)), legend)


def _sum(by: Sequence[str]) -> str:
    return f"sum by ({', '.join(by)}) " if by else "sum"


def built(board: Board, variables: Sequence[Variable]) -> dashboard.Dashboard:
    """The dashboard, for `JSONEncoder`."""
    made = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["draftwood"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for number, variable in enumerate(variables):
        last = variable is variables[-1]
        made.with_variable(_choice(variable, variables[:number], None if last else _EVERY))
    select = ", ".join(f'{one.label}=~"${one.name}"' for one in variables if one.matched)
    for title, graphs in board.rows.items():
        made.with_row(dashboard.Row(title))
        for graph in graphs:
            made.with_panel(_panel(graph, select))
    return made


def _choice(variable: Variable, before: Sequence[Variable], every: str | None) -> dashboard.QueryVariable:
    """Of the values that occur together with those chosen before.

    Args:
        every: what "All" means; None for all of these values.
    """
    chosen = ", ".join(f'{one.label}=~"${one.name}"' for one in before)
    query = f"label_values({_BUILD}{{{chosen}}}, {variable.label})"
    everything = models.VariableOption(text="All", value="$__all", selected=True)
    made = (
        dashboard.QueryVariable(variable.name)
        .label(variable.name.capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .include_all(True)
        .multi(True)
        .current(everything)
    )
    return made if every is None else made.all_value(every)


def _panel(graph: Graph, select: str) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    panel = (
        timeseries.Panel()
        .title(graph.title)
        .description(graph.description)
        .datasource(SOURCE)
        .unit(graph.unit)
        .min(0)
        .span(8)
        .height(8)
        .fill_opacity(20 if graph.stacked else 5)
        .legend(legend.show_legend(True))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if graph.stacked:
        panel.stacking(common.StackingConfig().mode("normal"))  # type: ignore[arg-type]
    if graph.most is not None:
        panel.max(graph.most)
    for number, query in enumerate(graph.queries):
        expression = query.expression.replace("SELECT", select)
        target = prometheus.Dataquery().expr(expression).legend_format(query.legend).ref_id(chr(ord("A") + number))
        panel.with_target(target.datasource(SOURCE))
    return panel
