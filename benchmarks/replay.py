"""Replays strategies over recorded model outputs: what a draft would have brought, without a model.

A strategy that sees only token ids behaves in a replay exactly as it would with the model that wrote the recording: at
each step it drafts a tree, the longest path that the recorded output follows is accepted, and one more token comes
free. The memory starts empty and grows over the file. A trace is a JSON-lines file, gzipped or not, of objects with
`prompt_ids` and `output_ids`.

Run it with `python -m benchmarks.replay FILE... --budget 16 --budget 64`.
"""

from __future__ import annotations

import gzip
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from strategies import DraftTree, Strategy, create
from strategies.draft import ROOT, Int32Array

Recording = tuple[Int32Array, Int32Array]
"""A prompt and the output that followed it, int32[p] and int32[o], o >= 1."""


class TraceError(ValueError):
    """A trace cannot be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        steps: decoding steps, each one forward pass of the model. The first token of an output comes from the
            prefill and is no step.
        tokens: tokens that the steps wrote.
        accepted: those of them that came from drafts.
        expected: what the scores of all drafts had promised to be accepted.
        draft_us: the median time of a draft, in microseconds.
        learn_us_per_token: time in `start`, `observe` and `close` for each token of prompts and outputs.
        bytes_per_token: size of the strategy's memory for each token in it; 0 where it does not tell.
    """

    steps: int
    tokens: int
    accepted: int
    expected: float
    draft_us: float
    learn_us_per_token: float
    bytes_per_token: float

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a step."""
        return self.tokens / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the report."""

    trace: str
    strategy: str
    budget: int
    acceptance_length: float
    draft_us: float
    learn_us_per_token: float
    bytes_per_token: float


def read_trace(path: Path, limit: int | None = None) -> Iterator[Recording]:
    """The first `limit` recordings of a trace.

    Raises:
        TraceError: a line is no recording, or the file cannot be read.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                yield _recording(line, path, number)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error


def _recording(line: str, path: Path, number: int) -> Recording:
    try:
        row = json.loads(line)
        prompt, output = np.array(row["prompt_ids"], np.int32), np.array(row["output_ids"], np.int32)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}, line {number}: not a recording ({error!r})") from error
    for name, ids in (("prompt_ids", prompt), ("output_ids", output)):
        if ids.ndim != 1 or ids.size == 0 or ids.min() < 0:
            raise TraceError(f"{path}, line {number}: {name} must be a list of one or more ids of at least 0")
    return prompt, output


def accepted_length(tree: DraftTree, continuation: Int32Array) -> int:
    """How many tokens of `continuation`, int32[n], a path of the tree follows."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, length = ROOT, 0
    for token in continuation.tolist():
        child = children.get((node, token))
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(strategy: Strategy, recordings: Iterable[Recording], budget: int) -> Replayed:
    """Replays the recordings one after the other; `strategy` learns as they go."""
    clock = time.perf_counter
    steps = tokens = accepted = seen = 0
    expected = learning = 0.0
    drafting: list[float] = []
    for prompt, output in recordings:
        seen += prompt.size + output.size
        before = clock()
        drafter = strategy.start(prompt)
        drafter.observe(output[:1], None)
        learning += clock() - before
        at = 1
        while at < output.size:
            before = clock()
            tree = drafter.propose(budget)
            drafting.append(clock() - before)
            length = accepted_length(tree, output[at:])
            written = output[at : at + length + 1]
            before = clock()
            drafter.observe(written, None)
            learning += clock() - before
            steps, tokens, accepted = steps + 1, tokens + written.size, accepted + length
            expected += float(tree.scores.sum())
            at += written.size
        before = clock()
        drafter.close()
        learning += clock() - before
    stored = getattr(strategy, "tokens", 0)
    return Replayed(
        steps=steps,
        tokens=tokens,
        accepted=accepted,
        expected=expected,
        draft_us=statistics.median(drafting) * 1e6 if drafting else 0.0,
        learn_us_per_token=learning / seen * 1e6 if seen else 0.0,
        bytes_per_token=getattr(strategy, "nbytes", 0) / stored if stored else 0.0,
    )


def trace_name(path: Path) -> str:
    """The file's name without `.jsonl` and `.gz`."""
    return path.name.removesuffix(".gz").removesuffix(".jsonl")


def replay_command(
    files: Annotated[list[Path], typer.Argument(help="Traces: JSON lines with prompt_ids and output_ids, or .gz.")],
    strategy: Annotated[str, typer.Option(help="A registered strategy that sees only token ids.")] = "trie",
    budget: Annotated[list[int], typer.Option(min=1, help="Draft nodes a step; may be given several times.")] = [  # noqa: B006
        16,
        64,
    ],
    learn: Annotated[str | None, typer.Option(help='What the memory learns: "outputs", "prompts" or "both".')] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of each file.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw them here (PNG, SVG or PDF).")] = None,
    grid: Annotated[
        bool, typer.Option("--grid", help="Study decoding length x branch length, and capacity, instead.")
    ] = False,
) -> None:
    """Replay a strategy over recorded outputs: tokens a step, drafting and learning time, memory."""
    console = Console()
    options: dict[str, object] = {} if learn is None else {"learn": learn}
    try:
        create(strategy, **options)
        traces = {trace_name(path): list(read_trace(path, limit)) for path in files}
    except (TraceError, LookupError, TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if grid:
        from benchmarks.replay_studies import study

        study(console, strategy, options, traces, json_file, plot)
        return
    rows = _rows(console, strategy, options, traces, budget)
    console.print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if plot is not None:
        from benchmarks.replay_studies import plot_rows

        plot_rows(rows, plot)


def _rows(
    console: Console,
    strategy: str,
    options: dict[str, object],
    traces: dict[str, list[Recording]],
    budgets: list[int],
) -> list[Row]:
    rows = []
    with Progress(console=console, transient=True) as progress:
        for name, recordings in traces.items():
            for budget in budgets:
                task = progress.add_task(f"{name}, {budget} nodes", total=len(recordings))
                replay(create(strategy, **options), recordings[:1], budget)  # compiles and warms up
                result = replay(create(strategy, **options), _ticking(recordings, progress, task), budget)
                rows.append(
                    Row(
                        trace=name,
                        strategy=strategy,
                        budget=budget,
                        acceptance_length=round(result.acceptance_length, 4),
                        draft_us=round(result.draft_us, 2),
                        learn_us_per_token=round(result.learn_us_per_token, 3),
                        bytes_per_token=round(result.bytes_per_token, 1),
                    )
                )
    return rows


def _ticking(recordings: list[Recording], progress: Progress, task: int) -> Iterator[Recording]:
    for recording in recordings:
        yield recording
        progress.advance(task)  # type: ignore[arg-type]


def _table(rows: list[Row]) -> Table:
    table = Table(title="Replay: what drafts would have brought")
    table.add_column("trace", no_wrap=True)
    table.add_column("strategy")
    for heading in ("nodes", "tokens/step", "draft us", "learn us/token", "bytes/token"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.trace,
            row.strategy,
            str(row.budget),
            f"{row.acceptance_length:.3f}",
            f"{row.draft_us:.1f}",
            f"{row.learn_us_per_token:.2f}",
            f"{row.bytes_per_token:.1f}",
        )
    return table


if __name__ == "__main__":
    typer.run(replay_command)
