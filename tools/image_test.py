"""Builds the image and runs it, with no registry and no daemon: `make image-test`, as root, on Debian or Ubuntu.

Needs `apt-get install buildah mmdebstrap runc`. The base is a Debian made here. pip's configuration and the folders
that it names are mounted for the build. Containers have a read-only root, and share the network of the machine.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from draftwood_client import ChatMessage, Client

REPOSITORY = Path(__file__).resolve().parents[1]
IMAGE, BASE = "localhost/draftwood-test", "localhost/draftwood-test-base"
ENVIRONMENT = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
QUESTION = "where is my order?"
USER = 10001
START_SECONDS = 300.0


def run(*command: str, **options: Any) -> str:
    """Standard output. Exits with the command's own messages if it fails."""
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ...: status {done.returncode}\n{done.stdout[-4000:]}")
    output: str = done.stdout
    return output.strip()


def make_base(folder: Path) -> None:
    """An image with Debian and its Python."""
    archive = folder / "base.tar"
    packages = "--include=python3,python3-venv,ca-certificates"
    run("mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", str(archive))
    container = run("buildah", "from", "scratch")
    run("buildah", "add", "--quiet", container, str(archive), "/")
    run("buildah", "commit", "--quiet", "--rm", container, BASE)
    archive.unlink()


def pip_mounts(folder: Path) -> list[str]:
    """Flags of `buildah build` that give pip in it this machine's configuration."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    values = dict(line.split("=", 1) for line in listed.splitlines())
    config = configparser.RawConfigParser()
    config["global"] = {name.rpartition(".")[2]: value.strip("'\"") for name, value in values.items()}
    written = folder / "pip.conf"
    with written.open("w") as file:
        config.write(file)
    words = [unquote(urlsplit(word).path) for value in config["global"].values() for word in value.split()]
    paths = {Path(word) for word in words if word.startswith("/") and Path(word).exists()}
    mounts = {path.parent if path.name == "simple" else path for path in paths}  # an index refers to files beside it
    return [f"--volume={written}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in mounts)]


def build(folder: Path) -> None:
    arguments = {"BASE_BUILD": BASE, "BASE_RUN": BASE, "TORCH_INDEX": "", "VARIANT": "cpu"}
    flags = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    run("buildah", "build", "--layers=false", "--tag", IMAGE, *flags, *pip_mounts(folder), str(REPOSITORY))


def bundle(folder: Path, root: Path, config: dict[str, Any], arguments: Sequence[str], volumes: Path) -> None:
    """An OCI runtime bundle: what Kubernetes would run, with a read-only root and no capability."""
    kept = ("/var/lib/draftwood", "/var/cache/draftwood")
    tmpfs = {"type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
    specification = {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "args": [*config["Entrypoint"], *arguments],
            "env": config["Env"],
            "cwd": config["WorkingDir"],
            "user": {"uid": USER, "gid": USER},
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", **tmpfs},
            {"destination": "/tmp", **tmpfs},
            {"destination": "/etc/resolv.conf", "source": "/etc/resolv.conf", "options": ["bind", "ro"]},
            *(
                {"destination": path, "source": str(volumes / Path(path).parent.name), "options": ["bind", "rw"]}
                for path in kept
            ),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(specification))


@contextmanager
def mounted_image() -> Iterator[tuple[Path, dict[str, Any]]]:
    """The image's files and its configuration."""
    container = run("buildah", "from", "--pull-never", IMAGE)
    try:
        inspected = json.loads(run("buildah", "inspect", container))
        yield Path(run("buildah", "mount", container)), inspected["OCIv1"]["config"]
    finally:
        run("buildah", "rm", container)


class Containers:
    """Runs containers of the image, whose volumes outlive them."""

    def __init__(self, folder: Path, root: Path, config: dict[str, Any]) -> None:
        self._folder, self._root, self._config = folder, root, config
        self._started = 0
        self._volumes = folder / "volumes"
        for name in ("lib", "cache"):
            (self._volumes / name).mkdir(parents=True)
            os.chown(self._volumes / name, USER, USER)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Its process. SIGTERM to it reaches the first process of the container."""
        self._started += 1
        name = f"draftwood-test-{os.getpid()}-{self._started}"
        bundle(self._folder / name, self._root, self._config, arguments, self._volumes)
        command = ["runc", "run", "--bundle", str(self._folder / name), name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def serve(self, *arguments: str) -> tuple[subprocess.Popen[str], float]:
        """A service that is ready, and the seconds until it was."""
        began = time.monotonic()
        process = self.start(*self._config["Cmd"], *arguments)
        with Client("127.0.0.1:50051") as client:
            client.wait_until_ready(START_SECONDS)
        return process, time.monotonic() - began


def ends(process: subprocess.Popen[str]) -> str:
    """What it wrote. Exits if its status is not 0."""
    output, _ = process.communicate(timeout=60)
    if process.returncode:
        sys.exit(f"a container ended with status {process.returncode}\n{output[-4000:]}")
    return output


def exercise(containers: Containers) -> None:
    """Starts the service twice, asks it from a container and from here, and drains it in the midst of an answer."""
    refused = containers.start("serve", "--host", "0.0.0.0")
    output, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2, output
    assert "--auth open" in output, output
    for number in (1, 2):
        server, seconds = containers.serve("--auth", "open", "--store", "embedded")
        try:
            print(f"start {number} in the container: {seconds:.1f} s")
            print(ends(containers.start("chat", "--max-tokens", "24", QUESTION)).splitlines()[-1])
            with Client("127.0.0.1:50051") as client:
                with client.stream([ChatMessage("user", QUESTION)], max_tokens=400, ignore_eos=True) as stream:
                    next(iter(stream))
                    began = time.monotonic()
                    server.send_signal(signal.SIGTERM)
                    for _ in stream:
                        pass
                assert len(stream.completion().token_ids) == 400, "the drain cut an answer"
            ends(server)
            print(f"drained with status 0 in {time.monotonic() - began:.1f} s")
        finally:
            server.kill()


def report(root: Path) -> None:
    def mib(path: Path) -> int:
        return int(run("du", "-sxm", str(path)).split()[0])

    own, total = mib(root / "opt/draftwood"), mib(root)
    compiled = mib(root / "opt/draftwood/compiled")
    print(f"{total} MiB: base {total - own}, draftwood {own}, of it {compiled} of compiled functions")
    site = next((root / "opt/draftwood/lib").glob("python3*/site-packages"))
    largest = sorted(((mib(path), path.name) for path in site.iterdir() if path.is_dir()), reverse=True)[:8]
    print("largest: " + ", ".join(f"{name} {size}" for size, name in largest))
    for name in ("etc/pip.conf", "source", "wheels"):
        assert not (root / name).exists(), f"/{name} is in the image"


def main() -> None:
    if os.getuid() or not all(map(shutil.which, ("buildah", "mmdebstrap", "runc"))):
        sys.exit("make image-test needs root, and: apt-get install buildah mmdebstrap runc")
    with tempfile.TemporaryDirectory(prefix="draftwood-image-") as name:
        folder = Path(name)
        for step, work in (("base", make_base), ("image", build)):
            began = time.monotonic()
            work(folder)
            print(f"{step} built in {time.monotonic() - began:.0f} s")
        with mounted_image() as (root, config):
            report(root)
            exercise(Containers(folder, root, config))


if __name__ == "__main__":
    main()
