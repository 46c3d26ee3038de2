"""`draftwood bench replay`: a strategy on recorded outputs, with studies of its parameters (`--grid`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from draftwood_benchmarks.replay.replay import ChainLimits, replay
from draftwood_benchmarks.replay.sglang_trie import PeerRow, beside_sglang, peer_table
from draftwood_benchmarks.replay.studies import study
from draftwood_benchmarks.replay.suffix import SuffixChains, suffix_chains
from draftwood_benchmarks.replay.trace import TRACES_HELP, Recording, TraceError, read_trace, trace_name
from draftwood_strategies import create


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the report; figures as in `Replayed`."""

    trace: str
    strategy: str
    budget: int
    acceptance_length: float
    draft_us: float
    learn_us_per_token: float
    bytes_per_token: float
    drafted_per_step: float


def replay_command(
    files: Annotated[list[Path], typer.Argument(help=TRACES_HELP)],
    strategy: Annotated[str, typer.Option(help="A registered strategy that reads only token ids.")] = "trie",
    budget: Annotated[list[int], typer.Option(min=1, help="Draft nodes per step; may be given several times.")] = [  # noqa: B006
        16,
        64,
    ],
    learn: Annotated[str | None, typer.Option(help="What the memory learns: outputs, prompts or both.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.")] = None,
    chains: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Draft one chain of at most so many tokens, as vLLM verifies, beside those of its suffix decoding,"
            " if `make peers` has installed it.",
        ),
    ] = None,
    cut: Annotated[float, typer.Option(min=0, max=1, help="Chains end where the probability falls below this.")] = 0.0,
    peer: Annotated[
        Literal["sglang"] | None,
        typer.Option(
            help="Beside the trie of SGLang's n-gram drafts, which `make peers` compiles; nodes as it counts."
        ),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures here: PNG, SVG or PDF.")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Study decoding length x branch length, and memory capacity, instead.")
    ] = False,
) -> None:
    """Replay a strategy over recorded outputs: tokens per step, drafting and learning time, memory per token."""
    console = Console()
    options: dict[str, object] = {} if learn is None else {"learn": learn}
    try:
        create(strategy, **options)
        traces = {trace_name(path): list(read_trace(path, limit)) for path in files}
    except (TraceError, LookupError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if grid:
        study(console, strategy, options, traces, json_file, plot)
        return
    if peer is not None:
        _beside(console, beside_sglang(strategy, options, traces, budget), json_file)
        return
    limits = None if chains is None else ChainLimits(chains, cut)
    rows = _rows(console, strategy, options, traces, budget, limits)
    if chains is not None and (suffix := suffix_chains(traces, chains)):
        rows = [row for name in traces for row in [*(one for one in rows if one.trace == name), _suffix(name, suffix)]]
    console.print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if plot is not None:
        _plot(rows, plot)


def _beside(console: Console, rows: list[PeerRow], json_file: Path | None) -> None:
    console.print(peer_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


def _rows(
    console: Console,
    strategy: str,
    options: dict[str, object],
    traces: dict[str, list[Recording]],
    budgets: list[int],
    chains: ChainLimits | None,
) -> list[Row]:
    rows = []
    with Progress(console=console, transient=True) as progress:
        for name, recordings in traces.items():
            for budget in budgets:
                task = progress.add_task(f"{name}, {budget} nodes", total=len(recordings))
                replay(create(strategy, **options), recordings[:1], budget, chains)  # compiles
                result = replay(create(strategy, **options), _ticking(recordings, progress, task), budget, chains)
                rows.append(
                    Row(
                        trace=name,
                        strategy=strategy,
                        budget=budget,
                        acceptance_length=round(result.acceptance_length, 4),
                        draft_us=round(result.draft_us, 2),
                        learn_us_per_token=round(result.learn_us_per_token, 3),
                        bytes_per_token=round(result.bytes_per_token, 1),
                        drafted_per_step=round(result.drafted_per_step, 3),
                    )
                )
    return rows


def _suffix(trace: str, found: dict[str, SuffixChains]) -> Row:
    """The row of vLLM's suffix decoding, which has no nodes beside its chain."""
    chains = found[trace]
    return Row(
        trace=trace,
        strategy="suffix",
        budget=chains.longest,
        acceptance_length=round(chains.tokens / chains.steps, 4),
        draft_us=round(chains.draft_us, 2),
        learn_us_per_token=round(chains.learn_us_per_token, 3),
        bytes_per_token=0.0,
        drafted_per_step=round(chains.drafted / chains.steps, 3),
    )


def _ticking(recordings: list[Recording], progress: Progress, task: TaskID) -> Iterator[Recording]:
    for recording in recordings:
        yield recording
        progress.advance(task)


def _table(rows: list[Row]) -> Table:
    table = Table(title="Replay of recorded outputs")
    table.add_column("trace", no_wrap=True)
    table.add_column("strategy")
    for heading in ("nodes", "drafted/step", "tokens/step", "draft us", "learn us/token", "bytes/token"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.trace,
            row.strategy,
            str(row.budget),
            f"{row.drafted_per_step:.2f}",
            f"{row.acceptance_length:.3f}",
            f"{row.draft_us:.1f}",
            f"{row.learn_us_per_token:.2f}",
            f"{row.bytes_per_token:.1f}",
        )
    return table


def _plot(rows: Sequence[Row], path: Path) -> None:
    """Bars of acceptance length: a group per trace, a bar per budget."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row.trace for row in rows))
    budgets = sorted({row.budget for row in rows})
    figure = Figure(figsize=(2.0 + 1.4 * len(traces), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(budgets)
    for column, budget in enumerate(budgets):
        found = {row.trace: row.acceptance_length for row in rows if row.budget == budget}
        left = [i - 0.4 + width * (column + 0.5) for i in range(len(traces))]
        bars = axes.bar(left, [found[trace] for trace in traces], width, label=f"{budget} nodes")
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.set_xticks(range(len(traces)), traces, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("tokens per step")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
