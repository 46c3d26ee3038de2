"""A rolling restart of replicas with one store, and what its clients notice."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from draftwood_benchmarks.harness.models import ChosenModel, EngineName, ModelOptions, server_on
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import AsyncClient
from draftwood_memory.store.embedded import EmbeddedServer
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.system.rollout.load import TENANTS, Load, Result, acceptance, by, different
from tests.system.rollout.names import NAME, NameServer
from tests.system.rollout.replicas import Replica, free_port

CONCURRENCY = 6
"""Requests at a time."""
_STORE_BYTES = 1 << 28
_FLAGS = ("--max-running", "4", "--kv-cache-tokens", "16384", "--strategy", "trie", "--audit-share", "0")


@dataclass(frozen=True, slots=True)
class Plan:
    """How replicas are replaced, and under which load.

    Attributes:
        requests: at least.
        questions: that each tenant repeats.
        new_addresses: a replacement gets an address of its own, which clients look up, like a pod; else that of the
            replica before it.
        kill: the second replica is not drained but killed.
        engine: of the replicas.
        replicas: how many.
    """

    requests: int = 60
    questions: int = 3
    max_tokens: int = 40
    new_addresses: bool = False
    kill: bool = False
    engine: EngineName = "draftwood"
    replicas: int = 3


@dataclass(slots=True)
class Report:
    """What clients noticed; acceptance in tokens per decoding step.

    Attributes:
        errors: of the requests that failed after the client's retries, but for those in `cut`.
        cut: requests that failed after their first event because their replica was killed.
        different: answers that are not the first one to the same question.
        acceptance_cold: of the first answers, of tenants that have no memory yet.
        acceptance_before: of as many answers just before the first replica ends.
        acceptance_after: of as many answers after the last one is replaced, by processes that never learned.
    """

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    cut: int = 0
    different: int = 0
    exit_codes: list[int] = field(default_factory=list)
    killed_at: float = float("inf")
    lookups: int = 0
    acceptance_cold: float = 0.0
    acceptance_before: float = 0.0
    acceptance_after: float = 0.0

    @property
    def acceptance_kept(self) -> float:
        """Acceptance length after the rollout, as a share of that before."""
        return self.acceptance_after / self.acceptance_before


def roll_out(plan: Plan) -> Report:
    """Replaces all replicas one after the other while clients ask, on a store of their own. Raises ServerError."""
    with tempfile.TemporaryDirectory(prefix="draftwood-rollout-") as name:
        folder = Path(name)
        with EmbeddedServer(folder / "store", _STORE_BYTES) as store:
            store.wait()
            with _replicas(plan, folder, store.url) as running:
                return asyncio.run(_measure(plan, running))


@contextmanager
def _replicas(plan: Plan, folder: Path, store: str) -> Iterator[list[Replica]]:
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
        for replica in running:
            replica.launch()
        for replica in running:
            replica.wait()
        yield running
    finally:
        for replica in running:
            replica.kill()


async def _measure(plan: Plan, running: list[Replica]) -> Report:
    """Asks and replaces all replicas of `running` meanwhile, each in the list too."""
    names = NameServer({NAME: [one.host for one in running]})
    authority = await names.start()
    fixed = "ipv4:" + ",".join(f"{one.host}:{one.port}" for one in running)
    target = f"dns://{authority}/{NAME}:{running[0].port}" if plan.new_addresses else fixed
    report = Report()
    phase = max(10, plan.requests // 10)
    warm = 2 * len(TENANTS) * plan.questions + phase  # each tenant knows each question
    questions = [(text, plan.max_tokens) for text in read_questions()[0][: plan.questions]]
    try:
        async with AsyncClient(target) as client, asyncio.TaskGroup() as group:
            load = Load([by(client)], questions, plan.requests)
            group.create_task(load.run(CONCURRENCY))
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
    names.hosts[NAME].remove(old.host)
    if plan.kill and number == 1:
        report.killed_at = time.monotonic()
        old.kill()
    else:
        report.exit_codes.append(await asyncio.to_thread(old.drain))
    running[number] = new = replace(old, host=host)
    await asyncio.to_thread(new.start)
    names.hosts[NAME].append(host)


def _summary(report: Report, results: list[Result], phase: int, before: int, after: int) -> Report:
    report.requests = len(results)
    failed = [result for result in results if result.error]
    cut = [one for one in failed if one.cut and one.began < report.killed_at < one.ended]
    report.cut, report.errors = len(cut), [one.error for one in failed if one not in cut]
    report.different = different(results)
    report.acceptance_cold = acceptance(results[:phase])
    report.acceptance_before = acceptance(results[before - phase : before])
    report.acceptance_after = acceptance([result for result in results if result.began >= results[after].ended])
    return report
