"""`draftwood bench service`: what a decoding step takes beside the model's forward pass, in a real service."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table

from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.report import OutputOptions, console, progress
from draftwood_benchmarks.harness.server_process import server_process
from draftwood_benchmarks.load.command import read_levels
from draftwood_client import AsyncClient, ChatMessage, Completion
from draftwood_client.cli.options import command

_TARGET_MS = 0.3
"""Of a step with one stream."""
_TARGET_SHARE = 0.1
"""Of a step with many streams."""


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of a decoding step, medians over the answers.

    Attributes:
        step_ms: from a request's first step to its last token, by the number of its steps.
        model_ms: of it, in forward passes.
        draft_ms: of it, drafting and learning of all streams.
        engine_ms: of it, the rest of the engine's step: scheduling, verification, text.
        between_ms: of it, between two steps: messages to and from the service, and waiting for a core that service or
            client use.
        overhead_ms, share: all but the model, and its part of the step.
    """

    streams: int
    drafting: bool
    step_ms: float
    model_ms: float
    draft_ms: float
    engine_ms: float
    between_ms: float
    overhead_ms: float
    share: float


@command
def service(
    model: ModelOptions,
    output: OutputOptions,
    streams: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of requests at once.")] = "1,64",
    rounds: Annotated[int, typer.Option(min=1, help="How often each number of requests is sent.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens per answer.")] = 128,
) -> None:
    """Milliseconds of a decoding step that the model does not take. The clients run on the same machine."""
    out = console()
    output.check()
    levels = read_levels(streams)
    flags = ("--max-running", str(max(levels)), "--audit-share", "0")
    cases = [(level, drafting) for level in levels for drafting in (False, True)]
    answers: dict[tuple[int, bool], list[Completion]] = {case: [] for case in cases}
    turns = [case for number in range(rounds) for case in (cases if number % 2 else cases[::-1])]
    with chosen_model(model, out) as chosen, server_process(*chosen.server_flags, *flags) as server:
        load = OtherLoad()
        for level, drafting in progress(turns, "rounds", out):
            answers[level, drafting] += uvloop.run(_round(server.target, level, drafting, max_tokens))
    rows = [_row(level, drafting, answers[level, drafting]) for level, drafting in cases]
    busy = load.share()
    title = f"{chosen.name}: milliseconds of a decoding step{warning(busy)}"
    out.print(_table(rows, title))
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows), model=chosen.name, busy=busy)


async def _round(target: str, streams: int, drafting: bool, max_tokens: int) -> list[Completion]:
    texts = islice(cycle(read_prompts(None)), streams)
    async with AsyncClient(target, tenant="service") as client:

        async def ask(text: str) -> Completion:
            return await client.generate(
                [ChatMessage("user", text)],
                drafting=drafting,
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0.0,
                timeout=600.0,
            )

        await client.model_info()  # connected before the first step
        return await asyncio.gather(*map(ask, texts))


def _row(streams: int, drafting: bool, answers: Sequence[Completion]) -> Row:
    def median(seconds: Sequence[float]) -> float:
        return round(1000 * statistics.median(seconds), 4)

    steps = [one.drafting.steps for one in answers]
    wall = [(one.timings.prefill + one.timings.decode) / n for one, n in zip(answers, steps, strict=True)]
    model = [one.drafting.model_time / n for one, n in zip(answers, steps, strict=True)]
    inside = [one.drafting.step_time / n for one, n in zip(answers, steps, strict=True)]
    draft = [streams * one.drafting.draft_time / n for one, n in zip(answers, steps, strict=True)]
    rest = [whole - in_step for whole, in_step in zip(wall, inside, strict=True)]
    engine = [in_step - of_model - of_draft for in_step, of_model, of_draft in zip(inside, model, draft, strict=True)]
    all_but = [whole - of_model for whole, of_model in zip(wall, model, strict=True)]
    share = statistics.median(part / whole for part, whole in zip(all_but, wall, strict=True))
    return Row(
        streams,
        drafting,
        step_ms=median(wall),
        model_ms=median(model),
        draft_ms=median(draft),
        engine_ms=median(engine),
        between_ms=median(rest),
        overhead_ms=median(all_but),
        share=round(share, 4),
    )


def _table(rows: Sequence[Row], title: str) -> Table:
    table = Table("streams", "drafting", "step", "model", "drafts", "engine", "between", "all but model", title=title)
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        times = (row.step_ms, row.model_ms, row.draft_ms, row.engine_ms, row.between_ms)
        total = f"{row.overhead_ms:.3f} ({row.share:.1%})"
        table.add_row(str(row.streams), "on" if row.drafting else "off", *(f"{time:.3f}" for time in times), total)
    table.caption = (
        f"targets (110m, bfloat16, drafting off): {_TARGET_MS} ms with one stream, {_TARGET_SHARE:.0%} with 64"
    )
    return table


def _draw(axes: Any, rows: Sequence[Row]) -> None:
    names = [f"{row.streams}, drafting {'on' if row.drafting else 'off'}" for row in rows]
    left = [0.0] * len(rows)
    for part in ("model", "draft", "engine", "between"):
        widths = [getattr(row, f"{part}_ms") / row.step_ms for row in rows]
        axes.barh(names, widths, left=left, label=part)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlabel("share of a decoding step")
    axes.legend()
