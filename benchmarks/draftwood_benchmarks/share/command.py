"""`draftwood bench share`: cost and gain of a memory that replicas share.

The store is the embedded one, a real Valkey server. Services measure acceptance (`replicas`); loading, lag, many
tenants and the cost of a step are measured in this process, with the memory that a service has (`memory`, `step`).
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from draftwood_benchmarks.harness.report import OutputOptions, console, percentile, shown
from draftwood_benchmarks.share.memory import boot, lags, many_tenants
from draftwood_benchmarks.share.replicas import measure_replicas
from draftwood_benchmarks.share.step import step_overhead
from draftwood_client.cli.options import command
from draftwood_memory.store.embedded import EmbeddedServer

_STORE_BYTES = 1 << 30
"""Memory limit of the store; more than the tenants of the benchmark need."""


@command
def share(
    output: OutputOptions,
    questions: Annotated[int, typer.Option(min=1, max=20, help="Measured questions.")] = 20,
    warmup: Annotated[
        int, typer.Option(min=1, max=120, help="Other questions, which the first replica learns from.")
    ] = 60,
    records: Annotated[int, typer.Option(min=10, help="Records whose lag to the other replica is measured.")] = 200,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of rounds with and without the store.")] = 40,
    tenants: Annotated[int, typer.Option(min=0, help="Tenants of 10,000 tokens each; 0 leaves this out.")] = 1000,
) -> None:
    """Cost and gain of a memory that replicas share: loading time, lag, acceptance, step time, many tenants."""
    out = console()
    output.check()
    with tempfile.TemporaryDirectory(prefix="draftwood-share-") as folder, ExitStack() as stack:
        store = stack.enter_context(EmbeddedServer(Path(folder), _STORE_BYTES))
        store.wait()
        row: dict[str, Any] = {}
        with out.status("Loading a tenant of a million tokens"):
            row["boot_s_per_million_tokens"] = asyncio.run(boot(store.url))
        with out.status("Lag"):
            seconds, row["store_bytes_per_token"] = asyncio.run(lags(store.url, records))
            milliseconds = [1000 * lag for lag in seconds]
        row["lag_ms_p50"], row["lag_ms_p99"] = percentile(milliseconds, 50), percentile(milliseconds, 99)
        row |= step_overhead(store.url, pairs, out)
        row |= measure_replicas(store, questions, warmup, out)
        if tenants:
            with out.status(f"{tenants} tenants of 10,000 tokens"):
                row |= asyncio.run(many_tenants(store.url, tenants))
    row = {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}
    out.print(_table(row))
    output.write([row], lambda axes: _draw(milliseconds, axes))


def _table(row: dict[str, Any]) -> Table:
    targets = {
        "boot_s_per_million_tokens": "< 1",
        "store_bytes_per_token": "< 60",
        "lag_ms_p99": "< 100",
        "acceptance_after_share": f"within 3% of {row['acceptance_own']:.2f}",
        "hot_path_overhead": "< 0.01",
        "tenants_late": "0",
    }
    table = Table(title="A memory that replicas share", title_justify="left")
    for heading in ("", "measured", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in row.items():
        table.add_row(
            name.replace("_", " "), shown(value, 3) if isinstance(value, float) else str(value), targets.get(name, "")
        )
    return table


def _draw(milliseconds: list[float], axes: Any) -> None:
    ordered = sorted(milliseconds)
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    axes.set_xlabel("milliseconds until the other replica drafts from a record")
    axes.set_ylabel("share of records")
    axes.set_ylim(0, 1)
