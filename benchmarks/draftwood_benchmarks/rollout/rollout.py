"""A rolling restart of replicas with one store, and what its clients notice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwood_benchmarks.harness.engines import EngineName, server_on
from draftwood_benchmarks.harness.models import ChosenModel, ModelOptions
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.rollout.load import TENANTS, Load, Result, acceptance, different, longest_gap
from draftwood_benchmarks.rollout.names import NAME, NameServer
from draftwood_benchmarks.rollout.replicas import Replica, free_port
from draftwood_client import AsyncClient
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL

REPLICAS = 3
_CONCURRENCY = 6
_FLAGS = ("--max-running", "4", "--kv-cache-tokens", "16384", "--strategy", "trie", "--audit-share", "0")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        requests: at least.
        questions: that each tenant repeats.
        new_addresses: a replacement gets an address of its own, which clients look up, like a pod; else that of the
            replica before it.
        kill: the second replica is not drained but killed.
        engine: of the replicas.
        replicas: how many.
    """

    requests: int = 1000
    questions: int = 20
    max_tokens: int = 60
    new_addresses: bool = False
    kill: bool = False
    engine: EngineName = "draftwood"
    replicas: int = REPLICAS


@dataclass(slots=True)
class Report:
    """What clients noticed; seconds, and tokens per decoding step.

    Attributes:
        failed: after the client's retries.
        cut: of these, after their first event: a client sends such a request again itself.
        errors: of the failed ones, each once.
        different: answers that are not the first one to the same question.
        acceptance_cold: of the first answers, of tenants that have no memory yet.
        acceptance_before: of as many answers just before the first replica ends.
        acceptance_after: of as many answers after the last one is replaced, by processes that never learned.
    """

    requests: int = 0
    failed: int = 0
    cut: int = 0
    errors: list[str] = field(default_factory=list)
    different: int = 0
    exit_codes: list[int] = field(default_factory=list)
    drain_seconds: list[float] = field(default_factory=list)
    longest_gap: float = 0.0
    longest_request: float = 0.0
    lookups: int = 0
    acceptance_cold: float = 0.0
    acceptance_before: float = 0.0
    acceptance_after: float = 0.0

    @property
    def acceptance_kept(self) -> float:
        """Acceptance length after the rollout, as a share of that before."""
        return self.acceptance_after / self.acceptance_before if self.acceptance_before else 0.0

    def row(self) -> dict[str, Any]:
        return {**asdict(self), "acceptance_kept": self.acceptance_kept}


@contextmanager
def replicas(plan: Plan, folder: Path, store: str) -> Iterator[list[Replica]]:
    """Replicas that serve the bundled model in float32, on one thread each. Those in the list at the end are killed.

    Raises:
        BenchmarkError: vLLM is not installed.
    """
    hosts = [f"127.0.0.{number}" for number in range(1, 2 * plan.replicas + 1)]
    port = free_port(hosts)
    model = ChosenModel("bundled model", BUNDLED_MODEL, ModelOptions(dtype="float32", threads=1))
    on_engine, process = server_on(plan.engine, model, eager=True)
    flags = (*on_engine, *_FLAGS, "--store", store)
    running = [Replica(host, port, folder, flags, **process) for host in hosts[: plan.replicas]]
    try:
        for one in running:
            one.launch()
        for one in running:
            one.wait()
        yield running
    finally:
        for one in running:
            one.kill()


async def measure(plan: Plan, running: list[Replica]) -> Report:
    """Asks and replaces all replicas of `running` meanwhile, each in the list too."""
    names = NameServer([one.host for one in running])
    authority = await names.start()
    fixed = "ipv4:" + ",".join(f"{one.host}:{one.port}" for one in running)
    target = f"dns://{authority}/{NAME}:{running[0].port}" if plan.new_addresses else fixed
    report = Report()
    phase = max(10, plan.requests // 10)
    warm = 2 * len(TENANTS) * plan.questions + phase  # each tenant knows each question
    try:
        async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
            load = Load(client, read_questions()[0][: plan.questions], plan.max_tokens, plan.requests)
            group.create_task(load.run(_CONCURRENCY))
            await load.reach(warm)
            before = len(load.results)
            for number in range(plan.replicas):
                await _replace(plan, number, running, names, report)
                await load.reach(len(load.results) + phase // 2)
            after = len(load.results)
            await load.reach(after + phase)
            load.last.set()
    finally:
        names.close()
    report.lookups = names.questions
    return _summary(report, load.results, phase, before, after)


async def _replace(plan: Plan, number: int, running: list[Replica], names: NameServer, report: Report) -> None:
    old = running[number]
    host = f"127.0.0.{plan.replicas + number + 1}" if plan.new_addresses else old.host
    names.hosts = [one for one in names.hosts if one != old.host]
    if plan.kill and number == 1:
        old.kill()
    else:
        status, seconds = await asyncio.to_thread(old.drain)
        report.exit_codes.append(status)
        report.drain_seconds.append(seconds)
    running[number] = new = replace(old, host=host)
    await asyncio.to_thread(new.start)
    names.hosts = [*names.hosts, host]


def _summary(report: Report, results: list[Result], phase: int, before: int, after: int) -> Report:
    failed = [one for one in results if one.error]
    report.requests, report.failed = len(results), len(failed)
    report.cut = sum(one.cut for one in failed)
    report.errors = sorted({one.error for one in failed})
    report.different = different(results)
    report.longest_gap = longest_gap(results[before:])
    report.longest_request = max(one.ended - one.began for one in results)
    report.acceptance_cold = acceptance(results[:phase])
    report.acceptance_before = acceptance(results[before - phase : before])
    report.acceptance_after = acceptance([one for one in results if one.began >= results[after].ended])
    return report
