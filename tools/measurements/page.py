"""The page of measurements, from the JSON files of `docs/measurements`."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table

from draftwood_benchmarks.harness.report import BUSY
from tools.measurements.suite import DOCS, MEASUREMENTS, Measurement

PAGE = DOCS / "measurements.md"
_HEAD = """# Measurements

Generated from `docs/measurements/*.json`, which `draftwood bench` wrote: each with its command, date, commit and
machine. `make measurements` measures all of it again and writes this page. [The comparison](comparison.md) explains how
the figures are made, and what they mean.
"""
_SUMMARY = """## In short

Speed of one stream with `hybrid`, relative to the fastest peer of the run that had no memory, and in brackets the
tokens a step.

| model, prompts | fastest peer | drafting off | cold | warm | asked again |
|---|---|---|---|---|---|"""


def markdown(table: Table) -> str:
    """The table and its caption."""
    headings = [str(column.header) for column in table.columns]
    lines = [headings, ["---"] * len(headings), *zip(*(column.cells for column in table.columns), strict=True)]
    shown = "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)
    return f"{shown}\n\n{str(table.caption).strip()}.\n" if table.caption else f"{shown}\n"


def page() -> str:
    """The page, from the JSON files that there are."""
    measured = [measurement for measurement in MEASUREMENTS if measurement.file.exists()]
    return "\n".join([_HEAD, _summary(measured), *map(section, measured)])


def _summary(measured: list[Measurement]) -> str:
    """A line of each measurement of one stream beside a peer: greedy, relative to the fastest peer without a memory."""
    lines = []
    for measurement in measured:
        if not (measurement.arguments.startswith("speed") and "--peer" in measurement.arguments):
            continue
        report = json.loads(measurement.file.read_text(encoding="utf-8"))
        rows = [row for row in report["rows"] if not row["sampled"]]
        peers = [row for row in rows if row["engine"] != "draftwood" and not row["warm"]]
        fastest = max(peers, key=lambda row: row["tokens_per_s"])
        drafts = "" if fastest["strategy"] == "none" else f", {fastest['strategy']}"
        ours = [row for row in rows if row["engine"] == "draftwood" and row["strategy"] in ("none", "hybrid")]
        cells = [_beside(row, fastest) for row in ours]
        lines.append(f"| {measurement.heading} | {fastest['engine']}{drafts} | {' | '.join(cells)} |")
    return "\n".join([_SUMMARY, *lines, ""])


def _beside(row: dict[str, Any], peer: dict[str, Any]) -> str:
    return f"{row['tokens_per_s'] / peer['tokens_per_s']:.2f} ({row['acceptance_length']:.2f})"


def section(measurement: Measurement) -> str:
    report = json.loads(measurement.file.read_text(encoding="utf-8"))
    run, busy = report["run"], report.get("busy")
    load = "" if busy is None else f"; other processes took {busy:.0%} of the CPU time"
    warning = " **Too much for figures to rely on.**" if busy is not None and busy >= BUSY else ""
    facts = f"{run['date']}, commit `{run['commit']}`, {run['cores']} cores of {run['processor']}{load}.{warning}"
    table = markdown(measurement.table(report["rows"]))
    return "\n".join([f"## {measurement.heading}\n", f"```sh\n{run['command']}\n```\n", f"{facts}\n", table])
