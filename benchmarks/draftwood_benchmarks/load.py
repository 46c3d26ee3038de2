"""`draftwood bench load`: throughput and latency of a real service with many clients at once, drafting on and off.

The service runs in a process of its own, the clients in this one. Drafting on and off alternate on the same service, so
that other load on the machine slows both alike. A peer is measured before and after them, in its own process and
without gRPC.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, cast

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from draftwood_benchmarks.closed_loop import Questions, Window, closed_loop, fitting
from draftwood_benchmarks.harness.models import (
    ChosenModel,
    EngineName,
    ModelOptions,
    chosen_model,
    describe_served,
    server_on,
)
from draftwood_benchmarks.harness.prompts import SAMPLED, read_prompts
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OtherLoad,
    PictureOptions,
    Rows,
    console,
    half_range,
    percentile,
    table,
    warning,
)
from draftwood_benchmarks.harness.servers import server_process
from draftwood_benchmarks.peers.process import (
    AskedOptions,
    MeasuredPeers,
    PeerState,
)
from draftwood_client import AsyncClient, GenerateOptions, ModelInfo
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidValueError

ORDER = (False, True, True, False)
"""Drafting in the windows of one concurrency; a steady drift of the machine's speed cancels out. A peer has a window
before and one after them."""
_FASTER = 2
"""Questions prepared for a window with drafting, relative to those answered without. Where drafting answers more, the
window ends early."""
_SPARE_SLOTS = 8
"""Request slots of the service beyond the number of clients, so that none is refused."""


@dataclass(frozen=True)
class LoadOptions(AskedOptions):
    """The options of the command but those of the model."""

    concurrency: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of clients at once.")] = "1,8,32,64"
    duration: Annotated[
        float, typer.Option(min=1.0, help="Seconds at each concurrency, for drafting on and off each.")
    ] = 20.0
    engine: Annotated[EngineName, typer.Option(help="What the service runs on.")] = "draftwood"
    strategy: Annotated[
        str | None, typer.Option(help="Drafting strategy; the default of the service if unset.", show_default=False)
    ] = None
    warm: Annotated[int, typer.Option(min=0, help="Prompts, the last ones, that memories learn from first.")] = 60

    @property
    def levels(self) -> list[int]:
        """The concurrencies. Raises InvalidValueError."""
        return read_levels(self.concurrency)

    def flags(self) -> list[str]:
        """Of the service. One whose engine rests would decode answers again, beside the peer that is measured."""
        clients = max(self.levels)
        flags = ["--max-running", str(clients), "--max-waiting", str(clients + _SPARE_SLOTS), "--audit-share", "0"]
        flags += ["--prefix-cache", "false"]  # nor have the peers one: prompts come again in each window
        return flags if self.strategy is None else [*flags, "--strategy", self.strategy]


@command
def load(model: ModelOptions, output: PictureOptions, options: LoadOptions) -> None:
    """Throughput and latency of a real service at several concurrencies, with drafting (warm memory) and without. Peers
    decode greedily all the same.

    Ends with status 1 if any request fails.
    """
    import uvloop

    _ = options.peers  # raises before anything is loaded
    texts, flags = read_prompts(options.prompts), options.flags()
    with chosen_model(model) as chosen, ExitStack() as stack:
        on_engine, process = server_on(options.engine, chosen)
        with console.status("Starting the service"):
            server = stack.enter_context(server_process(*on_engine, *flags, **process))
        other_load = OtherLoad()
        info, measured, peers = uvloop.run(_measure(server.target, texts, options, chosen, stack))
        busy = other_load.share()
    rows, name = _rows(measured, peers), describe_served(chosen, info)
    title = f"{name}\n{info.default_strategy} after {options.warm} other prompts"
    title += f"{'; sampled' * options.sampled}{warning(busy)}"
    output.draw(lambda axes: draw(rows, title, axes))
    output.report(
        table_of(rows, title),
        rows,
        model=name,
        runs_on=info.abilities.engine,
        strategy=info.default_strategy,
        latency_unit="ms",
        vocabulary=info.vocab_size,
        sampled=options.sampled,
        busy=busy,
    )
    if errors := [result.error for window in measured.values() for result in window.results if result.error]:
        raise BenchmarkError(f"{len(errors)} requests failed; the first: {errors[0]}")


def _rows(measured: dict[tuple[int, bool], Window], peers: MeasuredPeers) -> Rows:
    """The rows of the report, by concurrency, those of peers first."""
    windows = sorted(peers.windows.items(), key=lambda item: item[0], reverse=True)
    rows = [peer_row(level, window, peers.fastest(level), state) for (level, state), window in windows]
    rows += [row_of(*case, window, peers.fastest(case[0])) for case, window in sorted(measured.items())]
    return sorted(rows, key=lambda row: row["concurrency"])


def read_levels(text: str) -> list[int]:
    """The concurrencies, ascending. Raises InvalidValueError."""
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isascii() and number.isdigit() and 1 <= int(number) <= 4096 for number in numbers):
        raise InvalidValueError("concurrency", text, "it must be numbers from 1 to 4096, separated by commas")
    return sorted(set(map(int, numbers)))


async def _measure(
    target: str, texts: list[str], options: LoadOptions, chosen: ChosenModel, stack: ExitStack
) -> tuple[ModelInfo, dict[tuple[int, bool], Window], MeasuredPeers]:
    """The model, what its clients measured by (concurrency, drafting), and the windows of peers, which end with the
    stack."""
    import torch

    max_tokens, warm = options.max_tokens, options.warm
    async with AsyncClient(target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, texts, max_tokens)
        ids = [list((await client.tokenize(prompt)).token_ids) for prompt in prompts]
    if len(prompts) <= warm:
        raise BenchmarkError(f"{len(prompts)} prompts fit the model; {warm} to warm up with leave none to measure")
    split = len(prompts) - warm
    generation = cast(GenerateOptions, {"max_tokens": max_tokens, **(SAMPLED if options.sampled else {})})
    questions = Questions(target, prompts[:split], prompts[split:], generation)
    clients = max(options.levels)
    first = islice(questions.plain(), clients)  # slower: KV memory is written for the first time
    await closed_loop(target, clients, first, math.inf)
    seconds, threads = options.duration / ORDER.count(False), chosen.options.threads or torch.get_num_threads()
    processes = options.running_peers(stack, chosen, info.dtype, info.device, threads=threads, streams=clients)
    peers = MeasuredPeers(processes, ids[:split], ids[split:], max_tokens, seconds, clients)
    measured: dict[tuple[int, bool], Window] = {}
    windows = [(level, number, drafting) for level in options.levels for number, drafting in enumerate(ORDER)]
    columns = (TextColumn("{task.description:38}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task("", total=len(windows))
        for level, number, drafting in windows:
            if number == 0:
                bar.update(task, description=f"{level} clients, peers")
                peers.measure(level)
            if drafting:
                bar.update(task, description=f"{level} clients: warming up memories")
                await questions.prepare(level + _FASTER * len(measured[level, False].results))
            bar.update(task, description=f"{level} clients, drafting {'on' if drafting else 'off'}")
            asked = questions.drafted() if drafting else questions.plain()
            window = await closed_loop(target, level, asked, options.duration / ORDER.count(drafting))
            measured[level, drafting] = Window.joined([measured.get((level, drafting), Window()), window])
            bar.advance(task)
            if number == len(ORDER) - 1:
                peers.measure(level)
    return info, measured, peers


OURS = "draftwood"


def row_of(concurrency: int, drafting: bool, window: Window, peer: Window | None = None) -> dict[str, Any]:
    """The row of the report; latencies in milliseconds, null if no request has one.

    Args:
        peer: the fastest peer's window of the same concurrency; None if there is none.
    """
    rates = window.rates or [0.0]
    succeeded = [result for result in window.results if result.error is None]
    ttft = [1000 * result.ttft for result in succeeded if result.ttft is not None]
    tpot = [1000 * result.tpot for result in succeeded if result.tpot is not None]
    steps = sum(result.steps for result in succeeded)
    return {
        "engine": OURS,
        "drafts": OURS if drafting else "none",
        "warm": True,
        "concurrency": concurrency,
        "drafting": drafting,
        "tokens_per_s": round(window.tokens_per_s, 2),
        "tokens_per_s_min": round(min(rates), 2),
        "tokens_per_s_max": round(max(rates), 2),
        "vs_peer": None if peer is None else _rounded(window.tokens_per_s / peer.tokens_per_s),
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(percentile(ttft, 99)),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.results) - len(succeeded),
        "requests": len(window.results),
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(sum(result.tokens for result in succeeded) / steps, 3) if steps else None,
    }


def peer_row(concurrency: int, window: Window, fastest: Window | None, state: PeerState) -> dict[str, Any]:
    """The row of an engine without a service, in which no request fails; latencies are null if it does not time its
    requests."""
    return row_of(concurrency, state.drafts != "none", window, fastest) | {
        "engine": state.engine,
        "drafts": state.drafts,
        "warm": state.warm,
        "acceptance_length": round(window.tokens / window.steps, 3) if window.steps else None,
        "errors": None,
        "requests": len(window.results) or None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_of(rows: Rows, title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    plain = {row["concurrency"]: row["tokens_per_s"] for row in rows if row["engine"] == OURS and not row["drafting"]}

    def more(row: dict[str, Any]) -> dict[str, Any]:
        off = plain[row["concurrency"]]
        return {"name": _name(row), "spread": half_range(row), "x_off": row["tokens_per_s"] / off if off else None}

    columns = {"clients": "{concurrency}", "drafts": "{name}", "tok/s": "{tokens_per_s:.0f}", "+-": "{spread:.0%}"}
    columns |= {"x off": "{x_off:.2f}"} | ({"x peer": "{vs_peer:.2f}"} if peer else {})
    columns |= {"accept": "{acceptance_length:.2f}", "TTFT ms": "{ttft_p50:.0f} / {ttft_p99:.0f}"}
    columns |= {"TPOT ms": "{tpot_p50:.1f} / {tpot_p99:.1f}", "err": "{errors}"}
    caption = (
        "+-: half the range of the windows; x off: throughput against drafting off;"
        f"{' x peer: against the fastest peer;' if peer else ''} accept: acceptance length, tokens per step;"
        " TTFT, TPOT: time to the first token and for each later one, median / 99th percentile;"
        " err: requests that failed"
    )
    return table(title, [row | more(row) for row in rows], columns, caption=caption)


def _name(row: dict[str, Any]) -> str:
    if row["engine"] == OURS:
        return "on" if row["drafting"] else "off"
    return f"{row['engine']}, {row['drafts']}{'' if row['warm'] else ' cold'}" if row["drafting"] else row["engine"]


def draw(rows: Rows, title: str, axes: Any) -> None:
    for name in dict.fromkeys(map(_name, rows)):
        mine = [row for row in rows if _name(row) == name]
        name = f"drafting {name}" if mine[0]["engine"] == OURS else name
        axes.plot([r["concurrency"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="clients at once", ylabel="tokens per second")
    axes.legend()
    axes.set_title(title, fontsize=9)
