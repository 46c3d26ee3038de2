"""`draftwood models`: names that `--model` knows and what is kept of models on this machine, or the families of models:
by which runner each is served, with which drafts, and why not."""

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
from draftwood_memory.settings.memory_settings import cache_folder
from draftwood_model_runner.loading.checkpoint import is_downloaded
from draftwood_model_runner.loading.sources.dense_weights import DENSE, dense_place
from draftwood_model_runner.loading.sources.known_models import KNOWN_MODELS
from draftwood_service.models.families import MULTIMODAL, Family, families, trial_conditions

app = new_app()
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


def models(args: list[str]) -> int:
    """The command. Returns the exit status."""
    return run(app, args, "models")


@app.command()
def _models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    of_families: Annotated[
        bool,
        typer.Option(
            "--families",
            help="List the families of models that were tried instead: which runner serves them, with which drafts, and"
            " why not.",
        ),
    ] = False,
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
    """List the models that --model knows by name, and what is kept on this machine."""
    if of_families:
        _print_families(as_json)
    else:
        _print_models(cache or cache_folder(os.environ), as_json)


def _print_models(cache: Path | None, as_json: bool) -> None:
    kept, now = ([] if cache is None else _kept_models(cache)), time.time()
    names = [_named(name, cache) for name in KNOWN_MODELS]
    if as_json:
        entries = [asdict(one) | {"folder": str(one.folder)} for one in kept]
        print(
            json.dumps(
                {"models": names, "cache_folder": None if cache is None else str(cache), "kept": entries}, indent=1
            )
        )
        return
    known = Table("--model", "what it is", "license", "download", "kept")
    for one in names:
        known.add_row(
            one["name"], one["title"], one["license"], _size(one["download_bytes"]), "yes" if one["kept"] else "no"
        )
    console = Console()
    console.print(known)
    console.print("--model also takes a folder, a GGUF file, or the id of a model on the hub.")
    if kept:
        table = Table("kept", "name", "size", "last used", title=f"In {cache}", title_justify="left")
        for entry in kept:
            table.add_row(entry.kind, entry.name, _size(entry.bytes), _ago(now - entry.used))
        console.print(table)
        console.print("Each may be deleted while no server starts; it is made again when it is needed.")
    console.print(f"draftwood models --families lists which of {len(families())} families each runner serves.")


def _named(name: str, cache: Path | None) -> dict[str, Any]:
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


def _print_families(as_json: bool) -> None:
    listed, tested = families(), trial_conditions()
    if as_json:
        print(json.dumps({"tested": tested, "families": [asdict(family) for family in listed]}, indent=1))
        return
    table = Table("family", "models", "kind", "torch", "openvino", "why not")
    for family in listed:
        verified = (family.verified_by(runner) for runner in ("torch", "openvino"))
        table.add_row(family.name, family.models, family.kind, *verified, family.reason)
    console = Console()
    console.print(table)
    console.print(
        f"Of {len(listed)} families torch serves {_served(listed, 'torch')}, and OpenVINO"
        f" {_served(listed, 'openvino')}: drafted greedy answers of small random models against generate of"
        f" transformers {tested['transformers']}."
    )
    console.print(f"Multimodal checkpoints are served for text alone; tried: {', '.join(MULTIMODAL)}.")


def _served(listed: list[Family], runner: str) -> str:
    verified = [family.verified_by(runner) for family in listed]
    tried = len(verified) - verified.count("not tried")
    served = tried - verified.count("refused")
    return str(served) if tried == len(listed) else f"{served} of the {tried} tried"


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
    """All entries, the last used first. One that disappears meanwhile, or that is being written, is left out."""
    dense = [("dense weights", folder) for folder in cache.glob(f"{DENSE}/*/*") if (folder / "config.json").is_file()]
    converted = [("converted", file.parent) for file in cache.glob("*/facts.json")]
    found = []
    for kind, folder in dense + converted:
        if folder.name.startswith("part-") or folder.parent.name.startswith("part-"):
            continue
        try:
            size = sum(file.stat().st_size for file in folder.iterdir())
            found.append(_Kept(kind, folder.name, folder, size, folder.stat().st_mtime))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda one: one.used, reverse=True)
