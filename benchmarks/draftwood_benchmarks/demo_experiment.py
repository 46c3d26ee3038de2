"""The last part of `draftwood demo`: an experiment on live requests of two tenants, and its report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from draftwood_client import (
    AdminClient,
    Client,
    DraftConfig,
    Experiment,
    ExperimentArm,
    ExperimentReport,
)
from draftwood_client.admin.experiments import Experiments

SERVER_FLAGS = ("--dtype", "float32", "--audit-share", "0.1", "--max-running", "4")
_NAME = "demo"
_BURN_IN = 1 / 8
"""Part of the time that is not counted."""
_AT_ONCE = 4
_MAX_TOKENS = 60
_AUDIT_SECONDS = 5.0
_PHRASINGS = {
    "acme": "{}",
    "umbrella": "Good afternoon. {} I look forward to your reply. Kind regards, a customer",
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of it, for `--json`."""

    requests: int
    seconds: float
    report: ExperimentReport

    def row(self) -> dict[str, Any]:
        """The figures."""
        return {
            "requests": self.requests,
            "seconds": round(self.seconds, 1),
            "arms": {arm.arm: {"units": arm.units, **arm.metrics} for arm in self.report.arms},
            "audited": sum(arm.audited for arm in self.report.arms),
            "differing": sum(arm.differing for arm in self.report.arms),
            "conclusions": [*self.report.conclusions],
        }


def run_experiment(console: Console, target: str, questions: list[str], seconds: float) -> Result:
    """Two tenants ask for so many seconds, four requests at a time, and two strategies share the requests."""
    console.print(Text("\nAn experiment on live requests: trie against hybrid", "bold"))
    console.print(
        "Two tenants ask the same questions in their own words, four at a time, and ask them again. A hash of its id "
        "puts each request into one of two arms. Each tenant has a memory in each arm, which begins empty; what "
        f"arrives in the first {_BURN_IN * seconds:.0f} seconds is not counted."
    )
    with AdminClient(target) as admin, Client(target) as client:
        experiments = admin.experiments
        _start(experiments, _BURN_IN * seconds)
        began = time.monotonic()
        requests = _ask(console, client, experiments, questions, seconds)
        took = time.monotonic() - began
        report = experiments.report(_NAME)
        while time.monotonic() - began < took + _AUDIT_SECONDS:  # audits are made while nothing else is to do
            time.sleep(0.25)
            report = experiments.report(_NAME)
        experiments.stop(_NAME)
    result = Result(requests, took, report)
    _conclude(console, result)
    return result


def _start(experiments: Experiments, burn_in: float) -> None:
    arms = tuple(ExperimentArm(strategy, DraftConfig(strategy)) for strategy in ("trie", "hybrid"))
    experiments.create(_NAME, Experiment(arms=arms, tenants=tuple(_PHRASINGS), burn_in=burn_in))
    experiments.start(_NAME)


def _ask(console: Console, client: Client, experiments: Experiments, questions: list[str], seconds: float) -> int:
    """Sends requests and shows the counts meanwhile; returns how many requests were sent."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("live requests", total=seconds)
    sent = 0
    asking = _questions(questions)
    began = shown_at = time.monotonic()
    with Live(progress, console=console, refresh_per_second=4) as live, ThreadPoolExecutor(_AT_ONCE) as pool:
        running: set[Future[Any]] = set()
        while (elapsed := time.monotonic() - began) < seconds or running:
            while len(running) < _AT_ONCE and elapsed < seconds:
                tenant, text = next(asking)
                running.add(pool.submit(client.chat, text, max_tokens=_MAX_TOKENS, tenant=tenant))
                sent += 1
            done, running = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            if time.monotonic() - shown_at > 1:
                shown_at = time.monotonic()
                progress.update(task, completed=min(elapsed, seconds))
                live.update(Group(progress, _table(experiments.report(_NAME))))
        live.update(Text(""))
    return sent


def _questions(questions: list[str]) -> Iterator[tuple[str, str]]:
    """Tenant and text, without end."""
    for text in cycle(questions):
        for tenant, phrasing in _PHRASINGS.items():
            yield tenant, phrasing.format(text)


def _table(report: ExperimentReport) -> Table:
    table = Table(title_justify="left")
    table.add_column("arm", no_wrap=True)
    for heading in ("requests", "tokens/step", "ms/token", "TTFT ms", "nodes/accepted"):
        table.add_column(heading, justify="right")
    for row in report.arms:
        shown = (
            ("tokens per step", 1, 2),
            ("decode time per token", 1000, 2),
            ("mean time to first token", 1000, 0),
            ("draft nodes per accepted token", 1, 1),
        )
        values = [
            f"{factor * row.metrics[title]:.{digits}f}" if title in row.metrics else "-"
            for title, factor, digits in shown
        ]
        table.add_row(row.arm, str(row.requests), *values)
    return table


def _conclude(console: Console, result: Result) -> None:
    report = result.report
    console.print(_table(report))
    for sentence in report.conclusions:
        console.print(Text("- " + sentence))
    audited, differing = (sum(getattr(arm, name) for arm in report.arms) for name in ("audited", "differing"))
    compared = f"{audited} of the answers were decoded again without drafts: {differing or 'none'} of them differ."
    console.print(Text(f"- {result.requests} requests in {result.seconds:.0f} seconds. {compared}"))
