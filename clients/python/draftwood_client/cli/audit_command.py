"""`draftwood audit`: what the losslessness audit of a server found."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import typer

from draftwood_client.admin.audit import AuditReport
from draftwood_client.cli.answering import AsJson
from draftwood_client.cli.options import ServerOptions, command
from draftwood_client.cli.output import print_json

_SHOWN = 20
"""Differences that are printed; --json has all that the server keeps."""


@command
def audit(connection: ServerOptions, as_json: AsJson = False) -> None:
    """Show how many answers were decoded again without drafting, and which of them differ. For operators."""
    with connection.admin_client() as client:
        report = client.audit_report()
    if as_json:
        print_json(_as_json(report))
    else:
        _print_report(report)


def _print_report(report: AuditReport) -> None:
    rule = "the same bits are promised" if report.exact else f"ties are below {report.tie_bound:.1e}"
    typer.echo(f"{report.model}, {report.dtype}, {report.runner}; {report.share:.0%} of requests; {rule}")
    if report.engine_restarts:
        typer.echo(f"engine restarts: {report.engine_restarts}")
    row = "{:<16} {:<12} {:>9} {:>12} {:>10} {:>7} {:>9} {:>8} {:>10}"
    typer.echo(
        row.format("strategy", "arm", "audited", "tokens", "differing", "ties", "dropped", "failed", "max margin")
    )
    for one in report.counts:
        numbers = one.audited, one.tokens, one.differing, one.ties, one.dropped, one.failed
        typer.echo(row.format(one.strategy, one.arm, *(f"{n:,}" for n in numbers), f"{one.largest_margin:.1e}"))
    if not report.differences:
        return
    row = "{:<20} {:<16} {:<34} {:<16} {:>8} {:>9} {}"
    typer.echo("\n" + row.format("time (UTC)", "tenant", "request", "strategy", "token", "margin", ""))
    for found in report.differences[:_SHOWN]:
        kind = "tie" if found.tie else "DEFECT"
        time, margin = f"{found.time:%Y-%m-%d %H:%M:%S}", f"{found.margin:.1e}"
        typer.echo(row.format(time, found.tenant, found.request_id, found.strategy, found.position, margin, kind))


def _as_json(report: AuditReport) -> dict[str, Any]:
    """All fields; times in ISO 8601, an infinite margin as null, which JSON has no number for."""
    values = asdict(report)
    for found in values["differences"]:
        found["time"] = found["time"].isoformat()
        found["margin"] = _finite(found["margin"])
    for counts in values["counts"]:
        counts["largest_margin"] = _finite(counts["largest_margin"])
    return values


def _finite(margin: float) -> float | None:
    return margin if math.isfinite(margin) else None
