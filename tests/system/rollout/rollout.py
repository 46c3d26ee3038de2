"""A rolling restart of replicas with one store, and what its clients notice."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from draftwood_benchmarks.harness.models import ChosenModel, EngineName, ModelOptions, server_on
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import AsyncClient
from draftwood_memory.store.embedded import EmbeddedServer
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.system.rollout.load import Load, acceptance, ask_all, by, different, remembered
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
    """What clients noticed. Acceptance is in tokens per decoding step, of questions that are asked at no other time.

    Attributes:
        errors: of the requests that failed after the client's retries, but for those in `cut`.
        cut: requests that failed after their first event because their replica was killed.
        different: answers that are not the first one to the same question.
        acceptance_cold: of the first answers, of tenants that have no memory yet.
        acceptance_before: of the same questions before the first replica ends.
        acceptance_after: the same after the last one is replaced, by processes that never learned it.
    """

    requests: int
    errors: list[str]
    cut: int
    different: int
    lookups: int
    acceptance_cold: float
    acceptance_before: float
    acceptance_after: float

    @property
    def acceptance_kept(self) -> float:
        """Acceptance length after the rollout, as a share of that before."""
        return self.acceptance_after / self.acceptance_before


def roll_out(plan: Plan) -> Report:
    """Replaces all replicas one after the other while clients ask, on a store of their own. Raises ServerError: one did
    not start, or did not end with status 0."""
    with (
        tempfile.TemporaryDirectory(prefix="draftwood-rollout-") as folder,
        EmbeddedServer(Path(folder, "store"), _STORE_BYTES) as store,
    ):
        store.wait()
        with _replicas(plan, store.url) as running:
            return asyncio.run(_measure(plan, running))


@contextmanager
def _replicas(plan: Plan, store: str) -> Iterator[list[Replica]]:
    """Replicas that serve the bundled model in float32, on one thread each. Those in the list at the end are drained.

    Raises:
        BenchmarkError: vLLM is not installed.
    """
    hosts = [f"127.0.0.{number}" for number in range(1, 2 * plan.replicas + 1)]
    port = free_port(hosts)
    model = ChosenModel("bundled model", BUNDLED_MODEL, ModelOptions(dtype="float32", threads=1))
    on_engine, process = server_on(plan.engine, model, eager=True)
    flags = (*on_engine, *_FLAGS, "--store", store)
    running = [Replica(host, port, flags, process) for host in hosts[: plan.replicas]]
    try:
        with ThreadPoolExecutor() as threads:
            [*threads.map(Replica.start, running)]
        yield running
    finally:
        with ExitStack() as ending:
            for replica in running:
                ending.callback(replica.drain)


async def _measure(plan: Plan, running: list[Replica]) -> Report:
    """Asks and replaces all replicas of `running` meanwhile, each in the list too."""
    names = NameServer({NAME: [one.host for one in running]})
    authority = await names.start()
    fixed = "ipv4:" + ",".join(f"{one.host}:{one.port}" for one in running)
    target = f"dns://{authority}/{NAME}:{running[0].port}" if plan.new_addresses else fixed
    phase = max(10, plan.requests // 10)
    texts = read_questions()[0]
    questions = [(text, plan.max_tokens) for text in texts[: plan.questions]]
    kept = [(text, plan.max_tokens) for text in texts[plan.questions :][:3]]
    killed_at = float("inf")
    try:
        async with AsyncClient(target) as client:
            cold = acceptance(await ask_all(by(client), kept))
            before = await remembered(client, kept, 1.5 * cold)
            load = Load([by(client)], questions, plan.requests)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run(CONCURRENCY))
                await load.reach(phase)
                for number in range(plan.replicas):
                    if plan.kill and number == 1:
                        killed_at = time.monotonic()
                    await _replace(plan, number, running, names)
                    await load.reach(len(load.results) + phase // 2)
                load.last.set()
            after = await remembered(client, kept, 0.9 * before)
    finally:
        names.close()
    failed = [result for result in load.results if result.error]
    cut = [one for one in failed if one.cut and one.began < killed_at < one.ended]
    return Report(
        requests=len(load.results),
        errors=[one.error for one in failed if one not in cut],
        cut=len(cut),
        different=different(load.results),
        lookups=names.questions,
        acceptance_cold=cold,
        acceptance_before=before,
        acceptance_after=after,
    )


async def _replace(plan: Plan, number: int, running: list[Replica], names: NameServer) -> None:
    old = running[number]
    host = f"127.0.0.{plan.replicas + number + 1}" if plan.new_addresses else old.host
    names.hosts[NAME].remove(old.host)
    await asyncio.to_thread(old.kill if plan.kill and number == 1 else old.drain)
    running[number] = new = replace(old, host=host)
    await asyncio.to_thread(new.start)
    names.hosts[NAME].append(host)
