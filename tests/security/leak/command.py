"""`draftwood bench leak`: the command, its cases and its report."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftwood_benchmarks.harness.certificates import make_certificate
from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions, chosen_model
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, require
from draftwood_benchmarks.harness.server_process import server_process
from tests.security.leak.answers import Seen, ask_all
from tests.security.leak.classifier import Features, Guessed, all_features, guess, size_features, time_features
from draftwood_benchmarks.load.questions import fitting
from draftwood_client import AsyncClient, GenerateOptions, TlsConfig
from draftwood_client.cli.options import command


@dataclass(frozen=True, slots=True)
class Case:
    """A way to serve that is measured.

    Attributes:
        flags: of the service.
    """

    name: str
    drafting: bool = True
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Row:
    """What a case leaks, and its price relative to drafting without any defence.

    Attributes:
        accuracy, low, high: share of answers whose prompt was guessed, with its 95% interval: by both, sizes or times,
            whichever cross-validation within the half to train with found best.
        sizes_alone, times_alone: the same, by one of them.
        chance: one over the number of prompts.
        ttft_ratio, tokens_per_second_ratio: of the medians; tokens per second from the request to the last token.
        duration_ratio: of the medians, from the request to the end of the answer.
    """

    case: str
    accuracy: float
    low: float
    high: float
    sizes_alone: float
    times_alone: float
    chance: float
    classifier: str
    bytes_ratio: float
    ttft_ratio: float
    tokens_per_second_ratio: float
    duration_ratio: float


BASE = "drafting on"


@command
def leak(
    model: ModelOptions,
    output: OutputOptions,
    questions: Annotated[int, typer.Option(min=2, help="Different prompts: the first of the bundled questions.")] = 12,
    repetitions: Annotated[int, typer.Option(min=6, help="Answers to each of them; half of them to train with.")] = 10,
    length: Annotated[
        Literal["fixed", "natural"],
        typer.Option(help="fixed: all answers have --max-tokens; natural: they end by themselves."),
    ] = "fixed",
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 48,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampling.")] = 0.3,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once, each with a connection of its own.")] = 2,
    cadence: Annotated[float, typer.Option(help="Seconds of --delta-cadence.")] = 0.05,
    padding: Annotated[int, typer.Option(help="Bytes of --delta-padding.")] = 1024,
    rounding: Annotated[int, typer.Option(min=2, help="Deltas of --delta-rounding, in the last case.")] = 10,
    stream_interval: Annotated[
        float,
        typer.Option(min=0.0, help="Of the service. 0: a message for each step, as of models whose steps take longer."),
    ] = 0.0,
) -> None:
    """What sizes and times of packets tell of an answer, and what hiding them costs.

    Asks a real service over TLS, through a proxy that keeps size and time of each TLS record. A classifier learns the
    prompts by one half of the answers and guesses those of the other half. The memory is warm: each prompt was answered
    once before. Prices are relative to drafting with no defence.
    """
    import uvloop

    out = console()
    output.check()
    require("sklearn", "bench leak")
    cases = _cases(cadence, padding, rounding)
    common = ("--stream-interval", str(stream_interval), "--max-running", str(clients))
    options: GenerateOptions = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": length == "fixed"}
    with chosen_model(model, out) as chosen, _bar(out, len(cases) * questions * repetitions) as (name, done):
        other_load = OtherLoad()
        measured: dict[str, list[Seen]] = {}
        for flags, group in groupby(cases, key=lambda case: case.flags):
            served = list(group)
            name(served[0].name)
            measured |= uvloop.run(
                _answers(chosen, (*common, *flags), served, questions, repetitions, clients, options, done)
            )
        busy = other_load.share()
    with out.status("Guessing prompts"):
        rows = [_row(case.name, measured[case.name], measured[BASE], 1 / questions) for case in cases]
    title = f"{chosen.name}: {questions} prompts, {repetitions} answers each of {max_tokens} tokens"
    title += f"{'' if length == 'fixed' else ' at most'}, temperature {temperature:g}{warning(busy)}"
    out.print(_table(rows, title))
    output.write([asdict(row) for row in rows], lambda axes: _draw(axes, rows), length=length, busy=busy)


def _cases(cadence: float, padding: int, rounding: int) -> list[Case]:
    padded, timed = ("--delta-padding", str(padding)), ("--delta-cadence", str(cadence))
    rounded = ("--delta-rounding", str(rounding))
    return [
        Case("drafting off", drafting=False),
        Case(BASE),
        Case("padding", flags=padded),
        Case("cadence", flags=timed),
        Case("both", flags=(*padded, *timed)),
        Case("both, and length rounded", flags=(*padded, *timed, *rounded)),
    ]


async def _answers(
    chosen: ChosenModel,
    flags: tuple[str, ...],
    cases: list[Case],
    questions: int,
    repetitions: int,
    clients: int,
    options: GenerateOptions,
    done: Callable[[], None],
) -> dict[str, list[Seen]]:
    """Starts the service and asks all questions in each of the cases, after one round that its memory learns from."""
    with TemporaryDirectory(prefix="draftwood-") as folder:
        certificate, key = make_certificate(Path(folder))
        tls = ["--tls-cert", str(certificate), "--tls-key", str(key)]
        pem = certificate.read_bytes()
        with server_process(*chosen.server_flags, *tls, *flags) as server:
            async with AsyncClient(server.target, tls=TlsConfig(pem)) as client:
                info = await client.model_info()
                fit = await fitting(client, info, read_prompts(None), options["max_tokens"] or 1)
            if len(fit) < questions:
                raise BenchmarkError(f"--questions {questions}: only {len(fit)} prompts fit the model")
            prompts = fit[:questions]
            ask = partial(ask_all, server.target, pem, prompts, clients)
            await ask(1, options, lambda: None)
            answers = {}
            for case in cases:
                of_case: GenerateOptions = {"learn": False} if case.drafting else {"drafting": False}
                answers[case.name] = await ask(repetitions, {**options, **of_case}, done)
            return answers


def _row(name: str, answers: list[Seen], base: list[Seen], chance: float) -> Row:
    both, sizes, times = (_guessed(answers, of) for of in (all_features, size_features, time_features))
    best = max((both, sizes, times), key=lambda guessed: guessed.expected)
    return Row(
        name,
        best.accuracy,
        best.low,
        best.high,
        sizes.accuracy,
        times.accuracy,
        chance,
        best.classifier,
        *(
            round(statistics.median(map(of, answers)) / statistics.median(map(of, base)), 3)
            for of in (_bytes, _ttft, _rate, _duration)
        ),
    )


def _guessed(answers: list[Seen], features: Callable[..., Features]) -> Guessed:
    halves = [[one for one in answers if one.repetition % 2 == half] for half in (0, 1)]
    vectors = [np.array([features(one.records, one.sent_at) for one in half]) for half in halves]
    known, others = ([one.prompt for one in half] for half in halves)
    return guess(vectors[0], known, vectors[1], others)


def _bytes(answer: Seen) -> float:
    return answer.bytes


def _ttft(answer: Seen) -> float:
    return answer.first_at - answer.sent_at


def _rate(answer: Seen) -> float:
    return answer.tokens / (answer.last_at - answer.sent_at)


def _duration(answer: Seen) -> float:
    return answer.ended_at - answer.sent_at


def _table(rows: list[Row], title: str) -> Table:
    columns = ("case", "prompt guessed", "sizes alone", "times alone", "bytes x", "TTFT x", "tokens/s x", "duration x")
    table = Table(*columns, title=title, caption=f"chance: {rows[0].chance:.1%}")
    for row in rows:
        table.add_row(
            row.case,
            f"{row.accuracy:.1%} ({row.low:.1%} to {row.high:.1%})",
            f"{row.sizes_alone:.1%}",
            f"{row.times_alone:.1%}",
            *(
                f"{value:.2f}"
                for value in (row.bytes_ratio, row.ttft_ratio, row.tokens_per_second_ratio, row.duration_ratio)
            ),
        )
    return table


@contextmanager
def _bar(out: Console, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Functions that name what runs, and count an answer."""
    columns = (TextColumn("{task.description:26}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name: bar.update(task, description=name), lambda: bar.advance(task)


def _draw(axes: Any, rows: list[Row]) -> None:
    below, above = [row.accuracy - row.low for row in rows], [row.high - row.accuracy for row in rows]
    axes.barh([row.case for row in rows], [row.accuracy for row in rows], xerr=(below, above))
    axes.axvline(rows[0].chance, linestyle="--", color="black", label="chance")
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of answers whose prompt was guessed")
    axes.legend()
