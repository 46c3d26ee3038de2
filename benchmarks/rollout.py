"""`draftwood bench rollout`: replicas that share a store are replaced one after the other, under load."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.shared.prompts import read_questions
from benchmarks.shared.report import BenchmarkError, OutputOptions, console
from benchmarks.shared.server_process import server_process
from draftwood_client import AsyncClient, ChatMessage, Completion, DraftwoodError
from draftwood_client.cli.options import command
from service.memory.store.embedded import EmbeddedServer

_TENANTS = 4
_QUESTIONS = 8
"""Asked again and again, so that memories are warm soon and answers can be compared."""
_STORE_BYTES = 1 << 28
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Replacement:
    """One replica, from its SIGTERM: until it had ended with status 0, and until the next one was ready."""

    drain_seconds: float
    start_seconds: float


@dataclass(slots=True)
class Outcome:
    """What the clients saw.

    Attributes:
        requests: sent, each with the client's own retries.
        errors: of those that failed.
        different: answers that are not those of the same question before.
        ended: when each answer ended, on the clock of `time.perf_counter`.
        tokens, steps: of the answers, by the part of the run: "cold" is the first time of each question.
    """

    requests: int = 0
    errors: list[str] = field(default_factory=list)
    different: int = 0
    ended: list[float] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    tokens: Counter[str] = field(default_factory=Counter)
    steps: Counter[str] = field(default_factory=Counter)

    def take(self, part: str, question: str, answer: Completion) -> None:
        self.ended.append(time.perf_counter())
        self.different += self.answers.setdefault(question, answer.text) != answer.text
        self.tokens[part] += len(answer.token_ids)
        self.steps[part] += answer.drafting.steps

    def acceptance_length(self, part: str) -> float:
        return round(self.tokens[part] / max(self.steps[part], 1), 3)

    @property
    def longest_gap(self) -> float:
        """Seconds between the ends of two answers, at most."""
        ended = sorted(self.ended)
        return max((later - earlier for earlier, later in pairwise(ended)), default=0.0)


@command
def rollout(
    output: OutputOptions,
    replicas: Annotated[int, typer.Option(min=2, max=8, help="Replicas.")] = 3,
    requests: Annotated[int, typer.Option(min=30, help="Requests, at least.")] = 1000,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 6,
    max_tokens: Annotated[int, typer.Option(min=1, help="New tokens per answer.")] = 96,
    grace: Annotated[float, typer.Option(min=1.0, help="Drain grace of a replica, in seconds.")] = 20.0,
) -> None:
    """Replaces each replica once, by SIGTERM, while clients ask without a pause. Ends with status 1 if a request fails.

    The bundled model, greedy; a client that balances over the healthy replicas and retries as usual.
    """
    out = console()
    output.check()
    outcome, replaced = measure(replicas, requests, clients, max_tokens, grace, out)
    row = {
        "replicas": replicas,
        "requests": outcome.requests,
        "failed": len(outcome.errors),
        "different": outcome.different,
        "longest_gap_s": round(outcome.longest_gap, 3),
        "drain_s": round(max(one.drain_seconds for one in replaced), 2),
        "start_s": round(max(one.start_seconds for one in replaced), 2),
        **{f"acceptance_{part}": outcome.acceptance_length(part) for part in ("cold", "before", "during", "after")},
    }
    table = Table("", "measured", "target", title="Rolling restart", title_justify="left")
    targets = {"failed": "0", "different": "0", "acceptance_after": f"about {row['acceptance_before']}"}
    for name, value in row.items():
        table.add_row(name.replace("_", " "), str(value), targets.get(name, ""))
    out.print(table)
    output.write([row], lambda axes: _draw(axes, outcome), replacements=[asdict(one) for one in replaced])
    if outcome.errors:
        raise BenchmarkError(f"{len(outcome.errors)} requests failed; the first: {outcome.errors[0]}")
    if outcome.different:
        raise BenchmarkError(f"{outcome.different} answers differ from those of the same question before")


def measure(
    replicas: int, requests: int, clients: int, max_tokens: int, grace: float, out: Console
) -> tuple[Outcome, list[Replacement]]:
    """Replaces each replica once under load.

    Raises:
        ServerError: a replica did not start, or did not end with status 0.
    """
    ports = _free_ports(replicas)
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="draftwood-"))
        store = stack.enter_context(EmbeddedServer(Path(folder), _STORE_BYTES))
        store.wait()
        flags = ("--store", store.url, "--threads", "1", "--audit-share", "0", "--drain-grace", f"{grace:g}")
        with out.status(f"Starting {replicas} replicas"):
            fleet = [Replica(port, flags) for port in ports]
            for replica in fleet:
                stack.callback(replica.stop)
                replica.start()
        target = "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)
        return uvloop.run(_run(target, fleet, requests, clients, max_tokens, out))


class Replica:
    """A service on a port of its own, which can be started again."""

    def __init__(self, port: int, flags: Sequence[str]) -> None:
        self._flags = ("--port", str(port), *flags)
        self._running: ExitStack | None = None

    def start(self) -> None:
        """Returns once it is ready."""
        self._running = ExitStack()
        self._running.enter_context(server_process(*self._flags, timeout=_START_SECONDS))

    def stop(self) -> None:
        """Sends SIGTERM and waits for the end; raises ServerError unless its status is 0."""
        running, self._running = self._running, None
        if running is not None:
            running.close()


async def _run(
    target: str, fleet: Sequence[Replica], requests: int, clients: int, max_tokens: int, out: Console
) -> tuple[Outcome, list[Replacement]]:
    questions = read_questions()[0][:_QUESTIONS]
    outcome, numbers, part = Outcome(), count(), "cold"
    replaced: list[Replacement] = []
    async with AsyncClient(target) as client:

        async def ask(number: int) -> None:
            question = questions[number % len(questions)]
            outcome.requests += 1
            now = part
            try:
                answer = await client.generate(
                    [ChatMessage("user", question)],
                    tenant=f"tenant-{number // len(questions) % _TENANTS}",
                    max_tokens=max_tokens,
                    temperature=0.0,
                    timeout=120.0,
                )
            except DraftwoodError as error:
                outcome.errors.append(str(error))
            else:
                outcome.take(now, question, answer)

        async def load(until: asyncio.Event, at_least: int) -> None:
            while not until.is_set() or outcome.requests < at_least:
                await ask(next(numbers))

        async def loaded(work: Awaitable[None], at_least: int) -> None:
            ended = asyncio.Event()
            async with asyncio.TaskGroup() as group:
                for _ in range(clients):
                    group.create_task(load(ended, at_least))
                await work
                ended.set()

        quarter = requests // 4
        with out.status("Warming up"):
            for number in range(len(questions)):
                await ask(number)
            part = "warm-up"
            for number in range(2 * _TENANTS * len(questions)):
                await ask(number)
        part = "before"
        with out.status("Before the rollout"):
            await loaded(asyncio.sleep(0), outcome.requests + quarter)
        part = "during"
        with out.status("Replacing the replicas"):
            await loaded(_replace(fleet, replaced), outcome.requests + quarter)
        part = "after"
        with out.status("After the rollout"):
            await loaded(asyncio.sleep(0), max(requests, outcome.requests + quarter))
    return outcome, replaced


async def _replace(fleet: Sequence[Replica], replaced: list[Replacement]) -> None:
    for replica in fleet:
        began = time.perf_counter()
        await asyncio.to_thread(replica.stop)
        ended = time.perf_counter()
        await asyncio.to_thread(replica.start)
        replaced.append(Replacement(ended - began, time.perf_counter() - ended))


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        listening = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [one.getsockname()[1] for one in listening]


def _draw(axes: Any, outcome: Outcome) -> None:
    began = min(outcome.ended)
    seconds = [int(ended - began) for ended in outcome.ended]
    axes.plot(range(max(seconds) + 1), [seconds.count(one) for one in range(max(seconds) + 1)])
    axes.set_xlabel("seconds")
    axes.set_ylabel("answers a second")
    axes.set_ylim(bottom=0)
