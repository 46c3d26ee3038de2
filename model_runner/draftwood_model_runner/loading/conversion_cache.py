"""Converted models that are kept in a folder, so that the next start needs no modelling code of transformers.

An entry holds for the content of the model's folder, the options it was loaded with, the versions of the packages that
read and computed it, and this package's own code: any change makes another key. What is in an entry is used only if its
digest is right and it computes, bit by bit, the logits that it did when it was written. Whatever goes wrong here, the
model is loaded as it would be without.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter

from draftwood_model_runner.engine_config import MODEL_CACHE_BYTES
from draftwood_model_runner.loading.checkpoint import KNOWN_DIGESTS, KnownDigests, digest_of_contents
from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.loading.gguf import require_private
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_model_runner.runners.base import KVShape

_log = logging.getLogger(__name__)

_SPARE = 0.05
"""Share of the disk that an entry leaves free."""
_PART, _PART_SECONDS = "part-", 3600
"""Beginning of the name of an entry that is being written, and how old one is that an interrupted start left."""
_ENTRY = re.compile(r"[0-9a-f]{32}")
_PACKAGES = ("numpy", "openvino", "safetensors", "tokenizers", "torch", "transformers")
_FACTS, _DIGEST, _STEP_TIMES = "facts.json", "sha256", "step-times.json"
"""Step times are written by the engine later, and are not part of the digest."""
_CODE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept of a model and of its factory beside OpenVINO's files."""

    facts: ModelFacts
    tokenizer_class: str
    shapes: tuple[KVShape, ...]
    window: tuple[int | None, bool]
    feature_layers: tuple[int, ...]


_ENTRY_FACTS = TypeAdapter(_Entry)


def entry_of(cache: Path, path_or_id: str, **options: object) -> Path | None:
    """The folder in `cache` of a model that is loaded with these options; None if it cannot be kept.

    That is a model on the hub, which may change; one with an adapter, whose base is elsewhere; and any model if the
    folder cannot be made, or others may write to it.
    """
    folder = Path(path_or_id)
    if find_spec("openvino") is None or not folder.is_dir() or (folder / "adapter_config.json").exists():
        return None
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        require_private(cache)
        versions = {package: version(package) for package in _PACKAGES}
        content = [
            digest_of_contents([*sorted(_CODE.rglob("*.py"))]),
            KnownDigests(cache / KNOWN_DIGESTS).digest(files),
        ]
        key = json.dumps([options, versions, *content], sort_keys=True)
        return cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    except OSError as error:
        _log.warning("converted models are not kept: %s", error)
        return None


def is_intact(folder: Path) -> bool:
    """Whether there is an entry whose content is what was written. Logs if it is not. Reads all of it, and leaves other
    threads the interpreter's lock."""
    if not folder.is_dir():
        return False
    try:
        intact = (folder / _DIGEST).read_text(encoding="utf-8") == _digest_of(folder)
    except OSError as error:
        _log.warning("the converted model in %s is not used: %s", folder, error)
        return False
    if not intact:
        _log.warning("the converted model in %s is not used: a file is damaged", folder)
    return intact


def tokenizer_of(folder: Path, path_or_id: str) -> Tokenizer | None:
    """The model's tokenizer, without what it takes to find its class. None if the folder does not tell that; whether it
    is right, `is_intact` says."""
    try:
        entry = _ENTRY_FACTS.validate_json((folder / _FACTS).read_bytes())
        return load_tokenizer(path_or_id, entry.tokenizer_class)
    except Exception:
        return None


def load_entry(folder: Path, tokenizer: Tokenizer, name: str, threads: int | None) -> LoadedModel | None:
    """The model of an entry that is intact; None if it does not compute what it did.

    Args:
        tokenizer, name: of the model.
        threads: CPU threads that steps will be computed with.
    """
    try:
        model = _load(folder, tokenizer, name, threads)
        os.utime(folder)
    except Exception as error:
        _log.warning("the converted model in %s is not used: %s", folder, error)
        return None
    return model


def _load(folder: Path, tokenizer: Tokenizer, name: str, threads: int | None) -> LoadedModel:
    from draftwood_model_runner.runners.openvino import factory as serialization
    from draftwood_model_runner.runners.openvino.pages import PageLayout

    entry = _ENTRY_FACTS.validate_json((folder / _FACTS).read_bytes())
    facts, layout = entry.facts, PageLayout(entry.shapes, entry.facts.dtype)
    grammars = tokenizer.grammars(facts.vocab_size, facts.eos_token_ids)
    grammars.prepare()
    factory = serialization.load(
        folder, layout, entry.window, entry.feature_layers, facts.vocab_size, facts.max_context, threads
    )
    return LoadedModel(
        name=name,
        factory=factory,
        tokenizer=tokenizer,
        grammars=grammars,
        step_times_file=folder / _STEP_TIMES,
        **vars(facts),
    )


def save_entry(folder: Path, model: LoadedModel, most_bytes: int = MODEL_CACHE_BYTES) -> bool:
    """Writes an entry in place of whatever is there, if OpenVINO computes the model; returns whether it did. Logs what
    goes wrong.

    Args:
        most_bytes: of all entries; those that were not used for longest make room.
    """
    if model.runner_name != "openvino":
        return False
    from draftwood_model_runner.runners.openvino import factory as serialization

    cache, factory = folder.parent, cast(Any, model.factory)
    part: Path | None = None
    try:
        shutil.rmtree(folder, ignore_errors=True)
        _make_room(cache, serialization.file_bytes(factory), most_bytes)
        part = Path(tempfile.mkdtemp(prefix=_PART, dir=cache))
        _write(model, part)
        part.rename(folder)
        return True
    except Exception as error:
        _log.warning("the converted model is not kept, so the next start converts it again: %s", error)
        return False
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _write(model: LoadedModel, folder: Path) -> None:
    from draftwood_model_runner.runners.openvino import factory as serialization

    factory: Any = model.factory
    serialization.save(factory, folder, model.vocab_size, model.max_context)
    entry = _Entry(
        facts=ModelFacts(**{field.name: getattr(model, field.name) for field in fields(ModelFacts)}),
        tokenizer_class=model.tokenizer.class_path,
        shapes=factory.converted.layout.shapes,
        window=(factory.converted.window, factory.converted.in_every_layer),
        feature_layers=factory.feature_layers,
    )
    (folder / _FACTS).write_bytes(_ENTRY_FACTS.dump_json(entry))
    (folder / _DIGEST).write_text(_digest_of(folder), encoding="utf-8")


def _digest_of(folder: Path) -> str:
    kept = (path for path in sorted(folder.iterdir()) if path.name != _DIGEST and not path.name.startswith(_STEP_TIMES))
    return digest_of_contents([*kept])


def _make_room(cache: Path, wanted: int, limit: int) -> None:
    """Removes the entries that were not used for longest until there is room for another one, and what interrupted
    starts left.

    Raises:
        OSError: there is not enough room without them all.
    """
    if wanted > limit:
        raise OSError(f"it takes {_gb(wanted)}, and model_cache_bytes is {_gb(limit)}")
    for part in cache.glob(f"{_PART}*"):
        if time.time() - part.stat().st_mtime > _PART_SECONDS:
            shutil.rmtree(part, ignore_errors=True)
    sizes = {entry: sum(file.stat().st_size for file in entry.iterdir()) for entry in _entries(cache)}
    for entry in sorted(sizes, key=lambda entry: entry.stat().st_mtime):
        if sum(sizes.values()) + wanted <= limit and _free(cache) >= wanted:
            return
        shutil.rmtree(entry, ignore_errors=True)
        del sizes[entry]
    if (free := _free(cache)) < wanted:
        raise OSError(f"it takes {_gb(wanted)}, and {cache} has room for {_gb(max(free, 0))}")


def _entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if _ENTRY.fullmatch(path.name) and path.is_dir()]


def _free(cache: Path) -> int:
    """Bytes that may be written to its disk."""
    disk = shutil.disk_usage(cache)
    return int(disk.free - _SPARE * disk.total)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
