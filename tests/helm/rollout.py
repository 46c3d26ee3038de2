"""Rolls out what the chart renders, under load: `python -m tests.helm.rollout [--json FILE]`, as root.

Pods are processes (`pods`), each in a network namespace with an address of its own. This process stands for the rest of
a cluster: the controllers of Deployments (maxSurge, maxUnavailable), the kubelet (init containers, probes, preStop,
SIGTERM, the grace period), the Services' addresses (`Balancer`) and the cluster's DNS. An endpoint is removed when its
pod's preStop begins, and added when its readiness probe succeeds; both are known after `_SPREAD_SECONDS`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import openai

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import AsyncClient
from tests.helm.chart import NAMESPACE, Document, read
from tests.helm.pods import DOMAIN, RESOLVER, Container, Place
from tests.helm.started import UNSHARE, NotStartedError, Process, Release, can_start, hide, in_namespaces, run, succeeds
from tests.system.rollout.load import (
    TENANTS,
    TIMEOUT_SECONDS,
    Ask,
    Load,
    Question,
    Result,
    acceptance,
    ask_all,
    by,
    different,
    remembered,
)
from tests.system.rollout.names import NameServer

VALUES = Path(__file__).parent / "values" / "rollout.yaml"
CONCURRENCY = 8
"""Requests at a time."""
_NODE = "10.20.30.1"
"""The address of this process, and of the name server."""
_SERVICES, _PODS = "10.20.31.{}", "10.20.30.{}"
_SPREAD_SECONDS = 1.0
"""Until proxies and DNS know a change of a Service's endpoints."""
_START_SECONDS = 300.0
_MAX_TOKENS, _LONG = 40, 200


@dataclass(slots=True, kw_only=True)
class Restart:
    """A pod that was replaced.

    Attributes:
        ended_in_s: seconds from its deletion to its end, of which it may have `grace_s`.
        status: its exit status; None if it was killed because its time was over.
        replaced_in_s: seconds from the start of the pod that took its place until that was ready.
    """

    pod: str
    ended_in_s: float = 0.0
    grace_s: int
    status: int | None = None
    replaced_in_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Report:
    """What clients noticed. Acceptance is in tokens per decoding step, of questions that are asked at no other time.

    Attributes:
        failed: the errors of requests that failed after the clients' own attempts.
        wrong: answers that are not the one of the same request at rest.
        through: requests by what they were sent through.
    """

    requests: int
    failed: list[str]
    wrong: int
    through: dict[str, int]
    restarts: list[Restart]
    acceptance_cold: float
    acceptance_before: float
    acceptance_after: float


class Balancer:
    """The address of a Service: each new connection goes to the next endpoint, and stays there. Without endpoints it is
    reset."""

    def __init__(self) -> None:
        self.endpoints: list[tuple[str, int]] = []
        self._turns = count()

    async def start(self, host: str, port: int) -> None:
        await asyncio.start_server(self._serve, host, port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there: asyncio.StreamWriter | None = None
        try:
            if self.endpoints:
                back, there = await asyncio.open_connection(*self.endpoints[next(self._turns) % len(self.endpoints)])
                await asyncio.gather(_pass(reader, there), _pass(back, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, there):
                if one is not None:
                    one.transport.abort()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    with suppress(OSError):
        writer.write_eof()


class Pod:
    """A pod of one container besides those that check, as the kubelet runs it."""

    def __init__(self, release: Release, spec: Document, place: Place, restart: Restart) -> None:
        self._release = release
        self._containers = [Container(spec, one, place) for one in spec.get("initContainers", [])]
        [server] = spec["containers"]
        self.container = Container(spec, server, place)
        self.restart = restart
        self.ready = self.ending = False
        self.ready_in_s = 0.0
        self._process: Process | None = None

    async def run(self) -> None:
        """Until it is to end. Raises NotStartedError."""
        began = time.monotonic()
        for container in self._containers:
            process = await asyncio.to_thread(Process, self._release, container)
            if await asyncio.to_thread(process.status, _START_SECONDS):
                raise process.failed("exit status is not 0")
        self._process = await asyncio.to_thread(Process, self._release, self.container)
        async with asyncio.timeout(_START_SECONDS):
            while not await self._succeeds("startupProbe"):  # noqa: ASYNC110
                await asyncio.sleep(self._of("startupProbe").get("periodSeconds", 10))
        async with asyncio.TaskGroup() as both:
            both.create_task(self._watch_readiness(began))
            both.create_task(self._watch_liveness())

    async def _watch_readiness(self, began: float) -> None:
        failures = 0
        probe = self._of("readinessProbe")
        while not self.ending:
            failures = 0 if await self._succeeds("readinessProbe") else failures + 1
            if not failures:
                self.ready_in_s = self.ready_in_s or time.monotonic() - began
            self.ready = not failures or (self.ready and failures < probe.get("failureThreshold", 3))
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _watch_liveness(self) -> None:
        failures = 0
        probe = self._of("livenessProbe")
        while not self.ending:
            failures = 0 if await self._succeeds("livenessProbe") else failures + 1
            if failures == probe.get("failureThreshold", 3) and self._process is not None:
                raise self._process.failed("livenessProbe failed: it would be started again")
            await asyncio.sleep(probe.get("periodSeconds", 10))

    def _of(self, probe: str) -> Document:
        found: Document = self.container.spec.get(probe, {})
        return found

    async def _succeeds(self, name: str) -> bool:
        """Raises NotStartedError: its process has ended."""
        probe = self._of(name)
        found = not probe or await asyncio.to_thread(succeeds, probe, self.container, self._release)
        if self._process is not None and self._process.has_ended and not self.ending:
            raise self._process.failed("it has ended")
        return found

    async def end(self) -> None:
        """preStop, SIGTERM, and SIGKILL when its grace period is over."""
        assert self._process is not None
        began, grace = time.monotonic(), self.container.grace_seconds
        stop = self.container.spec.get("lifecycle", {}).get("preStop")
        await asyncio.sleep(0 if stop is None else stop["sleep"]["seconds"])
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            left = grace - (time.monotonic() - began)
            self.restart.status = await asyncio.to_thread(self._process.status, left)
        self._process.kill()
        self.restart.ended_in_s = round(time.monotonic() - began, 2)


@dataclass(slots=True)
class Workload:
    """A Deployment or StatefulSet, and the Services over its pods.

    Attributes:
        document: its manifest.
        balancers: of Services, with the ports that they lead to; those of headless ones are in the name server.
        headless: names of the others.
    """

    cluster: Cluster
    document: Document
    balancers: list[tuple[Balancer, object]] = field(default_factory=list)
    headless: list[str] = field(default_factory=list)
    pods: list[Pod] = field(default_factory=list)
    _known: list[Pod] = field(default_factory=list)

    @property
    def replicas(self) -> int:
        return int(self.document["spec"].get("replicas", 1))

    def add(self) -> None:
        self.pods.append(self.cluster.new_pod(self.document))

    async def wait(self) -> None:
        """Until all of its pods are ready, and known."""
        while len([pod for pod in self._known if pod.ready]) < len(self.pods):  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    async def publish(self) -> None:
        """Makes its endpoints known, again and again."""
        while True:
            ready = [pod for pod in self.pods if pod.ready]
            asyncio.get_running_loop().call_later(_SPREAD_SECONDS, self._publish, ready)
            await asyncio.sleep(0.1)

    def _publish(self, ready: list[Pod]) -> None:
        self._known = ready
        for balancer, port in self.balancers:
            balancer.endpoints = [(pod.container.place.address, pod.container.port(port)) for pod in ready]
        for name in self.headless:
            self.cluster.names.hosts[name] = [pod.container.place.address for pod in ready]

    async def roll_out(self) -> list[Restart]:
        """Replaces all pods, as a RollingUpdate does. Pods that end are not counted any more."""
        update = self.document["spec"]["strategy"]["rollingUpdate"]
        most = self.replicas + int(update["maxSurge"])
        least = self.replicas - int(update["maxUnavailable"])
        old, restarts = list(self.pods), []
        async with asyncio.TaskGroup() as ending:
            while old or len(self.pods) < self.replicas or not all(pod.ready for pod in self.pods):
                missing = self.replicas - (len(self.pods) - len(old))
                for _ in range(min(missing, most - len(self.pods))):
                    self.add()
                while old and sum(pod.ready for pod in self.pods) > least:
                    pod = old.pop(0)
                    self.pods.remove(pod)
                    pod.ending = True
                    restarts.append(pod.restart)
                    ending.create_task(pod.end())
                await asyncio.sleep(0.1)
        for restart, pod in zip(restarts, self.pods, strict=True):
            restart.replaced_in_s = round(pod.ready_in_s, 2)
        return restarts


class Cluster:
    """A release's workloads. `tasks` gets what runs on until it is cancelled."""

    def __init__(self, release: Release, tasks: asyncio.TaskGroup) -> None:
        self._release = release
        self._tasks = tasks
        self._addresses = count(40)
        self.names = NameServer({})
        self.background: list[asyncio.Task[None]] = []
        self.workloads: dict[str, Workload] = {}

    async def start(self) -> None:
        """Returns when all pods are ready."""
        await self.names.start(_NODE, 53)
        documents = self._release.cluster.documents
        for document in documents:
            if document["kind"] in ("Deployment", "StatefulSet"):
                self.workloads[document["metadata"]["name"]] = Workload(self, document)
        for number, service in enumerate(one for one in documents if one["kind"] == "Service"):
            await self._serve(service, _SERVICES.format(number + 1))
        for workload in self.workloads.values():
            self._run(workload.publish())
            for _ in range(workload.replicas):
                workload.add()
        await asyncio.gather(*(workload.wait() for workload in self.workloads.values()))

    async def _serve(self, service: Document, address: str) -> None:
        name = f"{service['metadata']['name']}.{NAMESPACE}.{DOMAIN}"
        chosen = service["spec"]["selector"].items()
        [workload] = [
            one
            for one in self.workloads.values()
            if chosen <= one.document["spec"]["template"]["metadata"]["labels"].items()
        ]
        if service["spec"].get("clusterIP") == "None":
            workload.headless.append(name)
            return
        self.names.hosts[name] = [address]
        run(f"ip address add {address}/32 dev lo")
        for port in service["spec"]["ports"]:
            balancer = Balancer()
            await balancer.start(address, port["port"])
            workload.balancers.append((balancer, port["targetPort"]))

    def new_pod(self, document: Document) -> Pod:
        number = next(self._addresses)
        name = f"{document['metadata']['name']}-{number}"
        place = Place(name, _PODS.format(number), _network(number))
        spec = document["spec"]["template"]["spec"]
        pod = Pod(self._release, spec, place, Restart(pod=name, grace_s=Container(spec, {}).grace_seconds))
        self._run(pod.run())
        return pod

    def _run(self, what: Any) -> None:
        self.background.append(self._tasks.create_task(what))


def _network(number: int) -> Path:
    """A namespace with the address of a pod, which the node and other pods reach."""
    name, file = f"pod-{number}", Path(f"/run/netns/pod-{number}")
    run(
        f"ip netns add {name}",
        f"ip link add {name} type veth peer name eth0 netns {name}",
        f"ip link set {name} master pods up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} address add {_PODS.format(number)}/24 dev eth0",
        f"ip -n {name} link set eth0 up",
        f"ip -n {name} route add default via {_NODE}",
    )
    return file


def _gateway(client: openai.AsyncOpenAI) -> Ask:
    """Asks by OpenAI's client."""

    async def ask(tenant: str, question: Question) -> Result:
        text, max_tokens = question
        began, pieces = time.monotonic(), list[str]()
        try:
            stream = await client.chat.completions.create(
                model="",
                messages=[{"role": "user", "content": text}],
                max_tokens=max_tokens,
                temperature=0.0,
                stream=True,
                extra_body={"draftwood": {"tenant": tenant}},
            )
            finished = False
            async for chunk in stream:
                for choice in chunk.choices:
                    pieces.append(choice.delta.content or "")
                    finished = finished or choice.finish_reason is not None
            error = "" if finished else "the stream ended before the answer"
        except openai.OpenAIError as problem:
            error = f"{type(problem).__name__}: {problem}"
        return Result(began, time.monotonic(), text, "".join(pieces), error=error)

    return ask


async def _measure(cluster: Cluster, requests: int) -> Report:
    """Asks, and rolls out meanwhile both Deployments at once, as `helm upgrade` does."""
    texts = read_questions()[0]
    kept = [(text, _MAX_TOKENS) for text in texts[:3]]
    questions = [(text, _LONG if number % 5 == 0 else _MAX_TOKENS) for number, text in enumerate(texts[3:13])]
    through = dict.fromkeys(("gateway", "headless", "service"), 0)

    def counted(name: str, ask: Ask) -> Ask:
        def send(tenant: str, question: Question) -> Awaitable[Result]:
            through[name] += 1
            return ask(tenant, question)

        return send

    target = f"demo-draftwood{{}}.{NAMESPACE}:50051"
    async with (
        AsyncClient(f"dns:///{target.format('-headless')}") as headless,
        AsyncClient(target.format("")) as service,
        openai.AsyncOpenAI(
            base_url=f"http://demo-draftwood-gateway.{NAMESPACE}/v1", api_key="none", timeout=TIMEOUT_SECONDS
        ) as gateway,
    ):
        cold = acceptance(await ask_all(by(headless), kept))
        await ask_all(by(headless), kept)
        at_rest = await asyncio.gather(*(by(service)(TENANTS[0], question) for question in questions))
        before = await remembered(headless, kept, 1.6 * cold)
        asks = [counted("gateway", _gateway(gateway)), counted("headless", by(headless))]
        asks += [asks[0], counted("service", by(service))]
        # Where few are asked for, pods start sooner if the load leaves them some time.
        load = Load(asks, questions, requests, pause=0.2 if requests < 500 else 0.0)
        restarts: list[Restart] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run(CONCURRENCY))
            await load.reach(requests // 10)
            rolled = [one.roll_out() for one in cluster.workloads.values() if one.document["kind"] == "Deployment"]
            for made in await asyncio.gather(*rolled):
                restarts += made
            await load.reach(len(load.results) + requests // 10)
            load.last.set()
        after = await remembered(headless, kept, 1.6 * cold)
    return Report(
        requests=len(load.results),
        failed=[f"{one.error} (after {one.ended - one.began:.1f} s)" for one in load.results if one.error],
        wrong=different([*at_rest, *load.results]),
        through=through,
        restarts=restarts,
        acceptance_cold=round(cold, 2),
        acceptance_before=round(before, 2),
        acceptance_after=round(after, 2),
    )


async def _roll_out(values: Document, folder: Path, requests: int) -> Report:
    """Raises NotStartedError."""
    release = Release("rollout", values, folder)
    release.cluster.name_server = _NODE
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(64))  # many wait for processes
    try:
        async with asyncio.TaskGroup() as tasks:
            cluster = Cluster(release, tasks)
            await cluster.start()
            report = await _measure(cluster, requests)
            for task in cluster.background:
                task.cancel()
    except* NotStartedError as errors:
        raise errors.exceptions[0] from None
    return report


def can_roll_out() -> bool:
    """Whether `roll_out` works here."""
    command = (*UNSHARE, "sh", "-c", "ip link add pods type bridge && ip link add pod type veth")
    return can_start() and subprocess.run(command, capture_output=True, check=False).returncode == 0


def roll_out(requests: int, logs: Path | None = None, **values: Any) -> Report:
    """The report of a process in namespaces of its own. Raises NotStartedError.

    Args:
        requests: at least.
        logs: folder for what the containers write.
        values: that replace those of the file.
    """
    arguments = ["--requests", str(requests), "--values", json.dumps(values)]
    arguments += [] if logs is None else ["--logs", str(logs)]
    made = in_namespaces("tests.helm.rollout", *arguments)
    return Report(**{**made, "restarts": [Restart(**one) for one in made["restarts"]]})


def _inside(values: Document, folder: Path, requests: int, logs: Path | None) -> int:
    hide(folder)
    resolver = folder / "resolv.conf"
    resolver.write_text(RESOLVER.format(_NODE))
    run(
        f"mount --bind {resolver} /etc/resolv.conf",
        "mkdir -p /run/netns",
        "mount -t tmpfs tmpfs /run/netns",
        "ip link set lo up",
        "ip link add pods type bridge",
        f"ip address add {_NODE}/24 dev pods",
        "ip link set pods up",
    )
    try:
        report = asyncio.run(_roll_out({**read(VALUES), **values}, folder, requests))
    except NotStartedError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if logs is not None:
            for log in folder.glob("*.log"):
                shutil.copy(log, logs)
    print(json.dumps(asdict(report)))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="at least so many")
    parser.add_argument("--values", type=json.loads, default={}, help="JSON: values instead of those of the file")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    parser.add_argument("--logs", type=Path, help="folder for what the containers write")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return _inside(given.values, given.inside, given.requests, given.logs)
    if not can_roll_out():
        sys.exit("needs root, namespaces with bridges, and the programs unshare, setpriv, chroot, mount and ip")
    report = roll_out(given.requests, given.logs, **given.values)
    text = json.dumps(asdict(report), indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(report.failed or report.wrong) or any(restart.status != 0 for restart in report.restarts))


if __name__ == "__main__":
    sys.exit(main())
