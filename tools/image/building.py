"""Builds images with buildah: no registry, no daemon, and nothing stays on the machine.

The bases are made here: a Debian with its Python and Python's headers, as python:3.11-slim has them, and for
Dockerfile.vllm the same with vLLM's build for CPUs. pip has this machine's configuration while it builds.
"""

from __future__ import annotations

import configparser
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("cpu", "cuda", "vllm")
_DEBIAN, _VLLM = "localhost/draftwood-test-base", "localhost/draftwood-test-base-vllm"
_HEADERS = (
    'chroot "$1" sh -c "cd /tmp && apt-get download -q libpython3-dev libpython3.11-dev'
    ' && for each in *.deb; do dpkg-deb -x \\$each /; done && rm *.deb"'
)
"""Without what Debian would install with them, a part of which Triton's compiler needs: the Dockerfile must."""
_REQUIREMENTS = "benchmarks/draftwood_benchmarks/peers/requirements-vllm.txt"
_VLLM_BASE = f"""
FROM {_DEBIAN}
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1
RUN python3 -m venv /opt/vllm
ENV PATH=/opt/vllm/bin:$PATH
COPY {_REQUIREMENTS} /tmp/requirements.txt
RUN grep -v arctic-inference /tmp/requirements.txt > /tmp/needed.txt \\
    && python3 -m pip install --quiet --no-cache-dir setuptools==78.1.1 \\
    && python3 -m pip install --quiet --no-cache-dir --no-deps --requirement /tmp/needed.txt
"""
"""With the setuptools that it requires, and without a peer of the drafts, whose build takes gigabytes."""


def run(*command: str, **options: Any) -> str:
    """Standard output. Exits with the command's own messages if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{' '.join(command[:4])} ...: status {done.returncode}\n{done.stdout[-4000:]}")
    output: str = done.stdout
    return output.strip()


@dataclass(frozen=True, slots=True)
class Image:
    """A built image.

    Attributes:
        root: its files. Changes stay in this container of buildah's.
        config: its environment, command and so on, as OCI has it.
    """

    root: Path
    config: dict[str, Any]


class Builder:
    """Buildah with images in a folder: in layers, or with STORAGE_DRIVER=vfs as whole copies."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        settings = {"driver": os.environ.get("STORAGE_DRIVER", "overlay"), "graphroot": folder / "images"}
        lines = [f'{name} = "{value}"' for name, value in (settings | {"runroot": folder / "run"}).items()]
        (folder / "storage.conf").write_text("\n".join(["[storage]", *lines]) + "\n")
        own = {"CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"), "BUILDAH_ISOLATION": "chroot"}
        self._environment = {name: value for name, value in os.environ.items() if name != "STORAGE_DRIVER"} | own

    def _buildah(self, *arguments: str, **options: Any) -> str:
        return run("buildah", *arguments, env=self._environment, **options)

    def make_debian(self) -> None:
        """The base of all."""
        archive = str(self._folder / "base.tar")
        packages = "--include=python3,python3-venv,ca-certificates"
        run("mmdebstrap", "--quiet", "--variant=minbase", packages, f"--customize-hook={_HEADERS}", "bookworm", archive)
        container = self._buildah("from", "scratch")
        self._buildah("add", "--quiet", container, archive, "/")
        self._buildah("commit", "--quiet", "--rm", container, _DEBIAN)
        Path(archive).unlink()

    def build(self, name: str) -> None:
        """The image of this name, with its base."""
        file, arguments = "Dockerfile", {"BASE_BUILD": _DEBIAN, "BASE_RUN": _DEBIAN, "VARIANT": name}
        if name == "cpu":
            arguments["TORCH_INDEX"] = ""
        if name == "vllm":
            base = self._folder / "Dockerfile.base"
            base.write_text(_VLLM_BASE)
            self._build(_VLLM, base, {})
            file, arguments = "Dockerfile.vllm", {"BASE": _VLLM}
        # A wheel of torch that lies here is for CPUs.
        self._build(f"localhost/draftwood-test-{name}", REPOSITORY / file, arguments, with_folders=name != "cuda")

    def _build(self, tag: str, file: Path, arguments: dict[str, str], *, with_folders: bool = True) -> None:
        flags = [f"--build-arg={name}={value}" for name, value in arguments.items()]
        flags += [f"--file={file}", f"--tag={tag}", "--layers=false", *self._pip(with_folders)]
        self._buildah("build", *flags, str(REPOSITORY))

    def _pip(self, with_folders: bool) -> Iterator[str]:
        """Flags that give pip this machine's configuration, and the folders that it names or none of them."""
        config = configparser.RawConfigParser()
        config["global"] = {}
        mounts = set()
        for line in run(sys.executable, "-m", "pip", "config", "list").splitlines():
            name, value = line.split("=", 1)
            places = {word: Path(unquote(urlsplit(word).path)) for word in value.strip("'\"").split()}
            kept = {word: place for word, place in places.items() if with_folders or not place.is_dir()}
            mounts |= {place for place in kept.values() if place.is_absolute() and place.exists()}
            if kept:
                config["global"][name.rpartition(".")[2]] = " ".join(kept)
        written = self._folder / "pip.conf"
        with written.open("w") as file:
            config.write(file)
        yield f"--volume={written}:/etc/pip.conf:ro"
        for path in {
            path.parent if path.name == "simple" else path for path in mounts
        }:  # an index names what is beside it
            yield f"--volume={path}:{path}:ro"

    @contextmanager
    def mounted(self, name: str) -> Iterator[Image]:
        """A built image, which is removed at the end."""
        container = self._buildah("from", "--pull-never", f"localhost/draftwood-test-{name}")
        try:
            inspected = json.loads(self._buildah("inspect", container))
            yield Image(Path(self._buildah("mount", container)), inspected["OCIv1"]["config"])
        finally:
            self._buildah("rm", container)
            self._buildah("rmi", "--force", f"localhost/draftwood-test-{name}")
            self._buildah("rmi", "--prune", "--force")

    def clear(self) -> None:
        """Removes all images, so that the folder can be removed."""
        for what in ("rm", "rmi"):
            self._buildah(what, "--all", *(["--force"] if what == "rmi" else []))
