"""`draftwood bench load`: throughput and latency of a real service with many clients at once, drafting on and off.

The service runs in a process of its own, the clients in this one. Drafting on and off alternate on the same service, so
that other load on the machine slows both alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.load.closed_loop import Window, closed_loop
from benchmarks.load.questions import Questions, fitting, take_from
from benchmarks.shared.models import ModelOptions, chosen_model
from benchmarks.shared.prompts import read_prompts
from benchmarks.shared.report import BenchmarkError, OutputOptions, console, percentile, shown
from benchmarks.shared.server_process import server_process
from draftwood_client import AsyncClient, GenerateOptions, ModelInfo
from draftwood_client.cli.options import command
from model_runner.errors import InvalidValueError

ORDER = (False, True, True, False)
"""Drafting in the windows of one concurrency; a steady drift of the machine's speed cancels out."""
_FASTER = 2
"""Questions prepared for a window with drafting, relative to those answered without. Where drafting answers more, the
window ends early."""
_SPARE_SLOTS = 8
"""Request slots of the service beyond the number of clients, so that none is refused."""
_SPLITS = 2000
"""Random splits of the permutation test; resolves probabilities to about 0.005 at 0.05."""


@command
def load(
    model: ModelOptions,
    output: OutputOptions,
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of clients at once.")] = "1,8,32,64",
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds at each concurrency, for drafting on and off each.")
    ] = 20.0,
    strategy: Annotated[
        str | None, typer.Option(help="Drafting strategy; the default of the service if unset.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default."),
    ] = None,
    warm: Annotated[int, typer.Option(min=0, help="Prompts, the last ones, that memories learn from first.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 200,
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that decode in one batch, at most; by default the number of clients.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Throughput and latency of a real service at several concurrencies, with drafting (warm memory) and without.

    Ends with status 1 if any request fails.
    """
    import uvloop

    out = console()
    output.check()
    levels = read_levels(concurrency)
    running = max_running or max(levels)
    texts = read_prompts(prompts)
    with chosen_model(model, out) as chosen, ExitStack() as stack:
        flags = ["--max-running", str(running), "--max-waiting", str(max(levels) + _SPARE_SLOTS)]
        flags += [] if strategy is None else ["--strategy", strategy]
        with out.status("Starting the service"):
            server = stack.enter_context(server_process(*chosen.server_flags, *flags))
        info, measured = uvloop.run(_measure(server.target, texts, warm, max_tokens, levels, duration, out))
    rows = [
        row_of(level, drafting, window, measured[level, False])
        for (level, drafting), window in sorted(measured.items())
    ]
    name = f"{chosen.name}, {info.parameters / 1e6:,.0f}M parameters, {info.dtype}, {info.device}"
    title = f"{name}\n{info.default_strategy} after {warm} other prompts; at most {running} requests decode together"
    out.print(_table(rows, title))
    out.print(_first_tokens(rows))
    output.write(
        rows, lambda axes: _draw(rows, title, axes), model=name, strategy=info.default_strategy, latency_unit="ms"
    )
    errors = [result.error for window in measured.values() for result in window.results if result.error is not None]
    if errors:
        raise BenchmarkError(f"{len(errors)} requests failed; the first: {errors[0]}")


def read_levels(text: str) -> list[int]:
    """The concurrencies, ascending. Raises InvalidValueError."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() and 1 <= int(number) <= 4096 for number in numbers):
        raise InvalidValueError("concurrency", text, "it must be numbers from 1 to 4096, separated by commas")
    return sorted(set(map(int, numbers)))


def row_of(concurrency: int, drafting: bool, window: Window, plain: Window) -> dict[str, Any]:
    """The row of the report; latencies in milliseconds, null if no request has one.

    Args:
        plain: the window of the same concurrency without drafting.
    """
    succeeded = [result for result in window.results if result.error is None]
    ttft = _ttft(window)
    tpot = [1000 * result.tpot for result in succeeded if result.tpot is not None]
    steps = sum(result.steps for result in succeeded)
    p99, plain_p99 = percentile(ttft, 99), percentile(_ttft(plain), 99)
    return {
        "concurrency": concurrency,
        "drafting": drafting,
        "tokens_per_s": round(window.tokens / window.seconds, 2) if window.seconds else 0.0,
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(p99),
        "ttft_p99_vs_off": _rounded(p99 / plain_p99 if p99 and plain_p99 else None),
        "ttft_p99_chance": _rounded(p_value(ttft, _ttft(plain))),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.results) - len(succeeded),
        "requests": len(window.results),
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(sum(result.tokens for result in succeeded) / steps, 3) if steps else None,
    }


def p_value(values: Sequence[float], others: Sequence[float], percent: float = 99) -> float | None:
    """The p-value of a one-sided permutation test: is the percentile of `values` above that of `others`?

    That is the share of random splits of all values whose ratio of percentiles is at least the measured one. None if
    either is empty. Requests of one burst are not independent, so the true p-value of a small difference is larger.
    """
    if not values or not others:
        return None
    pooled = np.array([*values, *others])
    shuffled = np.random.default_rng(0).permuted(np.tile(pooled, (_SPLITS, 1)), axis=1)
    splits = np.concatenate([pooled[None], shuffled])  # the measured split is one of them
    first, second = (np.percentile(part, percent, axis=1) for part in np.split(splits, [len(values)], axis=1))
    ratios = first / second
    return float(np.mean(ratios >= ratios[0]))


def _ttft(window: Window) -> list[float]:
    """Milliseconds to the first token, of each request that ended without an error."""
    return [1000 * result.ttft for result in window.results if result.error is None and result.ttft is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


async def _measure(
    target: str, texts: list[str], warm: int, max_tokens: int, levels: list[int], duration: float, out: Console
) -> tuple[ModelInfo, dict[tuple[int, bool], Window]]:
    """The model, and what its clients measured, by (concurrency, drafting)."""
    async with AsyncClient(target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, texts, max_tokens)
    if len(prompts) <= warm:
        raise BenchmarkError(f"{len(prompts)} prompts fit the model; {warm} to warm up with leave none to measure")
    split = len(prompts) - warm
    options: GenerateOptions = {"max_tokens": max_tokens}
    questions = Questions(target, prompts[:split], prompts[split:], options)
    await closed_loop(target, 1, take_from([questions.plain()]), math.inf)  # the first answer is slower
    measured: dict[tuple[int, bool], Window] = {}
    windows = [(level, drafting) for level in levels for drafting in ORDER]
    columns = (TextColumn("{task.description:38}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("", total=len(windows))
        for level, drafting in windows:
            if drafting:
                bar.update(task, description=f"{level} clients: warming up memories")
                await questions.prepare(level + _FASTER * len(measured[level, False].results))
            bar.update(task, description=f"{level} clients, drafting {'on' if drafting else 'off'}")
            take = questions.drafted if drafting else questions.plain
            window = await closed_loop(target, level, take, duration / ORDER.count(drafting))
            before = measured.get((level, drafting), Window())
            measured[level, drafting] = Window.joined([before, window])
            bar.advance(task)
    return info, measured


def _table(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("clients", "drafts", "tok/s", "x off", "accept", "TTFT ms", "TPOT ms", "err"):
        table.add_column(heading, justify="right", no_wrap=True)
    plain = {row["concurrency"]: row["tokens_per_s"] for row in rows if not row["drafting"]}
    for row in rows:
        off = plain[row["concurrency"]]
        table.add_row(
            str(row["concurrency"]),
            "on" if row["drafting"] else "off",
            f"{row['tokens_per_s']:.0f}",
            shown(row["tokens_per_s"] / off if off else None),
            shown(row["acceptance_length"]),
            f"{shown(row['ttft_p50'], 0)} / {shown(row['ttft_p99'], 0)}",
            f"{shown(row['tpot_p50'], 1)} / {shown(row['tpot_p99'], 1)}",
            str(row["errors"]),
        )
    table.caption = (
        "x off: throughput against drafting off; accept: acceptance length, tokens per step; TTFT, TPOT: time to the"
        " first token and for each later one, median / 99th percentile; err: requests that failed"
    )
    return table


def _first_tokens(rows: list[dict[str, Any]]) -> Table:
    """The 99th percentile of TTFT with drafting relative to that without, with its p-value."""
    table = Table(title="TTFT, 99th percentile, drafting on", title_justify="left")
    for heading in ("clients", "x off", "p-value"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row["drafting"]:
            table.add_row(str(row["concurrency"]), shown(row["ttft_p99_vs_off"]), shown(row["ttft_p99_chance"]))
    table.caption = (
        "p-value: probability of a ratio as large if drafting made no difference (permutation test); below 0.05 the"
        " difference is significant"
    )
    return table


def _draw(rows: list[dict[str, Any]], title: str, axes: Any) -> None:
    for drafting in (False, True):
        mine = [row for row in rows if row["drafting"] is drafting]
        name = "drafting on" if drafting else "drafting off"
        axes.plot([r["concurrency"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients at once")
    axes.set_ylabel("tokens per second")
    axes.legend()
    axes.set_title(title, fontsize=9)
