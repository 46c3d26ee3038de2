"""`draftwood bench soak`: mixed traffic on a real service for a long time, at the end of which it holds no more.

The traffic is of every kind: sampling settings, strategies, formats, answers that are left or late, bad requests, long
prompts, more tenants than are kept, connections that come and go, and too little KV memory for all who run. Memory,
threads and descriptors of the service's process are sampled all the while; a line is fitted through the floor of what
follows the warm-up, half of the time, and its rise is bounded (`growth`). Four times the traffic stops, and it is
counted how many places for requests are free: exactly as many as there are.

Caches that have a bound are no leak, but would look like one while they fill. So they are filled before the first
sample: the KV memory, with prompts that nobody asks again, and the kernels that oneDNN keeps, of which the service is
told to keep few. Tenants' memories are small, and full before the warm-up ends.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.closed_loop import OWN_CONNECTION
from benchmarks.growth import BOUNDS, MIB, Growth, Sample, growth_of
from benchmarks.load_questions import fitting
from benchmarks.models import ModelOptions, chosen_model
from benchmarks.prompts import read_prompts
from benchmarks.report import BenchmarkError, OutputOptions, console, require
from benchmarks.server_process import ServerProcess, server_process
from benchmarks.soak_traffic import MOST_TOKENS, NotRefusedError, Traffic
from draftwood_client import NO_RETRY, AsyncClient, DraftwoodError, ModelInfo, UnavailableError
from draftwood_client.cli.options import command

ROUNDS = 4
WARM_UP = 0.5
"""Share of the time; what is filled and cached in it is no growth."""
_SAMPLES = 400
_RUNNING, _WAITING = 8, 16
_CLIENTS = 12
_KEPT_TENANTS = 8
_MEMORY_TOKENS = 2048
_DRAFT_NODES = 48
_KV_CONTEXTS = 3
"""The KV memory in whole contexts: fewer than may run, so that sequences give way to each other."""
_KERNELS = 64
"""That oneDNN and torch keep each, of 0.5 to 1 MiB. As many as a service keeps otherwise, one for each shape, width and
number of threads, took half an hour of traffic to fill."""
_PROMPT_LENGTHS = range(1, 65)
"""Prompts of these lengths make more kernels than are kept."""
_REQUESTS_PER_CONNECTION = 50
_MOST_FAILURES = 20
_LOG_LINES = 40
"""After so many the run ends early, and is too short to tell growth."""
_SETTLE = 0.5


@dataclass(slots=True)
class Soaked:
    """What a soak found.

    Attributes:
        places: how many requests the service takes at once, running and waiting.
        under_way: requests that are not answered yet.
        samples: of the service's process, over time.
        requests: how many of each kind ended as they must.
        failures: what went wrong with others.
        free_places: at the end of each round, the places that were free.
    """

    places: int
    under_way: int = 0
    samples: list[Sample] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    free_places: list[int] = field(default_factory=list)


@command
def soak(
    model: ModelOptions,
    output: OutputOptions,
    duration: Annotated[float, typer.Option(min=10.0, help="Seconds of traffic.")] = 1800.0,
    seed: Annotated[int, typer.Option(help="Of the traffic.")] = 0,
    max_context: Annotated[int, typer.Option(min=512, help="Tokens of prompt and answer at most.")] = 1024,
    memory_bound: Annotated[
        float,
        typer.Option(min=0.0, help="MiB that memory may grow after the warm-up, the first half of the time."),
    ] = BOUNDS["rss_mib"],
) -> None:
    """Mixed traffic on a real service for a long time: memory, threads, descriptors and places must not grow or leak.

    Ends with status 1 if something grows beyond its bound, a place for requests is lost, a request ends as it must
    not, or the service logs an error.
    """
    out = console()
    output.check()
    require("psutil", "bench soak")
    flags = ["--max-running", str(_RUNNING), "--max-waiting", str(_WAITING), "--max-tenants", str(_KEPT_TENANTS)]
    flags += ["--max-context", str(max_context), "--max-draft-nodes", str(_DRAFT_NODES)]
    flags += ["--kv-cache-tokens", str(_KV_CONTEXTS * (max_context + _DRAFT_NODES))]
    flags += ["--memory-tokens", str(_MEMORY_TOKENS)]
    with chosen_model(model, out) as chosen:
        out.print(f"Serving the {chosen.name} for {duration:g} s.")
        from model_runner.runners.torch.machine import KERNEL_CACHES

        few_kernels = dict.fromkeys(KERNEL_CACHES, str(_KERNELS))
        with server_process(*chosen.server_flags, *flags, "--log-level", "error", environment=few_kernels) as server:
            soaked = asyncio.run(_soak(server, duration, seed, out))
            errors = server.log.read_text(encoding="utf-8", errors="replace").strip()
    warm_up = duration * WARM_UP
    whole = len(soaked.failures) < _MOST_FAILURES
    growths = growth_of(soaked.samples, warm_up, {**BOUNDS, "rss_mib": memory_bound}) if whole else []
    out.print(_table(growths, soaked))
    output.write(
        [asdict(sample) for sample in soaked.samples],
        lambda axes: _draw(soaked.samples, warm_up, axes),
        growth=[growth.row() for growth in growths],
        requests=dict(soaked.requests),
        failures=soaked.failures,
        places=soaked.places,
        free_places=soaked.free_places,
    )
    if problems := verdict(growths, soaked, errors):
        raise BenchmarkError("; ".join(problems))


def verdict(growths: list[Growth], soaked: Soaked, errors: str) -> list[str]:
    """What went wrong, in words; `errors` is what the service logged."""
    problems = [
        f"{one.name} grew from {one.start:g} to {one.end:g}, by more than {one.bound:g}"
        for one in growths
        if not one.within
    ]
    if any(free != soaked.places for free in soaked.free_places):
        problems.append(f"of {soaked.places} places for requests, {soaked.free_places} were free after the rounds")
    if soaked.failures:
        problems.append(f"{len(soaked.failures)} requests did not end as they must; the first: {soaked.failures[0]}")
    if errors:
        problems.append("the service logged:\n" + "\n".join(errors.splitlines()[:_LOG_LINES]))
    return problems


async def _soak(server: ServerProcess, duration: float, seed: int, out: Console) -> Soaked:
    async with AsyncClient(server.target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, read_prompts(None), MOST_TOKENS)
        with out.status("Filling caches"):
            await fill_caches(client, info)
    traffic = Traffic(info, prompts, tenants=2 * _KEPT_TENANTS)
    soaked = Soaked(places=info.max_running_requests + info.max_waiting_requests)
    watch = asyncio.create_task(_watch(server.pid, soaked, duration, out))
    try:
        for round_ in range(ROUNDS):
            end = time.monotonic() + duration / ROUNDS
            async with asyncio.TaskGroup() as group:
                for i in range(_CLIENTS):
                    draw = random.Random(f"{seed}-{round_}-{i}")
                    group.create_task(_customer(server.target, traffic, draw, end, soaked))
            soaked.free_places.append(await free_places(server.target, info))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return soaked


async def fill_caches(client: AsyncClient, info: ModelInfo) -> None:
    """Brings all that the service keeps for reuse to its bound, as far as that depends on traffic."""
    draw = random.Random("caches")

    async def read(length: int) -> None:
        prompt = [draw.randrange(info.vocab_size) for _ in range(length)]
        await client.generate(prompt, max_tokens=1, tenant="caches")

    for length in _PROMPT_LENGTHS:
        await read(min(length, info.max_context_tokens - 1))
    for _ in range(2 * _KV_CONTEXTS):
        await read(info.max_context_tokens - 1)


async def _customer(target: str, traffic: Traffic, draw: random.Random, end: float, soaked: Soaked) -> None:
    """Sends one request after the other; takes a new connection now and then."""
    while time.monotonic() < end and len(soaked.failures) < _MOST_FAILURES:
        async with AsyncClient(target, retry=NO_RETRY, channel_options=OWN_CONNECTION) as client:
            for _ in range(draw.randrange(1, _REQUESTS_PER_CONNECTION)):
                if time.monotonic() >= end:
                    break
                soaked.under_way += 1
                try:
                    soaked.requests[await traffic.send(client, draw)] += 1
                except (DraftwoodError, NotRefusedError) as error:
                    soaked.failures.append(f"{type(error).__name__}: {error}")
                finally:
                    soaked.under_way -= 1


async def free_places(target: str, info: ModelInfo) -> int:
    """How many requests a service without traffic takes at once, before it refuses one; and it then answers as many.

    Raises:
        DraftwoodError: of the client; a request that it took was not answered.
    """
    places = info.max_running_requests + info.max_waiting_requests
    taken = 0
    async with AsyncClient(target, retry=NO_RETRY) as client:
        await asyncio.sleep(_SETTLE)  # for the last answers' places to come back
        async with AsyncExitStack() as stack:
            try:
                while taken <= places:
                    endless = client.stream([0], ignore_eos=True, drafting=False, tenant="places")
                    await stack.enter_async_context(endless)
                    taken += 1
            except UnavailableError:
                pass
        await asyncio.sleep(_SETTLE)
        again = (client.generate([0], ignore_eos=True, max_tokens=4, tenant="places", timeout=60) for _ in range(taken))
        await asyncio.gather(*again)
    return taken


async def _watch(pid: int, soaked: Soaked, duration: float, out: Console) -> None:
    """Samples the service's process and its engine's until it is cancelled, with a bar that grows meanwhile."""
    import psutil

    service = psutil.Process(pid)
    started = time.monotonic()
    columns = (TextColumn("{task.description:44}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=out, refresh_per_second=1, transient=True) as bar:
        task = bar.add_task("", total=duration)
        while True:
            seconds = time.monotonic() - started
            with suppress(psutil.NoSuchProcess):  # requests fail then, and say so
                processes = [service, *service.children(recursive=True)]
                rss = sum(own_bytes(process.memory_info()) for process in processes) / MIB
                threads = sum(process.num_threads() for process in processes)
                fds = sum(process.num_fds() for process in processes)
                soaked.samples.append(Sample(round(seconds, 3), round(rss, 3), threads, fds, soaked.under_way))
                said = f"{soaked.requests.total()} requests, {rss:.0f} MiB, {threads} threads"
                bar.update(task, completed=seconds, description=said)
            await asyncio.sleep(duration / _SAMPLES)


def own_bytes(memory: Any) -> int:
    """Resident memory without the pages of files and libraries, which come and go as the system likes.

    Args:
        memory: of `psutil.Process.memory_info`; where it does not tell them apart, all counts.
    """
    return int(memory.rss - getattr(memory, "shared", 0))


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
    free = ", ".join(map(str, soaked.free_places))
    table.caption = (
        f"the fitted line at both ends, and its slope; of {soaked.places} places for requests, free after each round:"
        f" {free}"
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
