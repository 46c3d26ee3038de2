"""`draftwood bench soak`: mixed traffic on a real service for a long time, to find leaks.

The traffic mixes sampling settings, strategies, output formats, abandoned and late answers, invalid requests, long
prompts, more tenants than the service keeps, reconnecting clients, and less KV memory than the running requests need.
Memory, threads and file descriptors of the service's processes are sampled. A line is fitted through the floor of the
samples after the warm-up, which is the first half of the time, and its rise is bounded (`growth`). After each of four
rounds the traffic stops and all request slots must be free.

A bounded cache looks like a leak while it fills. So the KV memory and the kernel caches are filled before the first
sample, the service keeps few kernels, and tenants' memories are small enough to fill during the warm-up.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from draftwood_benchmarks.harness.engines import EngineName, server_on
from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.report import BenchmarkError, OutputOptions, console, require
from draftwood_benchmarks.harness.server_process import server_process
from tests.system.soak.growth import BOUNDS, Growth, Sample, growth_of
from tests.system.soak.run import KEPT_TENANTS, KV_CONTEXTS, MOST_FAILURES, Soaked, soak_service
from draftwood_client.cli.options import command

WARM_UP = 0.5
"""Share of the time in which growth does not count: caches and memories fill."""
_RUNNING, _WAITING = 8, 16
_MEMORY_TOKENS = 2048
"""Of a tenant; a few answers fill it."""
_DRAFT_NODES = 48
_KERNELS = 64
"""Kernels that oneDNN and torch keep each, of 0.5 to 1 MiB. With the service's own limits (one kernel for each shape,
width and number of threads) it took half an hour of traffic to fill the caches."""
_LOG_LINES = 40
"""Lines of the service's log in the error message."""


@command
def soak(
    model: ModelOptions,
    output: OutputOptions,
    duration: Annotated[float, typer.Option(min=10.0, help="Seconds of traffic.")] = 1800.0,
    engine: Annotated[EngineName, typer.Option(help="What the service runs on.")] = "draftwood",
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 0,
    max_context: Annotated[int, typer.Option(min=512, help="Tokens of prompt and answer together, at most.")] = 1024,
    memory_bound: Annotated[
        float,
        typer.Option(min=0.0, help="MiB by which memory may grow in the second half of the time."),
    ] = BOUNDS["rss_mib"],
) -> None:
    """Mixed traffic on a real service for a long time, to find leaks of memory, threads, file descriptors and slots.

    Ends with status 1 if something grows beyond its bound, a request slot is lost, a request does not end as expected,
    or the service logs an error.
    """
    out = console()
    output.check()
    require("psutil", "bench soak")
    with chosen_model(model, out) as chosen:
        out.print(f"Serving the {chosen.name} for {duration:g} s.")
        from draftwood_model_runner.runners.torch.machine import KERNEL_CACHES

        on_engine, process = server_on(engine, chosen, eager=True)
        few_kernels = dict.fromkeys(KERNEL_CACHES, str(_KERNELS))
        process["environment"] |= few_kernels
        flags = [*_server_flags(max_context), "--log-level", "error"]
        with server_process(*on_engine, *flags, **process) as server:
            soaked = asyncio.run(soak_service(server, duration, seed, out))
            errors = server.log.read_text(encoding="utf-8", errors="replace").strip()
    warm_up = duration * WARM_UP
    whole = len(soaked.failures) < MOST_FAILURES
    growths = growth_of(soaked.samples, warm_up, {**BOUNDS, "rss_mib": memory_bound}) if whole else []
    out.print(_table(growths, soaked))
    output.write(
        [asdict(sample) for sample in soaked.samples],
        lambda axes: _draw(soaked.samples, warm_up, axes),
        growth=[growth.row() for growth in growths],
        requests=dict(soaked.requests),
        failures=soaked.failures,
        places=soaked.slots,
        free_places=soaked.free_slots,
    )
    if problems := verdict(growths, soaked, errors):
        raise BenchmarkError("; ".join(problems))


def _server_flags(max_context: int) -> list[str]:
    """Small limits, so that queues, tenants and KV memory all reach theirs."""
    limits = {
        "--max-running": _RUNNING,
        "--max-waiting": _WAITING,
        "--max-tenants": KEPT_TENANTS,
        "--max-context": max_context,
        "--max-draft-nodes": _DRAFT_NODES,
        "--kv-cache-tokens": KV_CONTEXTS * (max_context + _DRAFT_NODES),
        "--memory-tokens": _MEMORY_TOKENS,
    }
    return [part for flag, value in limits.items() for part in (flag, str(value))]


def verdict(growths: list[Growth], soaked: Soaked, errors: str) -> list[str]:
    """Descriptions of all problems found; `errors` is the log of the service."""
    problems = [
        f"{one.name} grew from {one.start:g} to {one.end:g}, by more than {one.bound:g}"
        for one in growths
        if not one.within
    ]
    if any(free != soaked.slots for free in soaked.free_slots):
        problems.append(f"of {soaked.slots} request slots, {soaked.free_slots} were free after the rounds")
    if soaked.failures:
        problems.append(f"{len(soaked.failures)} requests did not end as expected; the first: {soaked.failures[0]}")
    if errors:
        problems.append("the service logged:\n" + "\n".join(errors.splitlines()[:_LOG_LINES]))
    return problems


def _table(growths: list[Growth], soaked: Soaked) -> Table:
    table = Table(title=f"{soaked.requests.total()} requests", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("after warm-up", "at the end", "an hour", "may grow", ""):
        table.add_column(heading, justify="right")
    names = {"rss_mib": "memory, MiB", "threads": "threads", "fds": "open files"}
    for one in growths:
        table.add_row(
            names[one.name],
            f"{one.start:.1f}",
            f"{one.end:.1f}",
            f"{one.per_hour:+.1f}",
            f"{one.bound:g}",
            "ok" if one.within else "GROWS",
        )
    free = ", ".join(map(str, soaked.free_slots))
    table.caption = (
        f"the fitted line at both ends, and its slope; of {soaked.slots} request slots, free after each round: {free}"
    )
    return table


def _draw(samples: list[Sample], warm_up: float, axes: Any) -> None:
    times = [sample.seconds for sample in samples]
    axes.plot(times, [sample.rss_mib for sample in samples], label="memory (MiB)")
    axes.axvline(warm_up, color="grey", linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds")
    axes.set_ylabel("resident memory (MiB)")
    counts = axes.twinx()
    counts.plot(times, [sample.threads for sample in samples], color="tab:orange", label="threads")
    counts.plot(times, [sample.fds for sample in samples], color="tab:green", label="open files")
    counts.set_ylim(bottom=0)
    axes.figure.legend(loc="outside upper center", ncols=3)
