"""`draftwood bench rollout`: three replicas on one store, replaced one after the other while clients ask."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from draftwood_benchmarks.harness.engines import EngineName
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, shown
from draftwood_benchmarks.rollout.rollout import Plan, Report, measure, replicas
from draftwood_client.cli.options import command
from draftwood_memory.store.embedded import EmbeddedServer

_STORE_BYTES = 1 << 28


@command
def rollout(
    output: OutputOptions,
    requests: Annotated[int, typer.Option(min=30, help="Requests, at least.")] = 1000,
    engine: Annotated[EngineName, typer.Option(help="What the replicas run on.")] = "draftwood",
    max_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 60,
    new_addresses: Annotated[
        bool, typer.Option("--new-addresses", help="Replacements get addresses of their own, as pods do.")
    ] = False,
    kill: Annotated[bool, typer.Option("--kill", help="Kill the second replica instead of draining it.")] = False,
) -> None:
    """A rolling restart under load: failed requests, exit codes, the longest gap, acceptance before and after."""
    output.check()
    plan = Plan(requests, max_tokens=max_tokens, new_addresses=new_addresses, kill=kill, engine=engine)
    report = run(plan)
    console().print(_table(report))
    output.write([report.row()], lambda axes: _draw(report, axes))
    uncut = report.failed - report.cut
    if uncut or (report.cut and not kill):
        raise BenchmarkError(f"{report.failed} requests failed: {'; '.join(report.errors)}")
    if report.different:
        raise BenchmarkError(f"{report.different} answers differ from the first one to the same question")


def run(plan: Plan) -> Report:
    """Measures with a store and replicas of its own. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="draftwood-rollout-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "store", _STORE_BYTES) as store:
            store.wait()
            with replicas(plan, folder, store.url) as running:
                return asyncio.run(measure(plan, running))


def _table(report: Report) -> Table:
    targets = {"failed": "0", "different": "0", "exit_codes": "0, each", "acceptance_kept": "> 0.9"}
    table = Table(title="A rolling restart under load", title_justify="left")
    for heading in ("", "measured", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in report.row().items():
        table.add_row(name.replace("_", " "), _cell(value), targets.get(name, ""))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_cell, value)) or "-"
    return shown(value, 2) if isinstance(value, float) else str(value)


def _draw(report: Report, axes: Any) -> None:
    axes.bar(("cold", "before", "after"), (report.acceptance_cold, report.acceptance_before, report.acceptance_after))
    axes.set_ylabel("acceptance length")
