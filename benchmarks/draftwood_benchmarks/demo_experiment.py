"""The last part of `draftwood demo`: an experiment on live requests of two tenants, and its report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from threading import Lock
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftwood_benchmarks.harness.report import table
from draftwood_client import (
    AdminClient,
    ArmRow,
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
        requests = _ask(console, client, questions, seconds)
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


def _ask(console: Console, client: Client, questions: list[str], seconds: float) -> int:
    """Sends requests, some at once; returns how many."""
    asking, turn, end = _questions(questions), Lock(), time.monotonic() + seconds

    def ask(_: int) -> int:
        sent = 0
        while time.monotonic() < end:
            with turn:
                tenant, text = next(asking)
            client.chat(text, max_tokens=_MAX_TOKENS, tenant=tenant)
            sent += 1
        return sent

    with console.status(f"Live requests, {seconds:.0f} seconds"), ThreadPoolExecutor(_AT_ONCE) as pool:
        return sum(pool.map(ask, range(_AT_ONCE)))


def _questions(questions: list[str]) -> Iterator[tuple[str, str]]:
    """Tenant and text, without end."""
    for text in cycle(questions):
        for tenant, phrasing in _PHRASINGS.items():
            yield tenant, phrasing.format(text)


def _table(report: ExperimentReport) -> Table:
    columns = {"arm": "{arm}", "requests": "{requests}", "tokens/step": "{tokens per step:.2f}"}
    columns |= {
        "ms/token": "{ms:.2f}",
        "TTFT ms": "{ttft:.0f}",
        "nodes/accepted": "{draft nodes per accepted token:.1f}",
    }

    def shown(arm: ArmRow) -> dict[str, Any]:
        of_token, ttft = (arm.metrics.get(name) for name in ("decode time per token", "mean time to first token"))
        times = {"ms": of_token and 1000 * of_token, "ttft": ttft and 1000 * ttft}
        return {**arm.metrics, **times, "arm": arm.arm, "requests": arm.requests}

    return table("", map(shown, report.arms), columns, texts=1)


def _conclude(console: Console, result: Result) -> None:
    report = result.report
    console.print(_table(report))
    for sentence in report.conclusions:
        console.print(Text("- " + sentence))
    audited, differing = (sum(getattr(arm, name) for arm in report.arms) for name in ("audited", "differing"))
    compared = f"{audited} of the answers were decoded again without drafts: {differing or 'none'} of them differ."
    console.print(Text(f"- {result.requests} requests in {result.seconds:.0f} seconds. {compared}"))
