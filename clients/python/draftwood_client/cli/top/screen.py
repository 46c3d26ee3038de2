"""The screen of `draftwood top`, from a snapshot: fits 80 columns and 24 lines, and uses more where there is more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from enum import StrEnum

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from draftwood_client.cli.output import VISIBLE
from draftwood_client.cli.top.snapshot import Load, ReplicaRow, Snapshot, SourceRow, Store, StrategyRow, TenantRow


class Sort(StrEnum):
    """Orders of tenants. The first letter is the key that chooses it."""

    TOKENS = "tokens"
    RUNNING = "running"
    WAITING = "waiting"
    ACCEPTANCE = "acceptance"
    NAME = "name"


SORT_KEYS: dict[Sort, Callable[[TenantRow], tuple[float | str, ...]]] = {
    Sort.TOKENS: lambda row: (-row.tokens_per_second, -row.running, row.tenant),
    Sort.RUNNING: lambda row: (-row.running, -row.waiting, row.tenant),
    Sort.WAITING: lambda row: (-row.waiting, -row.running, row.tenant),
    Sort.ACCEPTANCE: lambda row: (-(row.acceptance_length or 0.0), row.tenant),
    Sort.NAME: lambda row: (row.tenant,),
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
            head += [Text(), _strategy_table(strategies), *_source_lines(shown.sources)]
        used = len(head) + len(foot) + 3 + len(strategies)  # tables have a header; an empty line before the foot
        tenants = sorted(shown.tenants, key=SORT_KEYS[self._sort])
        fitting = len(tenants) if height is None else max(height - used, 1)
        if len(tenants) > fitting:
            foot.insert(0, Text(f"{len(tenants) - fitting + 1} more tenants", "dim"))
            fitting -= 1
        yield from head
        yield Text()
        yield _tenant_table(tenants[:fitting])
        yield Text()
        yield from foot

    def _load_lines(self, width: int) -> list[RenderableType]:
        load = self._shown.load
        throughput = _line(f"{self._shown.tokens_per_second:,.0f} tokens/s", style="bold")
        room = width - throughput.cell_len - 3
        throughput.append("   ").append(sparkline(self._history[-room:]), "cyan")
        if load is None:
            return [throughput]
        requests = _line(
            f"{load.running} of {load.max_running} running",
            f"{load.waiting} of {load.max_waiting} waiting",
            f"KV cache {_share(load.kv_used)} used, {_share(load.kv_cached)} cached",
            f"busy {_share(load.busy)}",
        )
        steps = _line(
            f"{load.steps_per_second:,.1f} steps/s",
            f"acceptance {_number(load.acceptance_length, '.2f')}",
            f"{_number(load.draft_tokens_per_step, '.1f')} drafted/step",
            f"prompts {load.prompt_tokens_per_second:,.0f}/s, {_share(load.cached_prompt_share)} cached",
        )
        return [throughput, requests, steps]


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from an empty one for 0 to a full one for the largest."""
    top = max(values, default=0.0)
    return "".join(_BARS[round(value / top * (len(_BARS) - 1)) if top else 0] for value in values)


def _title(shown: Snapshot) -> Text:
    present = [one for one in shown.replicas if one.uptime is not None]
    served = dict.fromkeys(f"{one.model} {one.dtype} {one.runner}" for one in present)
    versions = dict.fromkeys(one.version for one in present)
    parts = [f"draftwood {', '.join(versions)}".strip(), *served]
    if len(shown.replicas) == 1 and present:
        parts.append(f"up {_duration(present[0].uptime)}")
    elif len(shown.replicas) > 1:
        parts.append(f"{len(present)} of {len(shown.replicas)} replicas")
    return _line(*parts, f"{shown.time.astimezone():%H:%M:%S}", style="bold")


def _replica_lines(replicas: Sequence[ReplicaRow], low: bool) -> list[RenderableType]:
    """None for one server that serves."""
    if len(replicas) == 1 and replicas[0].state == "serving":
        return []
    order = sorted(replicas, key=lambda one: one.state == "serving")
    shown = order[:_MAX_REPLICAS] if low else order
    target = min(max(len(one.target) for one in shown), 32)
    lines = [_replica_line(one, target) for one in shown]
    if len(order) > len(shown):
        lines.append(Text(f"{len(order) - len(shown)} more replicas", "dim"))
    return [*lines]


def _replica_line(one: ReplicaRow, width: int) -> Text:
    name = one.target if len(one.target) <= width else f"...{one.target[3 - width :]}"
    line = _line(f"{name:<{width}} ").append(f"{one.state:<11}", _STATES.get(one.state, "yellow"))
    if one.uptime is None:
        return line.append(one.problem.translate(VISIBLE), "dim")
    figures = f"{one.running:>4} running {one.waiting:>4} waiting {one.tokens_per_second:>8,.0f} tokens/s"
    return line.append(f"{figures}  KV {_share(one.kv_used):>4}  up {_duration(one.uptime)}")


def _strategy_table(rows: Iterable[StrategyRow]) -> Table:
    table = _table(("STRATEGY", "ARM"), ("TOKENS/S", "ACCEPTANCE", "DRAFTED", "ACCEPTED", "MS/STEP", "DISABLED"))
    for row in rows:
        table.add_row(
            _name(row.strategy),
            _name(row.arm),
            f"{row.tokens_per_second:,.0f}",
            _number(row.acceptance_length, ".2f"),
            _number(row.draft_tokens_per_step, ".1f"),
            _share(row.accepted_share),
            _number(None if row.draft_seconds_per_step is None else 1000 * row.draft_seconds_per_step, ".2f"),
            Text(f"{row.disabled:,}", "red" if row.disabled else ""),
        )
    return table


def _source_lines(sources: Sequence[SourceRow]) -> list[RenderableType]:
    active = [one for one in sources if one.draft_tokens_per_second]
    if not active:
        return []
    parts = [f"{one.source} {_share(one.accepted_share)} of {one.draft_tokens_per_second:,.0f}/s" for one in active]
    return [_line("accepted by source: " + ", ".join(parts), style="dim")]


def _tenant_table(rows: Iterable[TenantRow]) -> Table:
    table = _table(("TENANT",), ("RUNNING", "WAITING", "TOKENS/S", "ACCEPTANCE", "DRAFTED/S", "ACCEPTED"))
    for row in rows:
        table.add_row(
            _name(row.tenant),
            f"{row.running:,}",
            f"{row.waiting:,}",
            f"{row.tokens_per_second:,.0f}",
            _number(row.acceptance_length, ".2f"),
            f"{row.draft_tokens_per_second:,.0f}",
            _share(row.accepted_share),
        )
    return table


def _store_lines(store: Store | None) -> list[RenderableType]:
    if store is None:
        return []
    line = Text("store ")
    line.append("up", "green") if not store.down else line.append(f"DOWN on {store.down}", "bold red")
    memories = f"{store.memories:,} memories, {store.memory_tokens:,} tokens, {store.memory_bytes / 2**20:,.0f} MiB"
    text = f", lag {1000 * store.lag:,.0f} ms, {store.pending_records:,} pending"
    line.append(f"{text}{_problems(dropped=store.dropped_records, late=store.late_memories)}; {memories}")
    line.no_wrap, line.overflow = True, "ellipsis"
    return [line]


def _event_lines(load: Load | None) -> list[RenderableType]:
    if load is None:
        return []
    defects = load.differing - load.ties
    line = Text(f"audits {load.audited:,}, ")
    line.append(f"{defects:,} differences", "bold red" if defects else "").append(f", {load.ties:,} ties")
    for number, what in ((load.failed_audits, "failed"), (load.failed_own_texts, "own texts failed")):
        if number:
            line.append(", ").append(f"{number:,} {what}", "bold red")
    line.append(_problems(preemptions=load.preemptions))
    if load.engine_restarts:
        line.append(", ").append(f"{load.engine_restarts:,} engine restarts", "bold red")
    line.no_wrap, line.overflow = True, "ellipsis"
    return [line]


def _keys_line(sort: Sort) -> Text:
    keys = "  ".join(f"{one[0]} {one}" for one in Sort)
    return Text(f"sorted by {sort};  {keys}  q quit", "dim", no_wrap=True, overflow="ellipsis")


def _table(names: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, header_style="reverse")
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1, min_width=8)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _line(*parts: str, style: str = "") -> Text:
    return Text("   ".join(filter(None, parts)).translate(VISIBLE), style, no_wrap=True, overflow="ellipsis")


def _name(text: str) -> Text:
    return Text(text.translate(VISIBLE))


def _problems(**counts: int) -> str:
    return "".join(f", {count:,} {name}" for name, count in counts.items() if count)


def _share(value: float | None) -> str:
    return _number(value, ".0%")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float | None) -> str:
    """Without fractions of a second: "3 days, 4:12:01"."""
    return str(timedelta(seconds=int(seconds or 0)))
