"""Containers of rendered manifests as processes: their command, environment, user and files, without an image.

`Cluster` needs root and a network and mount namespace of its own, as `unshare --net --mount` makes them. A container's
root is a read-only tmpfs with the folders of this system, the environment in the place of /opt/draftwood, and what the
manifest mounts: emptyDirs that are empty, secrets and ConfigMaps with their files, claims. Service names lead to the
address `POD`. Not covered: limits of memory and CPU, seccomp, and what the image's own system has or lacks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path

from draftwood_memory.store.embedded import binary
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.engines.servers import PACKAGES
from tests.helm.chart import NAMESPACE, ROOT, Document
from tests.vllm.engine import ENVIRONMENT as VLLM_ENVIRONMENT
from tests.vllm.engine import PYTHON as VLLM_PYTHON

DOMAIN = "svc.cluster.local"
"""Of services."""
POD = "10.20.30.40"
"""The address of all pods of one `Place`. They listen on other ports than each other."""
RESOLVER = f"nameserver {{}}\nsearch {NAMESPACE}.{DOMAIN} {DOMAIN} cluster.local\noptions ndots:5\n"
"""A pod's resolv.conf, with the name server's address to fill in."""
CHOSEN_USER = 1_000_650_000
"""As OpenShift chooses one, for a pod that names none."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib64")
_ETC = ("group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "passwd")
_DEVICES = ("full", "null", "random", "urandom", "zero")
_COMPILED_FOR = ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")
"""Of the image alone: functions are compiled for this CPU here."""
_VALKEY_CLI = """#!{python}
import os, socket, sys
with socket.create_connection(("127.0.0.1", 6379), 5) as server:
    server.sendall(f"AUTH {{os.environ['REDISCLI_AUTH']}}\\r\\nPING\\r\\nQUIT\\r\\n".encode())
    sys.exit("+PONG" not in server.makefile().read())
"""
"""`valkey-cli ping`, which is in no package."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pod runs: file of its network namespace, None for that of this process, and the pod's number in its group
    of a LeaderWorkerSet."""

    name: str = "demo-0"
    address: str = POD
    network: Path | None = None
    rank: int = 0

    def enter(self) -> list[str]:
        """What a command in it begins with."""
        if self.network is None:
            return []
        named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ["nsenter", f"--net={self.network}", *named]


WORKER = Place("demo-0-1", "10.20.30.41", rank=1)
"""Of a pod that computes for a leader, which has the first place."""


@dataclass(slots=True)
class Container:
    """A container, by its part of the manifest."""

    pod: Document
    spec: Document
    place: Place = Place()

    @property
    def name(self) -> str:
        return str(self.spec["name"])

    @property
    def label(self) -> str:
        """Its name, with the pod's number for one that computes for a leader."""
        return f"{self.name} {self.place.rank}" if self.place.rank else self.name

    @property
    def is_init(self) -> bool:
        """Whether it ends before the others start."""
        return self.spec in self.pod.get("initContainers", [])

    @property
    def is_vllm(self) -> bool:
        return str(self.spec["image"]).endswith("-vllm")

    @property
    def is_valkey(self) -> bool:
        return "/valkey:" in str(self.spec["image"])

    @property
    def user(self) -> int:
        return int(self.pod["securityContext"].get("runAsUser", CHOSEN_USER))

    @property
    def group(self) -> int:
        return int(self.pod["securityContext"].get("runAsGroup", 0))

    @property
    def files_group(self) -> int:
        return int(self.pod["securityContext"].get("fsGroup", CHOSEN_USER))

    @property
    def grace_seconds(self) -> int:
        return int(self.pod.get("terminationGracePeriodSeconds", 30))

    def port(self, named: object) -> int:
        """The number of a port, by number or name."""
        ports = {port.get("name"): port["containerPort"] for port in self.spec.get("ports", [])}
        return int(ports.get(named, named))


@dataclass(slots=True)
class Cluster:
    """What containers are given.

    Args:
        folder: an empty one of the namespace alone, for roots and volumes. Nothing may remove it: what is mounted in
            it would be removed with it.
        documents: all manifests of a release.
        secrets: files of secrets that the manifests only name.
        models: names of models, which a claim or the hub's cache has: the bundled model in their place. With what they
            were fetched from, if `draftwood models --to` did.
        hosts: further names, and their addresses.
        authority: PEM file of what pods trust.
        name_server: address of one that knows the names of services; without it they lead to the pod itself.
    """

    folder: Path
    documents: list[Document]
    secrets: Mapping[str, Mapping[str, bytes]]
    models: Mapping[str, str] = field(default_factory=dict)
    hosts: Mapping[str, str] = field(default_factory=dict)
    authority: Path | None = None
    name_server: str | None = None
    _numbers: count[int] = field(default_factory=count, init=False)

    def command(self, container: Container, *more: str) -> list[str]:
        """What runs a container as a process, with further arguments."""
        root = self.folder / f"root-{next(self._numbers)}"
        self._make_root(root, container)
        environment = self.environment(container)
        given = [*container.spec.get("command", ["draftwood"]), *container.spec.get("args", []), *more]
        words = [_expanded(word, environment) for word in given]
        variables = [f"{name}={value}" for name, value in environment.items()]
        user = ["--reuid", str(container.user), "--regid", str(container.group), "--groups", str(container.files_group)]
        user += ["--inh-caps", "-all", "--bounding-set", "-all", "--no-new-privs"]
        return [
            *container.place.enter(),
            *("chroot", str(root), "setpriv", *user, "--"),
            *("env", "--ignore-environment", "--chdir", _image(container)["workdir"], *variables, *words),
        ]

    def environment(self, container: Container) -> dict[str, str]:
        """Of the image and of the manifest."""
        made = {"PATH": "/opt/draftwood/bin:/usr/local/bin:/usr/bin:/bin", "HOSTNAME": container.place.name}
        for assignment in _image(container)["env"]:
            name, _, value = assignment.partition("=")
            if name not in _COMPILED_FOR:
                made[name] = value.replace("$PATH", made["PATH"])
        if container.is_vllm:
            made |= {**VLLM_ENVIRONMENT, "PYTHONPATH": PACKAGES, "VLLM_CPU_KVCACHE_SPACE": "1"}
            # Of the operator of LeaderWorkerSets.
            made |= {"LWS_LEADER_ADDRESS": POD, "LWS_WORKER_INDEX": str(container.place.rank)}
        for variable in container.spec.get("env", []):
            made[variable["name"]] = self._value(variable, container, made)
        return made

    def _value(self, variable: Document, container: Container, before: Mapping[str, str]) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            return self.files_of("secret", source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]].decode()
        if "resourceFieldRef" in source:
            part, _, resource = source["resourceFieldRef"]["resource"].partition(".")
            return str(container.spec["resources"][part][resource])
        if "fieldRef" in source:
            place = container.place
            return place.address if source["fieldRef"]["fieldPath"] == "status.podIP" else place.name
        return _expanded(str(variable["value"]), before)

    def files_of(self, kind: str, name: str) -> dict[str, bytes]:
        """Of a secret or ConfigMap, rendered or made up. Raises KeyError."""
        for document in self.documents:
            if document["kind"].lower() == kind and document["metadata"]["name"] == name:
                return {key: str(text).encode() for key, text in document["data"].items()}
        return {**self.secrets[name]}

    def _make_root(self, root: Path, container: Container) -> None:
        root.mkdir()
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
        for name in _SYSTEM:
            path = Path("/", name)
            if path.is_symlink():
                (root / name).symlink_to(os.readlink(path))
            elif path.is_dir():
                _bind(path, root / name)
        self._make_etc(root / "etc", container.place)
        (root / "proc").mkdir()
        _mount("--rbind", "/proc", str(root / "proc"))
        _bind(Path("/sys"), root / "sys")
        (root / "dev" / "shm").mkdir(parents=True)
        for name in _DEVICES:
            (root / "dev" / name).touch()
            _mount("--bind", f"/dev/{name}", str(root / "dev" / name))
        for folder in ("var/lib/draftwood", "var/cache/draftwood", "data"):
            (root / folder).mkdir(parents=True)
        volumes = {volume["name"]: volume for volume in container.pod.get("volumes", [])}
        for mount in sorted(container.spec.get("volumeMounts", []), key=lambda mount: len(mount["mountPath"])):
            volume = volumes.get(mount["name"], mount)  # that of a StatefulSet is in its claims' templates
            self._make_volume(root / mount["mountPath"].lstrip("/"), volume, mount, container)
        _add_program(root, container)
        _make_read_only(root)

    def _make_etc(self, etc: Path, place: Place) -> None:
        etc.mkdir()
        for name in _ETC:
            if Path("/etc", name).exists():
                _bind(Path("/etc", name), etc / name)
        services = [one["metadata"]["name"] for one in self.documents if one["kind"] == "Service"]
        if self.name_server is not None:
            (etc / "resolv.conf").write_text(RESOLVER.format(self.name_server))
            services = []
        names = {name: POD for service in services for name in (service, f"{service}.{NAMESPACE}")} | dict(self.hosts)
        names = {"localhost": "127.0.0.1", place.name: place.address} | names
        lines = [f"{address} {name}" for name, address in names.items()]
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        if self.authority is not None:
            trusted = etc / "ssl" / "certs" / "ca-certificates.crt"
            trusted.parent.mkdir(parents=True)
            shutil.copy(self.authority, trusted)

    def _make_volume(self, path: Path, volume: Document, mount: Document, container: Container) -> None:
        """Claims are those of all containers; anything else is of this one, an emptyDir of a pod as well."""
        path.mkdir(parents=True, exist_ok=True)
        if "secret" in volume or "configMap" in volume:
            is_secret = "secret" in volume
            name = volume["secret"]["secretName"] if is_secret else volume["configMap"]["name"]
            _mount("-t", "tmpfs", "tmpfs", str(path))
            for key, content in self.files_of("secret" if is_secret else "configmap", name).items():
                (path / key).write_bytes(content)
                os.chown(path / key, 0, container.files_group)
                (path / key).chmod(volume["secret"]["defaultMode"] if is_secret else 0o644)
            _make_read_only(path)
            return
        shared = self.folder / "volumes" / mount["name"]
        if "emptyDir" not in volume and not shared.exists():
            shared.mkdir(parents=True)
            _own(shared, container)
            if mount["mountPath"] == "/models":
                for model, source in self.models.items():
                    _fetch(shared / Path(model).name, source, container)
        if "emptyDir" in volume:
            _mount("-t", "tmpfs", "tmpfs", str(path))
            _own(path, container)
            if mount["mountPath"] == "/var/cache/draftwood":
                for model in self.models:
                    _download(model, path / "hub", container)
        else:
            _mount("--bind", *(["-o", "ro"] if mount.get("readOnly") else []), str(shared), str(path))


def _own(path: Path, container: Container) -> None:
    """As the kubelet does with an empty volume and the pod's fsGroup."""
    os.chown(path, 0, container.files_group)
    path.chmod(0o2777)


def _give(folder: Path, container: Container) -> None:
    """Makes the container's user the owner of all that is in a folder, as if it had written it."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, container.user, container.files_group)


def _fetch(folder: Path, source: str, container: Container) -> None:
    """Makes a folder of a claim what it is when the model is there."""
    shutil.copytree(BUNDLED_MODEL, folder)
    if source:
        (folder / ".draftwood-fetched").write_text(json.dumps({"source": source, "commit": "a" * 40}))
    _give(folder, container)


def _download(model: str, home: Path, container: Container) -> None:
    """Makes the hub's cache what it is after a download."""
    folder = home / "hub" / f"models--{model.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    shutil.copytree(BUNDLED_MODEL, folder / "snapshots" / ("a" * 40))
    _give(home, container)


def _add_program(root: Path, container: Container) -> None:
    """What the image has in /opt: the environment, which also stays where it is, since its scripts name that place."""
    prefix = VLLM_PYTHON.parents[1].resolve() if container.is_vllm else Path(sys.prefix)
    base = (prefix / "bin" / "python").resolve().parents[1]
    for path in dict.fromkeys((ROOT, prefix.parents[1] if container.is_vllm else prefix, base)):
        if not (target := root / str(path).lstrip("/")).exists():
            _bind(path, target)
    program = root / "opt" / "draftwood"
    program.mkdir(parents=True)
    if container.is_valkey:
        (program / "bin").mkdir()
        (program / "bin" / "valkey-server").symlink_to(binary())
        (program / "bin" / "valkey-cli").write_text(_VALKEY_CLI.format(python=sys.executable))
        (program / "bin" / "valkey-cli").chmod(0o755)
        return
    (program / "bin").symlink_to(prefix / "bin")
    (program / "compiled").mkdir()
    for folder in ("strategies", "model_runner", "service"):
        for index in (ROOT / folder).rglob("__pycache__/*.nb[ic]"):
            module = index.parent.parent
            digest = hashlib.sha1(str(module).encode()).hexdigest()  # as numba names the folder
            place = program / "compiled" / f"{module.name}_{digest}"
            place.mkdir(exist_ok=True)
            shutil.copy2(index, place)


@cache
def _dockerfile(name: str) -> str:
    return re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.M))


def _image(container: Container) -> Document:
    """What the Dockerfile says of the image: its environment and the folder it starts in."""
    if container.is_valkey:
        return {"env": [], "workdir": "/data"}
    text = _dockerfile("Dockerfile.vllm" if container.is_vllm else "Dockerfile")
    last = text[text.rindex("\nFROM ") :]
    stages = [last]
    if str(container.spec["image"]).endswith("-cuda"):
        stages.insert(0, text[text.index("AS run-cuda") : text.rindex("\nFROM ")])
    assigned = [line for stage in stages for line in re.findall(r"^ENV (.*)$", stage, re.M)]
    [workdir] = re.findall(r"^WORKDIR (.*)$", last, re.M)
    return {"env": [word for line in assigned for word in shlex.split(line)], "workdir": workdir}


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    """With $(NAME) replaced, as the kubelet does it; unknown names stay."""
    return re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), text)


def _bind(source: Path, target: Path) -> None:
    """Read-only."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir() if source.is_dir() else target.touch()
    _mount("--bind", "-o", "ro", str(source), str(target))


def _make_read_only(mounted: Path) -> None:
    """What was written to it may still be open for a moment, in a process that another thread starts."""
    for _ in range(50):
        with suppress(subprocess.CalledProcessError):
            return _mount("-o", "remount,ro", str(mounted))
        time.sleep(0.1)
    raise RuntimeError(f"{mounted}: is busy")


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, timeout=30)
