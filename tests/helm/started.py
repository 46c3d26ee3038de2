"""Starts what the chart renders: `python -m tests.helm.started [--json FILE] [VALUES...]`, as root.

For each values file, and each container: its exact command as a process (`pods`), until the probes of the manifest
succeed; then it answers a request, and gets SIGTERM. What a GPU is needed for is started up to the device, which
`draftwood serve --check` names, and then with --device cpu.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood_client import Client, TlsConfig
from draftwood_client.target import addresses
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.auth.auth_file import new_key
from draftwood_service.starting import require_driver
from tests.certificates import make_certificate
from tests.helm.chart import VALUES, Document, pod_templates, read, render
from tests.helm.pods import POD, WORKER, Cluster, Container, Place
from tests.memory.servers import Proxy, Valkey, cluster, free_port
from tests.service.auth.issuer import public_keys, token

_START_SECONDS = 300.0
_REDIS = 6379
_ELSEWHERE = (
    *("redis.data", "redis-0.redis", "redis-1.redis", "redis-2.redis"),
    *("login.example", "collector.monitoring.svc"),
)
"""Servers that are no part of a release; the collector is not there."""
_CERTIFICATE_HOSTS = ("draftwood.example", "login.example", "redis.data")
_INSTEAD_OF_A_GPU = ("--device=cpu", "--tensor-parallel=1", "--threads=2")
_INSTEAD_OF_GPUS_OF_VLLM = ('--engine-args={"enforce_eager": true}', "--max-context=256")
_PLAINLY: dict[str, Any] = {"verify": False, "trust_env": False}
"""Certificates are not verified, as by the kubelet."""
_QUESTION = "Where is my order?"


class NotStartedError(Exception):
    """A container did not do what is expected; the text has its name and the end of its output."""


@dataclass(slots=True, kw_only=True)
class Row:
    """What happened to a container of a values file.

    Attributes:
        ready: its probes succeeded and it answered; or, for one that ends by itself, its status was 0.
        ready_in_s: seconds from its start until its probes succeeded; 0 for one that ends by itself.
        ended_in_s: seconds from SIGTERM to its end; or of its whole run.
        note: what is not as in a cluster.
    """

    values: str
    container: str
    ready: bool
    ready_in_s: float = 0.0
    ended_in_s: float
    note: str = ""


@dataclass(slots=True)
class Release:
    """A values file, rendered, with the servers and secrets that it names.

    Attributes:
        key: an API key, or a token where the release knows no keys; None where anyone may call.
    """

    name: str
    values: Document
    folder: Path
    key: str | None = None
    certificate: tuple[Path, Path] = field(init=False)
    cluster: Cluster = field(init=False)

    def __post_init__(self) -> None:
        documents = render(self.values)
        services = [one["metadata"]["name"] for one in documents if one["kind"] == "Service"]
        self.certificate = make_certificate(self.folder, names=[*services, *_CERTIFICATE_HOSTS])
        models: dict[str, str] = {}
        for key, name in (("source", "name"), ("draftModel", "draftModel"), ("draftHead", "draftHead")):
            source = self.at("model", "fetch", key) or ""
            model = self.at("model", name) or Path(source.partition("@")[0]).name.removesuffix(".gguf")
            models |= {model: source} if model else {}
        self.cluster = Cluster(
            self.folder,
            documents,
            self._secrets(),
            models,
            dict.fromkeys(_ELSEWHERE, "127.0.0.1") | {host: host_address for host, host_address, _ in self.others()},
            self.certificate[0],
        )

    def others(self) -> list[tuple[str, str, int]]:
        """Name, address and port of the servers of other releases, behind a gateway without a server of its own."""
        found = [addresses(each["address"])[0].rsplit(":", 1) for each in self.at("gateway", "servers") or []]
        return [(host, f"127.0.0.{number}", int(port)) for number, (host, port) in enumerate(found, 2)]

    def at(self, *path: str) -> Any:
        """A value; None where it is not set."""
        found: Any = self.values
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def _secrets(self) -> dict[str, Mapping[str, bytes]]:
        """Made up, by their names in the values."""
        pem, private = (path.read_bytes() for path in self.certificate)
        tls = {"tls.crt": pem, "tls.key": private, "ca.crt": pem}
        made: dict[str, Mapping[str, bytes]] = {}

        def give(path: str, key: str, default: str, content: str) -> None:
            *parents, name = path.split(".")
            if secret := self.at(*parents, name):
                made[secret] = {self.at(*parents, key) or default: content.encode()}

        for path in (("tls", "existingSecret"), ("gateway", "tlsSecret"), ("gateway", "server", "tlsSecret"),
                     ("store", "external", "tlsSecret"), ("test", "tlsSecret"),
                     ("model", "fetch", "s3", "tlsSecret")):  # fmt: skip
            if name := self.at(*path):
                made[name] = tls
        if self.at("auth", "jwt", "jwks"):
            self.key = token()
        if self.at("auth", "file", "existingSecret"):
            entry = new_key()
            self.key = entry.key
            listed = {"id": entry.id, "tenant": "acme", "sha256": entry.sha256, "created": "2026-11-22T12:00:00Z"}
            give("auth.file.existingSecret", "key", "auth.yaml", json.dumps({"keys": [listed]}))
        scheme = "rediss" if self.at("store", "external", "tlsSecret") else "redis"
        lines = [f"{key}={base64.b64encode(os.urandom(32)).decode()}" for key in ("first", "names")]
        give("gateway.apiKeySecret", "apiKeyKey", "key", str(self.key))
        give("test.apiKeySecret", "apiKeyKey", "key", str(self.key))
        give("store.external.existingSecret", "key", "url", f"{scheme}://redis.data:{_REDIS}")
        give("store.encryptionSecret", "encryptionKey", "keys", "\n".join(lines))
        give("model.hubTokenSecret", "hubTokenKey", "token", "hf_made_up")
        if name := self.at("model", "fetch", "s3", "existingSecret"):
            made[name] = {"AWS_ACCESS_KEY_ID": b"made-up", "AWS_SECRET_ACCESS_KEY": b"made-up"}
        return made

    @property
    def tls(self) -> TlsConfig | bool:
        """Of the server, for a client with a certificate."""
        if not self.at("tls", "existingSecret"):
            return False
        pem, private = (path.read_bytes() for path in self.certificate)
        return TlsConfig(pem, pem, private, server_name="draftwood.example")

    def containers(self) -> Iterator[Container]:
        """In the order in which they need each other."""
        documents = self.cluster.documents
        group = [template["spec"] for template in pod_templates(documents, "LeaderWorkerSet")]
        for rank in reversed(range(len(group))):  # the worker waits for the leader, which is ready with it
            for spec in [*group[rank].get("initContainers", []), *group[rank]["containers"]]:
                yield Container(group[rank], spec, (Place(), WORKER)[rank])
        pods = [
            template["spec"] for kind in ("StatefulSet", "Deployment") for template in pod_templates(documents, kind)
        ]
        for pod in sorted(pods, key=lambda pod: [each["name"] for each in pod["containers"]] == ["gateway"]):
            for spec in [*pod.get("initContainers", []), *pod["containers"]]:
                yield Container(pod, spec)

    def test(self) -> Container | None:
        """The pod of `helm test`, where the values give it what it needs."""
        if not (self.at("auth", "open") or self.at("test", "apiKeySecret")):
            return None
        [pod] = [one["spec"] for one in self.cluster.documents if one["kind"] == "Pod"]
        return Container(pod, pod["containers"][0])


@contextmanager
def servers(release: Release) -> Iterator[None]:
    """Those that the values name and the release does not bring."""
    with ExitStack() as stack:
        external = release.at("store", "external") if release.at("store", "mode") == "external" else None
        if external is not None and external.get("tlsSecret"):
            store = stack.enter_context(Valkey(port=free_port()))
            stack.enter_context(_tls_front(_REDIS, store.port, release.certificate))
        elif external is not None and "+cluster" in external.get("url", ""):
            stack.enter_context(cluster(port=_REDIS))
        elif external is not None:
            stack.enter_context(Valkey(port=_REDIS))
        if release.at("auth", "jwt", "jwks"):
            stack.enter_context(_issuer(release.certificate))
        for _, host, port in release.others():
            stack.enter_context(_other(host, port))
        yield


@contextmanager
def _other(host: str, port: int) -> Iterator[None]:
    """A server of another release, with the bundled model."""
    command = [sys.executable, "-m", "draftwood_client", "serve", "--auth", "open", "--threads", "1"]
    process = subprocess.Popen([*command, "--host", host, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        with Client(f"{host}:{port}") as client:
            client.wait_until_ready(_START_SECONDS)
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def _tls_front(port: int, to: int, certificate: tuple[Path, Path]) -> Iterator[None]:
    """TLS with clients' certificates in front of a server without it, on a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    front = Proxy(to, certificate, port, mutual=True)
    asyncio.run_coroutine_threadsafe(front.__aenter__(), loop).result(10)
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(front.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def _issuer(certificate: tuple[Path, Path]) -> Iterator[None]:
    """An https server of the issuer's public keys."""

    class Keys(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"keys": public_keys()}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 443), Keys)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


class Process:
    """A container as a process."""

    ready_in_s = 0.0

    def __init__(self, release: Release, container: Container, *more: str) -> None:
        self._container = container
        self._log = release.folder / f"{container.name}-{time.monotonic_ns()}.log"
        self._began = time.monotonic()
        with self._log.open("wb") as output:
            command = release.cluster.command(container, *more)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def status(self, seconds: float) -> int:
        """Of one that ends by itself. Raises subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.terminate()

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    def wait_until_ready(self, release: Release) -> None:
        """By the probes of the manifest. Raises NotStartedError."""
        spec = self._container.spec
        startup = spec.get("startupProbe", {})
        seconds = startup.get("periodSeconds", 0) * startup.get("failureThreshold", 0) or _START_SECONDS
        deadline = time.monotonic() + seconds
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            while name in spec and not succeeds(spec[name], self._container, release):
                if self.has_ended or time.monotonic() > deadline:
                    raise self.failed(f"{name} did not succeed, exit status {self._process.poll()}")
                time.sleep(0.5)

    def end(self) -> float:
        """SIGTERM, as after the preStop hook. Returns the seconds until its end. Raises NotStartedError."""
        began = time.monotonic()
        self.terminate()
        try:
            status = self._process.wait(self._container.grace_seconds)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {self._container.grace_seconds} s") from None
        if status:
            raise self.failed(f"SIGTERM ended it with status {status}")
        return time.monotonic() - began

    def failed(self, problem: str) -> NotStartedError:
        return NotStartedError(f"{self._container.name}: {problem}\n{self.output[-4000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def succeeds(probe: Document, container: Container, release: Release) -> bool:
    """Whether a probe does, as the kubelet asks: at the pod's address, without a certificate of its own."""
    seconds = probe.get("timeoutSeconds", 1) + 1  # the machine may be busy
    address = container.place.address
    if "grpc" in probe:
        with grpc.insecure_channel(f"{address}:{probe['grpc']['port']}") as channel, suppress(grpc.RpcError):
            asked = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            answer = health_pb2_grpc.HealthStub(channel).Check(asked, timeout=seconds)
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
        return False
    if "exec" in probe:
        spec = {**container.spec, "command": probe["exec"]["command"], "args": []}
        command = release.cluster.command(replace(container, spec=spec))
        return subprocess.run(command, check=False, capture_output=True, timeout=30).returncode == 0
    asked_for = probe.get("httpGet") or probe["tcpSocket"]
    port = container.port(asked_for["port"])
    with suppress(OSError, httpx.HTTPError):
        if "tcpSocket" in probe:
            socket.create_connection((address, port), seconds).close()
            return True
        url = f"{asked_for.get('scheme', 'HTTP').lower()}://{address}:{port}{asked_for['path']}"
        return 200 <= httpx.get(url, **_PLAINLY, timeout=seconds).status_code < 400
    return False


def ask(release: Release, container: Container) -> None:
    """A request that the container answers. Raises an error if it does not."""
    if container.is_valkey:
        [secret] = [one for one in release.cluster.documents if one["kind"] == "Secret"]
        password = release.cluster.files_of("secret", secret["metadata"]["name"])["password"].decode()
        assert redis.Redis(POD, _REDIS, password=password).ping()
    elif container.name == "server":
        with Client(f"{POD}:50051", tls=release.tls, token=release.key, plaintext_credentials=True) as client:
            assert client.generate(_QUESTION, max_tokens=8, timeout=60).text
    else:
        key = None if release.at("gateway", "apiKeySecret") else release.key
        url = f"{'https' if release.at('gateway', 'tlsSecret') else 'http'}://{POD}:8080/v1/completions"
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        for model in [each["model"] for each in release.at("gateway", "servers") or []] or [None]:
            body = {"prompt": _QUESTION, "max_tokens": 8, "model": model}
            answer = httpx.post(url, json=body, headers=headers, timeout=60, **_PLAINLY)
            assert answer.status_code == 200, answer.text
        if key is not None:
            assert httpx.post(url, json=body, **_PLAINLY).status_code == 401, "nobody calls without a key"


def start(release: Release, container: Container, stack: ExitStack) -> tuple[Process, str]:
    """A container that is ready and has answered, and the note of its row. Raises NotStartedError."""
    more, note = instead_of_gpus(release, container)
    process = Process(release, container, *more)
    stack.callback(process.kill)
    process.wait_until_ready(release)
    process.ready_in_s = round(process.seconds, 2)
    if container.place.rank:
        return process, note  # it has no probe, and answers nobody
    try:
        ask(release, container)
    except Exception as error:
        raise process.failed(f"does not answer: {error}") from error
    return process, note


def instead_of_gpus(release: Release, container: Container) -> tuple[tuple[str, ...], str]:
    """Further arguments of a server for GPUs where there are none, and what the row says of it."""
    if container.name != "server" or release.at("device", "type") != "nvidia":
        return (), ""
    try:
        require_driver("cuda")
    except InvalidValueError:
        ranks = release.at("nodes", "count") or 1
        of_vllm = (f"--tensor-parallel={ranks}", *_INSTEAD_OF_GPUS_OF_VLLM)
        more = of_vllm if container.is_vllm else _INSTEAD_OF_A_GPU
        build = ", vLLM's build for CPUs" if container.is_vllm else ""
        return more, f"no GPU here{build}: started with {' '.join(more)}"
    return (), ""


def run_to_its_end(release: Release, container: Container) -> Row:
    """A container that ends by itself. Raises NotStartedError if it fails, unless for want of a GPU, which it names."""
    process = Process(release, container)
    try:
        status, note = process.status(_START_SECONDS), ""
    finally:
        process.kill()
    server = Container(container.pod, {**container.spec, "name": "server"}, container.place)
    if container.name == "check" and not container.is_vllm and instead_of_gpus(release, server)[0]:
        expected = "device: 'cuda' is not allowed; this machine has no GPU driver"
        if status != 1 or [expected in line for line in process.output.splitlines()] != [True]:
            raise process.failed(f"expected {expected}; exit status {status}")
        note = "no GPU here, which is all that it finds wrong"
    elif status:
        raise process.failed(f"exit status {status}")
    seconds = round(process.seconds, 2)
    return Row(values=release.name, container=container.label, ready=True, ended_in_s=seconds, note=note)


def rows(path: Path, folder: Path, *, only_checks: bool = False) -> list[Row]:
    """Of a values file. Needs root, and namespaces as `inside` makes them. Raises NotStartedError."""
    with ExitStack() as stack:
        release = Release(path.stem, read(path), folder)
        made: list[Row] = []
        running: list[tuple[Container, Process, str]] = []
        if not only_checks:
            stack.enter_context(servers(release))
        for container in release.containers():
            if container.is_init:
                made.append(run_to_its_end(release, container))
            elif not only_checks:
                running.append((container, *start(release, container, stack)))
        if not only_checks and (test := release.test()) is not None:
            made.append(run_to_its_end(release, test))
        for container, process, _ in running:
            if container.place.rank:  # pods of a group get it at once, and end with their leader
                process.terminate()
        for container, process, note in reversed(running):
            times = {"ready_in_s": process.ready_in_s, "ended_in_s": round(process.end(), 2)}
            made.append(Row(values=release.name, container=container.label, ready=True, **times, note=note))
        return made


def can_start() -> bool:
    """Whether `inside` works here."""
    programs = all(map(shutil.which, ("unshare", "setpriv", "chroot", "mount", "ip")))
    return os.geteuid() == 0 and programs and subprocess.run([*UNSHARE, "true"], check=False).returncode == 0


UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")


def in_namespaces(module: str, *arguments: str) -> Any:
    """What a module prints as JSON when it is run with `--inside FOLDER` and arguments. Raises NotStartedError."""
    with tempfile.TemporaryDirectory(prefix="draftwood-helm-") as folder:
        command = [*UNSHARE, sys.executable, "-m", module, "--inside", folder, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotStartedError(done.stderr)
    return json.loads(done.stdout)


def run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, timeout=30)


def hide(folder: Path) -> None:
    """Makes a folder one that ends with the namespace."""
    run("mount --make-rprivate /", f"mount -t tmpfs -o mode=755 tmpfs {folder}")


def inside(paths: Sequence[Path], *, only_checks: bool = False) -> list[Row]:
    """The rows of values files, made by a process in namespaces of its own. Raises NotStartedError."""
    made = in_namespaces("tests.helm.started", *(["--checks"] * only_checks), *map(str, paths))
    return [Row(**row) for row in made]


def _inside(paths: Sequence[Path], folder: Path, only_checks: bool) -> int:
    hide(folder)
    run("ip link set lo up", *(f"ip address add {one}/32 dev lo" for one in (POD, WORKER.address)))
    made: list[Row] = []
    try:
        for number, path in enumerate(paths):
            own = folder / str(number)
            own.mkdir()
            made += rows(path, own, only_checks=only_checks)
    except NotStartedError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([asdict(row) for row in made]))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("values", nargs="*", type=Path, default=VALUES)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--checks", action="store_true", help="run the init containers, and no others")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        return _inside(given.values, given.inside, given.checks)
    if not can_start():
        sys.exit("needs root, namespaces, and the programs unshare, setpriv, chroot, mount and ip")
    made: list[Row] = []
    failed = 0
    for path in given.values:
        try:
            made += inside([path], only_checks=given.checks)
        except NotStartedError as error:
            failed += 1
            made.append(Row(values=path.stem, container=str(error).partition(":")[0], ready=False, ended_in_s=0.0))
            print(f"{path.stem}: {error}", file=sys.stderr)
        for row in (row for row in made if row.values == path.stem):
            state = "ready" if row.ready else "NOT READY"
            times = f"{row.ready_in_s:6.2f} s {row.ended_in_s:6.2f} s"
            print(f"{row.values:16}{row.container:16}{state:12}{times}  {row.note}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"rows": [asdict(row) for row in made]}, indent=1) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
