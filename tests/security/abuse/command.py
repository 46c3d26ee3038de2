"""`draftwood bench abuse`: the command, and its reports."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tests.security.abuse.attack import Attack, Statuses
from tests.security.abuse.attacks import ATTACKS, FAIR, FAIR_STREAMS, MAX_MESSAGE_BYTES
from tests.security.abuse.gateway_attacks import GATEWAY_FAIR, MOST_FILES
from tests.security.abuse.gateway_probes import probe_gateway
from tests.security.abuse.probes import Seen, probe, settled_mib
from draftwood_benchmarks.harness.engines import EngineName, server_on
from draftwood_benchmarks.harness.gateway_process import GatewayProcess, running_gateway
from draftwood_benchmarks.harness.machine import OtherLoad, warning
from draftwood_benchmarks.harness.models import ModelOptions, chosen_model
from draftwood_benchmarks.harness.report import (
    BenchmarkError,
    OutputOptions,
    console,
    percentile,
    progress,
    require,
    shown,
)
from draftwood_benchmarks.harness.server_process import ServerProcess, server_process
from draftwood_client.cli.options import command
from draftwood_model_runner.errors import InvalidInputError

MOST_HEALTH_MS, MOST_TTFT_RATIO, MOST_GROWTH_MIB = 50.0, 1.2, 256.0
"""The bars: p99 of a health check, p99 TTFT of the neighbour over that beside the fair tenant, and memory kept."""
_WARM_UP = 5.0
"""Seconds of the fair tenant's traffic before anything is measured: the first requests are slower."""
_SETTLE = 3.0
"""Seconds after an attack in which memory may still be given back."""


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one attack.

    Attributes:
        status: the status codes that its calls ended with, the most frequent first, separated by commas.
        calls: how many calls ended with each.
        missed: the bars that it missed, in words; empty if none.
    """

    attack: str
    health_p99_ms: float | None
    neighbour_ttft_p99_ms: float | None
    ttft_vs_fair: float | None
    rss_growth_mib: float
    status: str
    calls: Mapping[str, int]
    missed: tuple[str, ...] = ()


@command
def abuse(
    model: ModelOptions,
    output: OutputOptions,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time of each attack.")] = 10.0,
    engine: Annotated[EngineName, typer.Option(help="What the service runs on.")] = "draftwood",
    attack: Annotated[
        list[str] | None,
        typer.Option(help="An attack; may be given several times. All by default.", show_default=False),
    ] = None,
) -> None:
    """What one caller's attacks cost the others, on a real service: health checks, a neighbour's TTFT, memory.

    The neighbour asks one short question after the other. The first row is not an attack: a well-behaved tenant takes
    its share of the slots. Attacks named http-... are on a gateway that may have 1,024 files open, and all of that is
    measured through it; http-fair is the first row of these. Ends with status 1 if a bar is missed: health checks in
    50 ms (p99), the neighbour's TTFT at most 1.2 times that of the first row (p99), at most 256 MiB kept, and every
    call ended with a status that tells the caller what to change.
    """
    out = console()
    output.check()
    require("psutil", "bench abuse")
    chosen_attacks = _attacks(attack or [])
    with chosen_model(model, out) as chosen, ExitStack() as stack:
        flags = ["--max-message-bytes", str(MAX_MESSAGE_BYTES), "--max-running", str(2 * FAIR_STREAMS)]
        with out.status("Starting the service"):
            on_engine, process = server_on(engine, chosen, eager=True)
            server = stack.enter_context(server_process(*on_engine, *flags, **process))
            gateway = None
            if any(one.gateway for one in chosen_attacks):
                gateway = stack.enter_context(running_gateway(server.target, most_files=MOST_FILES))
        other_load = OtherLoad()
        rows = asyncio.run(_measure(server, gateway, chosen_attacks, seconds, out))
        busy = other_load.share()
    title = f"{chosen.name}: attacks of {seconds:g} s{warning(busy)}"
    out.print(_table(rows, title))
    missed = [f"{row.attack}: {what}" for row in rows for what in row.missed]
    for line in missed:
        out.print(f"MISSED {line}")
    output.write([asdict(row) for row in rows], lambda axes: _draw(rows, axes), seconds=seconds, busy=busy)
    if missed:
        raise BenchmarkError(f"{len(missed)} bars are missed")


def _attacks(names: list[str]) -> list[Attack]:
    """The fair tenant first, then those named."""
    known = {one.name: one for one in ATTACKS}
    for name in names:
        if name not in known:
            raise InvalidInputError("--attack", name, f"the attacks are {', '.join(known)}")
    fair = {GATEWAY_FAIR if known[name].gateway else FAIR for name in names}
    return [one for one in ATTACKS if not names or one.name in (*names, *fair)]


async def _measure(
    server: ServerProcess, gateway: GatewayProcess | None, attacks: list[Attack], seconds: float, out: Console
) -> list[Row]:
    rows: list[Row] = []
    fair: dict[bool, Row] = {}
    for attack in progress(attacks, "attacking", out):
        attacked = gateway if gateway is not None and attack.gateway else server
        if attack.gateway not in fair:
            await look_during(attacked.target, attack, min(seconds, _WARM_UP))
        before = await settled_mib(attacked.pid, _SETTLE / 3)
        seen, statuses = await look_during(attacked.target, attack, seconds)
        growth = await settled_mib(attacked.pid, _SETTLE) - before
        rows.append(_row(attack.name, seen, statuses, growth, fair.get(attack.gateway)))
        fair.setdefault(attack.gateway, rows[-1])
    return rows


async def look_during(target: str, attack: Attack, seconds: float) -> tuple[Seen, Statuses]:
    """What the probes saw while a process of its own attacked, and the attack's statuses."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.security.abuse.attacker",
        attack.name,
        target,
        str(seconds),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        process.stdin.write(b"\n")
        seen = await (probe_gateway if attack.gateway else probe)(target, seconds)
        answer, _ = await asyncio.wait_for(process.communicate(), 60.0)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise BenchmarkError(f"attack {attack.name} ended with status {process.returncode}")
    return seen, Statuses(**json.loads(answer))


def _row(name: str, seen: Seen, statuses: Statuses, growth: float, fair: Row | None) -> Row:
    health, ttft = _p99_ms(seen.health), _p99_ms(seen.ttfts)
    ratio = None
    if fair is not None and fair.neighbour_ttft_p99_ms and ttft is not None:
        ratio = round(ttft / fair.neighbour_ttft_p99_ms, 3)
    missed = []
    if health is None or health > MOST_HEALTH_MS:
        missed.append(f"health checks took {shown(health, 1)} ms")
    if ratio is not None and ratio > MOST_TTFT_RATIO:
        missed.append(f"the neighbour's TTFT is {ratio:.2f} times the fair one")
    if growth > MOST_GROWTH_MIB:
        missed.append(f"{growth:.0f} MiB were kept")
    if seen.refused:
        missed.append(f"{len(seen.refused)} of the neighbour's requests failed, the first with {seen.refused[0]}")
    if statuses.untyped:
        missed.append(f"a call ended with {statuses.untyped}")
    calls = dict(Counter(statuses.counts).most_common())
    return Row(name, health, ttft, ratio, round(growth, 1), ", ".join(calls), calls, tuple(missed))


def _p99_ms(seconds: list[float]) -> float | None:
    value = percentile(seconds, 99)
    return None if value is None else round(1000 * value, 2)


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("attack", "health p99 ms", "TTFT p99 ms", "x fair", "MiB kept", "calls"):
        table.add_column(heading, justify="left" if heading in ("attack", "calls") else "right")
    for row in rows:
        table.add_row(
            row.attack,
            shown(row.health_p99_ms, 1),
            shown(row.neighbour_ttft_p99_ms, 1),
            shown(row.ttft_vs_fair),
            f"{row.rss_growth_mib:.0f}",
            ", ".join(f"{count} {code}" for code, count in row.calls.items()),
        )
    return table


def _draw(rows: list[Row], axes: Any) -> None:
    names = [row.attack for row in rows]
    axes.barh(names, [row.neighbour_ttft_p99_ms or 0.0 for row in rows], label="neighbour's TTFT, p99")
    axes.barh(names, [row.health_p99_ms or 0.0 for row in rows], height=0.4, label="health check, p99")
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.legend(fontsize=8)
