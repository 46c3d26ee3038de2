"""The screen of `draftwood top`, and its figures.

A figure stands in one table: the fields of the protocol that it is computed of, its name in JSON, its form.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from draftwood_client.cli.output import VISIBLE
from draftwood_client.cli.top.replicas import Counts, Key, ReplicaView
from draftwood_client.convert import seconds

Row = dict[str, Any]
"""The figures of a thing by name, as `--json` prints them; a ratio is None if nothing was counted."""


@dataclass(frozen=True, slots=True)
class Total:
    """A thing on all servers.

    Attributes:
        now: what each server has of it.
        rates: what it counted a second.
    """

    now: list[Counts]
    rates: Counts

    def rate(self, *names: str) -> float:
        return sum(self.rates.get(name, 0.0) for name in names)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Attributes:
        name: in JSON.
        of: computes it.
        form: for people; "-" is shown for None.
        heading: of its column, if it has one.
        scale: what it is multiplied by for people.
    """

    name: str
    of: Callable[[Total], float | None]
    form: str = ",.0f"
    heading: str = ""
    scale: float = 1

    def shown(self, row: Row) -> str:
        value = row[self.name]
        return "-" if value is None else format(self.scale * value, self.form)


def _now(name: str) -> Callable[[Total], float]:
    return lambda total: sum(counts.get(name, 0) for counts in total.now)


def _rate(*names: str) -> Callable[[Total], float]:
    return lambda total: total.rate(*names)


def _per(part: str, *whole: str) -> Callable[[Total], float | None]:
    """What was counted of `part` for each of `whole`."""
    return lambda total: _ratio(total.rate(part), total.rate(*whole))


def _of_pages(name: str) -> Callable[[Total], float | None]:
    return lambda total: _ratio(_now(name)(total), _now("kv_pages")(total))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


_TOKENS = Figure("tokens_per_second", _rate("tokens"), heading="TOKENS/S")
_ACCEPTANCE = Figure("acceptance_length", _per("tokens", "decode_steps"), ".2f", "ACCEPTANCE")
_DRAFTED = Figure("draft_tokens_per_step", _per("draft_tokens", "decode_steps"), ".1f", "DRAFTED")
_DRAFTED_RATE = Figure("draft_tokens_per_second", _rate("draft_tokens"), heading="DRAFTED/S")
_ACCEPTED = Figure("accepted_share", _per("accepted_tokens", "draft_tokens"), ".0%", "ACCEPTED")
_KV_USED = Figure("kv_used", _of_pages("kv_pages_used"), ".0%")

TENANT = (
    Figure("running", _now("running"), heading="RUNNING"),
    Figure("waiting", _now("waiting"), heading="WAITING"),
    _TOKENS,
    _ACCEPTANCE,
    _DRAFTED_RATE,
    _ACCEPTED,
)
STRATEGY = (
    _TOKENS,
    _ACCEPTANCE,
    _DRAFTED,
    _ACCEPTED,
    Figure("draft_seconds_per_step", _per("draft_duration", "decode_steps"), ".2f", "MS/STEP", scale=1000),
    Figure("disabled", _now("disabled"), heading="DISABLED"),
)
SOURCE = (_DRAFTED_RATE, _ACCEPTED)
REPLICA = (Figure("running", _now("running"), "d"), Figure("waiting", _now("waiting"), "d"), _TOKENS, _KV_USED)
LOAD = (
    *(Figure(name, _now(name), "d") for name in ("running", "waiting", "max_running", "max_waiting")),
    _KV_USED,
    Figure("kv_cached", _of_pages("kv_pages_cached"), ".0%"),
    Figure("busy", lambda total: total.rate("busy") / len(total.now), ".0%"),
    Figure("steps_per_second", _rate("steps"), ",.1f"),
    _TOKENS,
    Figure("prompt_tokens_per_second", _rate("prompt_tokens", "cached_prompt_tokens")),
    Figure("cached_prompt_share", _per("cached_prompt_tokens", "prompt_tokens", "cached_prompt_tokens"), ".0%"),
    _ACCEPTANCE,
    _DRAFTED,
    *(Figure(name, _now(name)) for name in ("preemptions", "engine_restarts", "audited", "differing", "ties")),
    Figure("failed_audits", _now("failed")),
    Figure("failed_own_texts", _now("own_text_failed")),
)
"""Counts of events are since the servers started."""
_STORED = ("pending_records", "dropped_records", "late_memories", "memories", "memory_tokens")
STORE = (
    Figure("down", lambda total: sum(not counts["up"] for counts in total.now)),
    Figure("lag", lambda total: max(counts.get("lag", 0.0) for counts in total.now), scale=1000),
    *(Figure(name, _now(name)) for name in _STORED),
    Figure("memory_bytes", _now("memory_bytes"), scale=2**-20),
)
"""`down` servers failed in their latest round with the store; `lag` is the largest, in seconds."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The latest figures of all servers. `load`, `store`, strategies and sources are for operators."""

    time: datetime
    tokens_per_second: float
    replicas: list[Row]
    load: Row | None
    strategies: list[Row]
    sources: list[Row]
    tenants: list[Row]
    store: Row | None


def snapshot(replicas: Sequence[ReplicaView]) -> Snapshot:
    now: defaultdict[Key, list[Counts]] = defaultdict(list)
    rates: defaultdict[Key, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for replica in replicas:
        for key, counts in replica.now.items():
            now[key].append(counts)
        for key, counts in replica.rates.items():
            for name, value in counts.items():
                rates[key][name] += value

    def row(key: Key, figures: Iterable[Figure], *names: str) -> Row:
        return {**dict(zip(names, key[1:], strict=True)), **_row(Total(now[key], rates.get(key, {})), figures)}

    def rows(kind: str, figures: Iterable[Figure], *names: str) -> list[Row]:
        return [row(key, figures, *names) for key in [*now] if key[0] == kind]

    tenants = rows("tenant", TENANT, "tenant")
    load = row(("load",), LOAD) if ("load",) in now else None
    sources = [source for source in rows("source", SOURCE, "source") if ("source", source["source"]) in rates]
    return Snapshot(
        time=datetime.now(UTC),
        tokens_per_second=sum(counted["tokens_per_second"] for counted in ([load] if load else tenants)),
        replicas=[_replica(replica) for replica in replicas],
        load=load,
        strategies=sorted(
            rows("drafting", STRATEGY, "strategy", "arm"),
            key=lambda one: (-one["tokens_per_second"], one["strategy"], one["arm"]),
        ),
        sources=sorted(sources, key=lambda source: -rates["source", source["source"]]["accepted_tokens"]),
        tenants=tenants,
        store=row(("store",), STORE) if load else None,
    )


def _row(total: Total, figures: Iterable[Figure]) -> Row:
    return {figure.name: figure.of(total) for figure in figures}


def _replica(replica: ReplicaView) -> Row:
    """The server's whole load, or what its tenants have of it if the caller may see no more."""
    keys = [("load",)] if ("load",) in replica.now else [key for key in replica.now if key[0] == "tenant"]
    rates: defaultdict[str, float] = defaultdict(float)
    for key in keys:
        for name, value in replica.rates.get(key, {}).items():
            rates[name] += value
    latest = replica.latest
    about = {name: getattr(latest, name) if latest else "" for name in ("model", "dtype", "runner")}
    return {
        **{"target": replica.target, "state": replica.state, "problem": replica.problem},
        **{"version": latest.server_version if latest else "", **about},
        "uptime": seconds(latest.uptime) if latest else None,
        **_row(Total([replica.now[key] for key in keys], rates), REPLICA),
    }


class Sort(StrEnum):
    """Orders of tenants. The first letter is the key that chooses it."""

    TOKENS = "tokens"
    RUNNING = "running"
    WAITING = "waiting"
    ACCEPTANCE = "acceptance"
    NAME = "name"


SORT_KEYS: dict[Sort, Callable[[Row], tuple[float | str, ...]]] = {
    Sort.TOKENS: lambda row: (-row["tokens_per_second"], -row["running"], row["tenant"]),
    Sort.RUNNING: lambda row: (-row["running"], -row["waiting"], row["tenant"]),
    Sort.WAITING: lambda row: (-row["waiting"], -row["running"], row["tenant"]),
    Sort.ACCEPTANCE: lambda row: (-(row["acceptance_length"] or 0.0), row["tenant"]),
    Sort.NAME: lambda row: (row["tenant"],),
}
_BARS = " ▁▂▃▄▅▆▇█"
_STATES = {
    "serving": "green",
    "draining": "yellow",
    "restarting": "red",
    "configuration_unknown": "bold red",
    "stalled": "bold red",
    "away": "bold red",
}
_MAX_STRATEGIES, _MAX_REPLICAS = 4, 6
"""Rows on a low screen: 24 lines then leave 6 for tenants."""
_TALL = 40
"""Lines from which on nothing is cut but tenants."""


_LOAD_LINES = (
    (
        "{running} of {max_running} running",
        "{waiting} of {max_waiting} waiting",
        "KV cache {kv_used} used, {kv_cached} cached",
        "busy {busy}",
    ),
    (
        "{steps_per_second} steps/s",
        "acceptance {acceptance_length}",
        "{draft_tokens_per_step} drafted/step",
        "prompts {prompt_tokens_per_second}/s, {cached_prompt_share} cached",
    ),
)


class Screen:
    """A rich renderable of one snapshot.

    Args:
        history: tokens/s of earlier screens, the latest last.
        live: it is shown on a whole terminal: rows beyond its height are left out, and keys are explained.
    """

    def __init__(
        self, shown: Snapshot, history: Sequence[float] = (), sort: Sort = Sort.TOKENS, live: bool = False
    ) -> None:
        self._shown = shown
        self._history = history
        self._sort = sort
        self._live = live

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = (options.height or console.size.height) if self._live else None
        low = height is not None and height < _TALL
        shown = self._shown
        head = [_title(shown), *_replica_lines(shown.replicas, low), *self._load_lines(options.max_width)]
        foot = [*_store_lines(shown.store), *_event_lines(shown.load)]
        if self._live:
            foot.append(_keys_line(self._sort))
        strategies = shown.strategies[:_MAX_STRATEGIES] if low else shown.strategies
        if strategies:
            head += [Text(), _table(STRATEGY, strategies, "strategy", "arm"), *_source_lines(shown.sources)]
        used = len(head) + len(foot) + 3 + len(strategies)  # tables have a header; an empty line before the foot
        tenants = sorted(shown.tenants, key=SORT_KEYS[self._sort])
        fitting = len(tenants) if height is None else max(height - used, 1)
        if len(tenants) > fitting:
            foot.insert(0, Text(f"{len(tenants) - fitting + 1} more tenants", "dim"))
            fitting -= 1
        yield from head
        yield Text()
        yield _table(TENANT, tenants[:fitting], "tenant")
        yield Text()
        yield from foot

    def _load_lines(self, width: int) -> list[RenderableType]:
        throughput = _line(f"{self._shown.tokens_per_second:,.0f} tokens/s", style="bold")
        room = width - throughput.cell_len - 3
        throughput.append("   ").append(sparkline(self._history[-room:]), "cyan")
        if self._shown.load is None:
            return [throughput]
        figures = _texts(LOAD, self._shown.load)
        return [throughput, *(_line(*(part.format_map(figures) for part in parts)) for parts in _LOAD_LINES)]


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from an empty one for 0 to a full one for the largest."""
    top = max(values, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1)) if top else 0] for value in values)


def _title(shown: Snapshot) -> Text:
    present = [replica for replica in shown.replicas if replica["uptime"] is not None]
    served = dict.fromkeys("{model} {dtype} {runner}".format_map(replica) for replica in present)
    versions = dict.fromkeys(replica["version"] for replica in present)
    parts = [f"draftwood {', '.join(versions)}".strip(), *served]
    if len(shown.replicas) == 1 and present:
        parts.append(f"up {_duration(present[0]['uptime'])}")
    elif len(shown.replicas) > 1:
        parts.append(f"{len(present)} of {len(shown.replicas)} replicas")
    return _line(*parts, f"{shown.time.astimezone():%H:%M:%S}", style="bold")


def _replica_lines(replicas: Sequence[Row], low: bool) -> list[RenderableType]:
    """None for one server that serves."""
    if len(replicas) == 1 and replicas[0]["state"] == "serving":
        return []
    order = sorted(replicas, key=lambda replica: replica["state"] == "serving")
    shown = order[:_MAX_REPLICAS] if low else order
    width = min(max(len(replica["target"]) for replica in shown), 32)
    lines = [_replica_line(replica, width) for replica in shown]
    if len(order) > len(shown):
        lines.append(Text(f"{len(order) - len(shown)} more replicas", "dim"))
    return [*lines]


def _replica_line(replica: Row, width: int) -> Text:
    target, state = replica["target"], replica["state"]
    name = target if len(target) <= width else f"...{target[3 - width :]}"
    line = _line(f"{name:<{width}} ").append(f"{state:<11}", _STATES.get(state, "yellow"))
    if replica["uptime"] is None:
        return line.append(replica["problem"].translate(VISIBLE), "dim")
    form = "{running:>4} running {waiting:>4} waiting {tokens_per_second:>8} tokens/s  KV {kv_used:>4}  up "
    return line.append(form.format_map(_texts(REPLICA, replica)) + _duration(replica["uptime"]))


def _source_lines(sources: Sequence[Row]) -> list[RenderableType]:
    parts = [
        "{source} {accepted_share} of {draft_tokens_per_second}/s".format_map({**row, **_texts(SOURCE, row)})
        for row in sources
        if row["draft_tokens_per_second"]
    ]
    return [_line("accepted by source: " + ", ".join(parts), style="dim")] if parts else []


def _store_lines(store: Row | None) -> list[RenderableType]:
    if store is None:
        return []
    line, figures = Text("store "), _texts(STORE, store)
    line.append("up", "green") if not store["down"] else line.append(f"DOWN on {store['down']}", "bold red")
    line.append(", lag {lag} ms, {pending_records} pending".format_map(figures))
    line.append(_problems(dropped=store["dropped_records"], late=store["late_memories"]))
    line.append("; {memories} memories, {memory_tokens} tokens, {memory_bytes} MiB".format_map(figures))
    line.no_wrap, line.overflow = True, "ellipsis"
    return [line]


def _event_lines(load: Row | None) -> list[RenderableType]:
    if load is None:
        return []
    defects = load["differing"] - load["ties"]
    line = Text(f"audits {load['audited']:,}, ")
    line.append(f"{defects:,} differences", "bold red" if defects else "").append(f", {load['ties']:,} ties")
    for name, what in (("failed_audits", "failed"), ("failed_own_texts", "own texts failed")):
        if load[name]:
            line.append(", ").append(f"{load[name]:,} {what}", "bold red")
    line.append(_problems(preemptions=load["preemptions"]))
    if load["engine_restarts"]:
        line.append(", ").append(f"{load['engine_restarts']:,} engine restarts", "bold red")
    line.no_wrap, line.overflow = True, "ellipsis"
    return [line]


def _keys_line(sort: Sort) -> Text:
    keys = "  ".join(f"{order[0]} {order}" for order in Sort)
    return Text(f"sorted by {sort};  {keys}  q quit", "dim", no_wrap=True, overflow="ellipsis")


def _table(figures: Sequence[Figure], rows: Iterable[Row], *names: str) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="reverse")
    for name in names:
        table.add_column(name.upper(), no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    for figure in figures:
        table.add_column(figure.heading, justify="right", no_wrap=True)
    for row in rows:
        alarm = {"disabled"} if row.get("disabled") else set()
        cells = [Text(figure.shown(row), "red" if figure.name in alarm else "") for figure in figures]
        table.add_row(*(Text(row[name].translate(VISIBLE)) for name in names), *cells)
    return table


def _texts(figures: Iterable[Figure], row: Row) -> dict[str, str]:
    return {figure.name: figure.shown(row) for figure in figures}


def _line(*parts: str, style: str = "") -> Text:
    return Text("   ".join(filter(None, parts)).translate(VISIBLE), style, no_wrap=True, overflow="ellipsis")


def _problems(**counts: int) -> str:
    return "".join(f", {count:,} {name}" for name, count in counts.items() if count)


def _duration(seconds: float | None) -> str:
    """Without fractions of a second: "3 days, 4:12:01"."""
    return str(timedelta(seconds=int(seconds or 0)))
