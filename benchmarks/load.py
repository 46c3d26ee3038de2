"""`draftwood bench load`: throughput and latency of a real service under so many clients at once, drafting on and off.

The service runs in a process of its own, the clients in this one. Drafting on and off take turns on the same service,
so that what the machine does besides meets both alike.
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

from benchmarks.closed_loop import Window, closed_loop
from benchmarks.load_questions import Questions, fitting, taker
from benchmarks.models import ModelOptions, chosen_model
from benchmarks.prompts import read_prompts
from benchmarks.report import BenchmarkError, OutputOptions, console, percentile, shown
from benchmarks.server_process import server_process
from draftwood_client import AsyncClient, GenerateOptions, ModelInfo
from draftwood_client.cli.options import command
from model_runner.errors import InvalidValueError

ORDER = (False, True, True, False)
"""Drafting in the stretches of one concurrency."""
_FASTER = 2
"""Questions are prepared for drafting to answer so many times as many as plain decoding; a stretch may end early."""
_SPARE_PLACES = 8
_SPLITS = 2000


@command
def load(
    model: ModelOptions,
    output: OutputOptions,
    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Clients at once.")] = "1,8,32,64",
    duration: Annotated[float, typer.Option(min=1.0, help="Seconds at each concurrency, with and without.")] = 20.0,
    strategy: Annotated[
        str | None, typer.Option(help="Who drafts; the service's own default if unset.", show_default=False)
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default."),
    ] = None,
    warm: Annotated[int, typer.Option(min=0, help="Prompts, the last ones, that a memory learns from first.")] = 60,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens an answer.")] = 200,
    max_running: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that decode together; by default all clients'.", show_default=False),
    ] = None,
) -> None:
    """Throughput and latency of a real service at several concurrencies, with drafting (warm) and without.

    Ends with status 1 if any request fails.
    """
    import uvloop

    out = console()
    output.check()
    levels = read_levels(concurrency)
    running = max_running or max(levels)
    texts = read_prompts(prompts)
    with chosen_model(model, out) as chosen, ExitStack() as stack:
        flags = ["--max-running", str(running), "--max-waiting", str(max(levels) + _SPARE_PLACES)]
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
    errors = [asked.error for window in measured.values() for asked in window.asked if asked.error is not None]
    if errors:
        raise BenchmarkError(f"{len(errors)} requests failed; the first: {errors[0]}")


def read_levels(text: str) -> list[int]:
    """The concurrencies, ascending. Raises InvalidValueError."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() and 1 <= int(number) <= 4096 for number in numbers):
        raise InvalidValueError("concurrency", text, "it must be numbers from 1 to 4096, separated by commas")
    return sorted(set(map(int, numbers)))


def row_of(concurrency: int, drafting: bool, window: Window, plain: Window) -> dict[str, Any]:
    """The report's row; latencies in milliseconds, null where no request had any.

    Args:
        plain: the same concurrency without drafting.
    """
    well = [asked for asked in window.asked if asked.error is None]
    ttft = _ttft(window)
    tpot = [1000 * asked.tpot for asked in well if asked.tpot is not None]
    steps = sum(asked.steps for asked in well)
    p99, plain_p99 = percentile(ttft, 99), percentile(_ttft(plain), 99)
    return {
        "concurrency": concurrency,
        "drafting": drafting,
        "tokens_per_s": round(window.tokens / window.seconds, 2) if window.seconds else 0.0,
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(p99),
        "ttft_p99_vs_off": _rounded(p99 / plain_p99 if p99 and plain_p99 else None),
        "ttft_p99_chance": _rounded(chance(ttft, _ttft(plain))),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.asked) - len(well),
        "requests": len(window.asked),
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(sum(asked.tokens for asked in well) / steps, 3) if steps else None,
    }


def chance(values: Sequence[float], others: Sequence[float], percent: float = 99) -> float | None:
    """How often a percentile of `values` is as many times that of `others` as it is, or more, where nothing but chance
    says which are which: the share of random splits of them all, by a permutation test. None where either is empty.

    Requests of one burst are not independent, so small differences come even more often than this says.
    """
    if not values or not others:
        return None
    pooled = np.array([*values, *others])
    shuffled = np.random.default_rng(0).permuted(np.tile(pooled, (_SPLITS, 1)), axis=1)
    splits = np.concatenate([pooled[None], shuffled])  # the one that is counts as one
    first, second = (np.percentile(part, percent, axis=1) for part in np.split(splits, [len(values)], axis=1))
    ratios = first / second
    return float(np.mean(ratios >= ratios[0]))


def _ttft(window: Window) -> list[float]:
    """Milliseconds to the first token of each request that had one and ended well."""
    return [1000 * asked.ttft for asked in window.asked if asked.error is None and asked.ttft is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


async def _measure(
    target: str, texts: list[str], warm: int, max_tokens: int, levels: list[int], duration: float, out: Console
) -> tuple[ModelInfo, dict[tuple[int, bool], Window]]:
    """What is served, and what its clients saw, by concurrency and drafting."""
    async with AsyncClient(target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, texts, max_tokens)
    if len(prompts) <= warm:
        raise BenchmarkError(f"{len(prompts)} prompts fit the model; {warm} to warm up with leave none to measure")
    split = len(prompts) - warm
    options: GenerateOptions = {"max_tokens": max_tokens}
    questions = Questions(target, prompts[:split], prompts[split:], options)
    await closed_loop(target, 1, taker([questions.plain()]), math.inf)  # the first answer of all pays for more
    measured: dict[tuple[int, bool], Window] = {}
    stretches = [(level, drafting) for level in levels for drafting in ORDER]
    columns = (TextColumn("{task.description:38}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("", total=len(stretches))
        for level, drafting in stretches:
            if drafting:
                bar.update(task, description=f"{level} clients: warming up memories")
                await questions.prepare(level + _FASTER * len(measured[level, False].asked))
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
        "x off: throughput against drafting off; accept: tokens a step; TTFT, TPOT: time to the first token and for"
        " each later one, median / 99th percentile; err: requests that failed"
    )
    return table


def _first_tokens(rows: list[dict[str, Any]]) -> Table:
    """The 99th percentile of TTFT with drafting against without, and whether that says anything."""
    table = Table(title="TTFT, 99th percentile, drafting on", title_justify="left")
    for heading in ("clients", "x off", "chance"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row["drafting"]:
            table.add_row(str(row["concurrency"]), shown(row["ttft_p99_vs_off"]), shown(row["ttft_p99_chance"]))
    table.caption = (
        "chance: how often as large a ratio comes about where drafting makes no difference; below 0.05 it is one"
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
