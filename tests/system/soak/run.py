"""A soak: mixed traffic on a real service, and samples of its processes.

The traffic mixes sampling settings, strategies, output formats, abandoned and late answers, invalid requests, long
prompts, more tenants than the service keeps, reconnecting clients, and less KV memory than the running requests need.
After each of four rounds the traffic stops and all request slots must be free.

A bounded cache looks like a leak while it fills. So the KV memory and the kernel caches are filled before the first
sample, the service keeps few kernels, and tenants' memories are small enough to fill during the warm-up.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import psutil

from draftwood_benchmarks.closed_loop import OWN_CONNECTION, fitting
from draftwood_benchmarks.harness.models import ChosenModel, EngineName, ModelOptions, server_on
from draftwood_benchmarks.harness.prompts import read_prompts
from draftwood_benchmarks.harness.servers import ServerProcess, server_process
from draftwood_client import NO_RETRY, AsyncClient, DraftwoodError, ModelInfo, RetryPolicy, UnavailableError
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from draftwood_model_runner.runners.torch.packed_linear import KERNEL_CACHES
from tests.process_memory import MIB, own_bytes
from tests.system.soak.growth import WARM_UP, Growth, Sample, growth_of
from tests.system.soak.traffic import MAX_TOKENS, NotRefusedError, Traffic

ROUNDS = 4
"""Stretches of traffic; after each one the free request slots are counted."""
MAX_FAILURES = 20
"""A run with this many failed requests ends early, too short to measure growth."""
KEPT_TENANTS = 8
KV_CONTEXTS = 3
"""KV memory in whole contexts: fewer than the requests that run, so that some are preempted."""
_CLIENTS = 12
"""More than run together, fewer than the service admits."""
_REQUESTS_PER_CONNECTION = 50
"""Upper bound of the random number after which a client reconnects."""
_SAMPLES = 400
"""Samples of the processes over the whole run."""
_PROMPT_LENGTHS = range(1, 65)
"""Tokens. Each length compiles kernels of its own; together more than the service keeps."""
_FREED_LATER = RetryPolicy(max_attempts=5, initial_backoff=0.5)
"""The slots of requests that have just ended are released a moment later."""
_MAX_CONTEXT, _DRAFT_NODES = 512, 48
_SMALL_LIMITS = [
    *("--max-running", "8"),
    *("--max-waiting", "16"),
    *("--max-tenants", str(KEPT_TENANTS)),
    *("--max-context", str(_MAX_CONTEXT)),
    *("--max-draft-nodes", str(_DRAFT_NODES)),
    *("--kv-cache-tokens", str(KV_CONTEXTS * (_MAX_CONTEXT + _DRAFT_NODES))),
    *("--memory-tokens", "2048"),
]
"""With which queues, tenants, their memories, which a few answers fill, and KV memory all reach their limits."""
_KERNELS = 64
"""Kernels that oneDNN and torch keep each, of 0.5 to 1 MiB. With the service's own limits (one kernel for each shape,
width and number of threads) it took half an hour of traffic to fill the caches."""
_LOG_LINES = 40
"""Lines of the service's log that are reported."""


@dataclass(slots=True)
class Soaked:
    """The result of a soak.

    Attributes:
        slots: request slots of the service, running and waiting.
        requests: number of requests that ended as expected, by kind; `failures` describes the others.
        free_slots: free request slots at the end of each round.
        log: what the service logged, errors alone.
    """

    slots: int
    under_way: int = 0
    samples: list[Sample] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    free_slots: list[int] = field(default_factory=list)
    log: str = ""

    def growths(self, duration: float, memory_bound: float) -> list[Growth]:
        """Growth after the warm-up; none if the run ended early. `memory_bound` is in MiB."""
        whole = len(self.failures) < MAX_FAILURES
        return growth_of(self.samples, duration * WARM_UP, memory_bound) if whole else []


def soak(duration: float, engine: EngineName = "draftwood", seed: int = 0) -> Soaked:
    """Serves the bundled model in float32 on one thread, and runs the traffic for `duration` seconds.

    The same `seed` draws the same requests.

    Raises:
        BenchmarkError: vLLM is not installed.
        ServerError: the service did not start, or did not stop with status 0.
    """
    model = ChosenModel("bundled model", BUNDLED_MODEL, ModelOptions(dtype="float32", threads=1))
    flags, process = server_on(engine, model, eager=True)
    process["environment"] |= dict.fromkeys(KERNEL_CACHES, str(_KERNELS))
    with server_process(*flags, *_SMALL_LIMITS, "--log-level", "error", **process) as server:
        soaked = asyncio.run(_soak_service(server, duration, seed))
        log = server.log.read_text(encoding="utf-8", errors="replace").strip()
    soaked.log = "\n".join(log.splitlines()[:_LOG_LINES])
    return soaked


async def _soak_service(server: ServerProcess, duration: float, seed: int) -> Soaked:
    """Runs the traffic in `ROUNDS` rounds."""
    async with AsyncClient(server.target) as client:
        info = await client.model_info()
        prompts = await fitting(client, info, read_prompts(None), MAX_TOKENS)
        await fill_caches(client, info)
    traffic = Traffic(info, prompts, tenants=2 * KEPT_TENANTS)
    soaked = Soaked(slots=info.max_running_requests + info.max_waiting_requests)
    watch = asyncio.create_task(_watch(server.pid, soaked, duration))
    try:
        for round_ in range(ROUNDS):
            end = time.monotonic() + duration / ROUNDS
            async with asyncio.TaskGroup() as group:
                for i in range(_CLIENTS):
                    draw = random.Random(f"{seed}-{round_}-{i}")
                    group.create_task(_client(server.target, traffic, draw, end, soaked))
            soaked.free_slots.append(await free_slots(server.target, info))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    return soaked


async def fill_caches(client: AsyncClient, info: ModelInfo) -> None:
    """Fills the bounded caches of the service: kernels by prompt length, and KV memory."""
    draw = random.Random("caches")

    async def read(length: int) -> None:
        prompt = [draw.randrange(info.vocab_size) for _ in range(length)]
        await client.generate(prompt, max_tokens=1, tenant="caches")

    for length in _PROMPT_LENGTHS:
        await read(min(length, info.max_context_tokens - 1))
    for _ in range(2 * KV_CONTEXTS):
        await read(info.max_context_tokens - 1)


async def _client(target: str, traffic: Traffic, draw: random.Random, end: float, soaked: Soaked) -> None:
    """Sends one request after the other until `end` (`time.monotonic()`), reconnecting now and then."""
    while time.monotonic() < end and len(soaked.failures) < MAX_FAILURES:
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


async def free_slots(target: str, info: ModelInfo) -> int:
    """Counts the requests that an idle service admits until it refuses one, then checks that it answers as many.

    Raises:
        DraftwoodError: an admitted request failed.
    """
    slots = info.max_running_requests + info.max_waiting_requests
    for _ in range(60):  # until the slots of requests that have just ended are released
        if (taken := await _taken(target, slots)) == slots:
            break
        await asyncio.sleep(0.5)
    async with AsyncClient(target, retry=_FREED_LATER) as client:
        again = (client.generate([0], ignore_eos=True, max_tokens=4, tenant="slots", timeout=60) for _ in range(taken))
        await asyncio.gather(*again)
    return taken


async def _taken(target: str, slots: int) -> int:
    """How many requests are admitted before one is refused; one above `slots` at most."""
    taken = 0
    async with AsyncClient(target, retry=NO_RETRY) as client, AsyncExitStack() as stack:
        with suppress(UnavailableError):
            while taken <= slots:
                endless = client.stream([0], ignore_eos=True, drafting=False, tenant="slots")
                await stack.enter_async_context(endless)
                taken += 1
    return taken


async def _watch(pid: int, soaked: Soaked, duration: float) -> None:
    """Samples the service's process and its children until cancelled."""
    service = psutil.Process(pid)
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        with suppress(psutil.NoSuchProcess):  # the failing requests report it
            processes = [service, *service.children(recursive=True)]
            rss = sum(own_bytes(process.memory_info()) for process in processes) / MIB
            threads = sum(process.num_threads() for process in processes)
            fds = sum(process.num_fds() for process in processes)
            soaked.samples.append(Sample(round(seconds, 3), round(rss, 3), threads, fds, soaked.under_way))
        await asyncio.sleep(duration / _SAMPLES)
