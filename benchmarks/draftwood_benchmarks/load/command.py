"""`draftwood bench load`: throughput and latency of a real service with many clients at once, drafting on and off.

The service runs in a process of its own, the clients in this one. Drafting on and off alternate on the same service, so
that other load on the machine slows both alike. A peer is measured before and after them, in its own process and
without gRPC.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, cast

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from draftwood_benchmarks.harness.engines import EngineName, server_on
from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions, chosen_model, precision
from draftwood_benchmarks.harness.prompts import (
    SAMPLED,
    ContextOption,
    OwnTextOption,
    lengthened,
    positions_of,
    read_prompts,
    told,
)
from draftwood_benchmarks.harness.report import BenchmarkError, PictureOptions, console
from draftwood_benchmarks.harness.server_process import ServerProcess, log_tail, server_process
from draftwood_benchmarks.load.closed_loop import Window, closed_loop
from draftwood_benchmarks.load.peers import MeasuredPeers
from draftwood_benchmarks.load.questions import Questions, fitting, take_from
from draftwood_benchmarks.load.rows import draw, peer_row, row_of, table_of
from draftwood_benchmarks.peers.process import DRAFTS_HELP, Peer, PeerModel, PeerName, check_drafts, started_peer
from draftwood_client import AsyncClient, GenerateOptions, ModelInfo, Prompt
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidValueError

ORDER = (False, True, True, False)
"""Drafting in the windows of one concurrency; a steady drift of the machine's speed cancels out. A peer has a window
before and one after them."""
_FASTER = 2
"""Questions prepared for a window with drafting, relative to those answered without. Where drafting answers more, the
window ends early."""
_OWN_TEXT_SECONDS = 1800.0
"""For the model to write its own text."""
_SPARE_SLOTS = 8
"""Request slots of the service beyond the number of clients, so that none is refused."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of the command but those of the model."""

    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of clients at once.")] = "1,8,32,64"
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds at each concurrency, for drafting on and off each.")
    ] = 20.0
    engine: Annotated[EngineName, typer.Option(help="What the service runs on.")] = "draftwood"
    peer: Annotated[
        PeerName | None, typer.Option(help="Another engine to measure as well; `make peers` installs it.")
    ] = None
    peer_drafts: Annotated[
        list[str] | None, typer.Option(help=f"{DRAFTS_HELP}. none by default.", show_default=False)
    ] = None
    strategy: Annotated[
        str | None, typer.Option(help="Drafting strategy; the default of the service if unset.", show_default=False)
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts of your own: JSON lines or text lines. The bundled questions by default."),
    ] = None
    sampled: Annotated[
        bool,
        typer.Option(
            "--sampled", help="Sample: temperature 0.6, top-k 20, top-p 0.95. The peer decodes greedily all the same."
        ),
    ] = False
    context: ContextOption = None
    warm: Annotated[int, typer.Option(min=0, help="Prompts, the last ones, that memories learn from first.")] = 60
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer, at most.")] = 200
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests that decode in one batch, at most; by default the number of clients.",
            show_default=False,
        ),
    ] = None
    own_text: OwnTextOption = 0

    @property
    def levels(self) -> list[int]:
        """The concurrencies. Raises InvalidValueError."""
        return read_levels(self.concurrency)

    @property
    def running(self) -> int:
        """Requests that decode in one batch, at most."""
        return self.max_running or max(self.levels)

    def flags(self) -> list[str]:
        """Of the service. One whose engine rests would decode answers again, beside the peer that is measured."""
        waiting = max(self.levels) + _SPARE_SLOTS
        flags = ["--max-running", str(self.running), "--max-waiting", str(waiting), "--audit-share", "0"]
        return flags if self.strategy is None else [*flags, "--strategy", self.strategy]

    def generation(self) -> GenerateOptions:
        """Of each request."""
        return cast(GenerateOptions, {"max_tokens": self.max_tokens, **(SAMPLED if self.sampled else {})})


@command
def load(model: ModelOptions, output: PictureOptions, options: LoadOptions) -> None:
    """Throughput and latency of a real service at several concurrencies, with drafting (warm memory) and without.

    Ends with status 1 if any request fails.
    """
    import uvloop

    out = console()
    output.check()
    check_drafts(options.peer, options.peer_drafts or [])
    texts, flags = read_prompts(options.prompts), options.flags()
    positions = positions_of(model, options.context, options.max_tokens)
    with chosen_model(model, out, positions) as chosen, ExitStack() as stack:
        on_engine, process = server_on(options.engine, chosen)
        if options.own_text:
            folder = stack.enter_context(TemporaryDirectory(prefix="draftwood-"))
            flags += ["--own-text-tokens", str(options.own_text), "--model-cache-folder", folder]
        with out.status("Starting the service"):
            server = stack.enter_context(server_process(*on_engine, *flags, **process))
        if options.own_text:
            with out.status("Writing the model's own text"):
                _await_own_text(Path(folder), server)
        start = partial(_start, stack, out, chosen, options)
        other_load = OtherLoad()
        info, measured, peers = uvloop.run(_measure(server.target, texts, options, out, start))
        busy = other_load.share()
    _report(_rows(options.peer, measured, peers), _described(chosen, info), info, options, busy, output, out)
    errors = [result.error for window in measured.values() for result in window.results if result.error is not None]
    if errors:
        raise BenchmarkError(f"{len(errors)} requests failed; the first: {errors[0]}")


def _await_own_text(folder: Path, server: ServerProcess) -> None:
    """Waits until the service has written its file. Raises BenchmarkError."""
    deadline = time.monotonic() + _OWN_TEXT_SECONDS
    while not any(folder.glob("own-text-*.npy")):
        if time.monotonic() > deadline:
            raise BenchmarkError(f"no own text within {_OWN_TEXT_SECONDS:.0f} s\n{log_tail(server.log)}")
        time.sleep(0.2)


def _described(chosen: ChosenModel, info: ModelInfo) -> str:
    """The model, for tables."""
    types = precision(info.dtype, info.weights)
    return f"{chosen.name}, {info.parameters / 1e6:,.0f}M parameters, {types}, {info.device}"


def _report(
    rows: list[dict[str, Any]],
    name: str,
    info: ModelInfo,
    options: LoadOptions,
    busy: float | None,
    output: PictureOptions,
    out: Console,
) -> None:
    """Prints the table and writes the files.

    Args:
        name: of the model, for tables.
        busy: share of the CPU time that other processes took; None where that is not known.
    """
    strategy = f"{info.default_strategy} after {options.warm} other prompts"
    title = f"{name}\n{strategy}; at most {options.running} requests decode together"
    title += f"{told(options.own_text, options.context)}{'; sampled' * options.sampled}{warning(busy)}"
    out.print(table_of(rows, title))
    output.draw(lambda axes: draw(rows, title, axes))
    output.write(
        rows,
        model=name,
        runs_on=info.abilities.engine,
        strategy=info.default_strategy,
        latency_unit="ms",
        vocabulary=info.vocab_size,
        context=options.context,
        sampled=options.sampled,
        own_text=options.own_text,
        busy=busy,
    )


def _rows(
    peer: str | None, measured: dict[tuple[int, bool], Window], peers: MeasuredPeers | None
) -> list[dict[str, Any]]:
    """The rows of the report, by concurrency, the peer's first."""
    rows = [
        row_of(level, drafting, window, None if peers is None else peers.plain(level))
        for (level, drafting), window in sorted(measured.items())
    ]
    if peer is None or peers is None:
        return rows
    of_peer = [
        peer_row(peer, level, windows.window, peers.plain(level), state, windows.steps)
        for (level, state), windows in sorted(peers.found.items())
    ]
    return sorted([*of_peer, *rows], key=lambda row: row["concurrency"])


def read_levels(text: str) -> list[int]:
    """The concurrencies, ascending. Raises InvalidValueError."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() and 1 <= int(number) <= 4096 for number in numbers):
        raise InvalidValueError("concurrency", text, "it must be numbers from 1 to 4096, separated by commas")
    return sorted(set(map(int, numbers)))


def _start(stack: ExitStack, out: Console, chosen: ChosenModel, options: LoadOptions, info: ModelInfo) -> list[Peer]:
    """A process of the peer for each kind of drafts, with the model of the service; they end with the stack."""
    if options.peer is None:
        return []
    import torch

    threads, weights = chosen.options.threads or torch.get_num_threads(), chosen.options.weights
    plain = PeerModel(chosen.path, info.dtype, threads, options.running, prefix_cache=True, weights=weights)
    return [
        stack.enter_context(started_peer(options.peer, info.device, replace(plain, drafts=one), out))
        for one in dict.fromkeys(options.peer_drafts or ["none"])
    ]


async def _measure(
    target: str,
    texts: list[str],
    options: LoadOptions,
    out: Console,
    start_peers: Callable[[ModelInfo], list[Peer]],
) -> tuple[ModelInfo, dict[tuple[int, bool], Window], MeasuredPeers | None]:
    """The model, what its clients measured by (concurrency, drafting), and the peer's windows."""
    max_tokens, warm, context = options.max_tokens, options.warm, options.context
    async with AsyncClient(target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, texts, max_tokens)
        ids = [list((await client.tokenize(prompt)).token_ids) for prompt in prompts]
    if len(prompts) <= warm:
        raise BenchmarkError(f"{len(prompts)} prompts fit the model; {warm} to warm up with leave none to measure")
    split = len(prompts) - warm
    measured_prompts: list[Prompt] = list(prompts[:split])
    if context is not None:
        arrays = [np.array(one, np.int32) for one in ids]
        long = lengthened(arrays[:split], context, arrays, info.max_context_tokens - max_tokens)
        ids[:split] = [one.tolist() for one in long]
        measured_prompts = [*ids[:split]]
    questions = Questions(target, measured_prompts, prompts[split:], options.generation())
    most = max(options.levels)
    first = take_from([questions.plain() for _ in range(most)])  # slower: KV memory is written for the first time
    await closed_loop(target, most, first, math.inf)
    seconds = options.duration / ORDER.count(False)
    processes = start_peers(info)
    peers = MeasuredPeers(processes, ids[:split], ids[split:], max_tokens, seconds, most) if processes else None

    def measure_peers(level: int) -> None:
        if peers is not None:
            peers.measure(level)

    measured: dict[tuple[int, bool], Window] = {}
    windows = [(level, drafting) for level in options.levels for drafting in ORDER]
    columns = (TextColumn("{task.description:38}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("", total=len(windows))
        for level, drafting in windows:
            if (level, False) not in measured:
                bar.update(task, description=f"{level} clients, peer")
                measure_peers(level)
            if drafting:
                bar.update(task, description=f"{level} clients: warming up memories")
                await questions.prepare(level + _FASTER * len(measured[level, False].results))
            bar.update(task, description=f"{level} clients, drafting {'on' if drafting else 'off'}")
            take = questions.drafted if drafting else questions.plain
            window = await closed_loop(target, level, take, options.duration / ORDER.count(drafting))
            before = measured.get((level, drafting), Window())
            measured[level, drafting] = Window.joined([before, window])
            bar.advance(task)
            if len(before.rates) == 1 and not drafting:
                measure_peers(level)
    return info, measured, peers
