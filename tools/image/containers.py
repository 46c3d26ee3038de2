"""Runs containers with `runc`, as Kubernetes would: a read-only root, no capability, and a user that is not root.

They share the network of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGTERM
from typing import Any, NoReturn

from draftwood_client import Client, DeadlineError
from tools.image.building import Image

ADDRESS = "127.0.0.1:50051"
_START_SECONDS, _END_SECONDS = 300.0, 1200.0
_VOLUMES = ("/var/lib/draftwood", "/var/cache/draftwood")
_TMPFS = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}


class Container:
    """A process in a container. One that fails ends this program with what it wrote."""

    def __init__(self, bundle: Path) -> None:
        self._name = f"draftwood-{os.getpid()}-{bundle.parent.name}-{bundle.name}"
        self._log = bundle / "log"
        with self._log.open("wb") as log:
            command = ["runc", "run", "--bundle", str(bundle), self._name]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._began = time.monotonic()

    def wait_until_ready(self) -> float:
        """Seconds from its start until it serves."""
        with Client(ADDRESS) as client:
            while self._process.poll() is None and time.monotonic() - self._began < _START_SECONDS:
                with suppress(DeadlineError):
                    client.wait_until_ready(1.0)
                    return time.monotonic() - self._began
        self._fail("did not become ready")

    def terminate(self) -> None:
        """SIGTERM, which reaches the container's first process."""
        self._process.send_signal(SIGTERM)

    def output(self, status: int = 0) -> str:
        """What it wrote, at its end."""
        if (ended := self._process.wait(_END_SECONDS)) != status:
            self._fail(f"ended with status {ended} in the place of {status}")
        return self._log.read_text(errors="replace")

    def _fail(self, problem: str) -> NoReturn:
        self.remove()
        sys.exit(f"a container {problem}\n{self._log.read_text(errors='replace')[-4000:]}")

    def remove(self) -> None:
        if self._process.poll() is None:
            subprocess.run(["runc", "delete", "--force", self._name], check=False)
            self._process.wait()


@dataclass(slots=True)
class Containers:
    """Runs containers of an image, one user's, with volumes that outlive them.

    Args:
        folder: a new one, for volumes and bundles.
        user: and group.
        environment: beside the image's.
        mounts: further files and folders, read-only: paths in the container, and outside.
    """

    folder: Path
    image: Image
    user: tuple[int, int]
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, Path] = field(default_factory=dict)
    _started: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in _VOLUMES:
            volume, own = self.folder / name.strip("/"), self.image.root / name.strip("/")
            volume.mkdir(parents=True)
            shutil.copystat(own, volume)  # as the first use of a volume does
            os.chown(volume, own.stat().st_uid, own.stat().st_gid)

    def start(self, *arguments: str, program: Sequence[str] = (), **environment: str) -> Container:
        """One with these arguments, of `program` or the image's own."""
        self._started += 1
        bundle = self.folder / str(self._started)
        bundle.mkdir()
        words = [*(program or self.image.config["Entrypoint"]), *arguments]
        (bundle / "config.json").write_text(json.dumps(self._specification(words, environment)))
        return Container(bundle)

    def ask(self, *arguments: str, status: int = 0, **options: Any) -> str:
        """What one that ends by itself wrote."""
        container = self.start(*arguments, **options)
        try:
            return container.output(status)
        finally:
            container.remove()

    def _specification(self, words: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """As OCI has it."""
        binds = [(name, self.folder / name.strip("/"), "rw") for name in _VOLUMES]
        binds += [(name, path, "ro") for name, path in self.mounts.items()]
        binds.append(("/etc/resolv.conf", Path("/etc/resolv.conf"), "ro"))
        own = dict(assignment.split("=", 1) for assignment in self.image.config["Env"])
        variables = {**own, **self.environment, **environment}
        return {
            "ociVersion": "1.0.2",
            "root": {"path": str(self.image.root), "readonly": True},
            "process": {
                "args": words,
                "env": [f"{name}={value}" for name, value in variables.items()],
                "cwd": self.image.config["WorkingDir"],
                "user": {"uid": self.user[0], "gid": self.user[1]},
                "noNewPrivileges": True,
            },
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "nodev", "ro"]},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/dev/shm", **_TMPFS},
                {"destination": "/tmp", **_TMPFS},
                *({"destination": name, "source": str(path), "options": ["bind", way]} for name, path, way in binds),
            ],
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
        }
