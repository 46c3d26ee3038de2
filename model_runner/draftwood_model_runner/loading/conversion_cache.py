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
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from draftwood_model_runner.loading.facts import ModelFacts
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.sources.dense_weights import DENSE, require_private
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.runners.base import KVShape

_log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 30
"""Bytes of a model's folder that are kept at most: of a larger one, modelling code is a small part of the start, and
its files would be written twice."""
_MAX_ENTRIES = 4
"""Entries, the latest used."""
_PACKAGES = ("numpy", "openvino", "safetensors", "tokenizers", "torch", "transformers")
_FACTS, _DIGEST = "facts.json", "sha256"
_CODE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What is kept of a model and of its factory beside OpenVINO's files."""

    facts: ModelFacts
    shapes: tuple[KVShape, ...]
    window: tuple[int | None, bool]


def entry_of(cache: Path, path_or_id: str, **options: str | int | None) -> Path | None:
    """The folder in `cache` of a model that is loaded with these options; None if it cannot be kept.

    That is a model on the hub, which may change; one with an adapter, whose base is elsewhere; one that is too large;
    and any model if the folder cannot be made, or others may write to it.
    """
    folder = Path(path_or_id)
    if find_spec("openvino") is None or not folder.is_dir() or (folder / "adapter_config.json").exists():
        return None
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if sum(path.stat().st_size for path in files) > _MAX_BYTES:
            return None
        require_private(cache)
        versions = {package: version(package) for package in _PACKAGES}
        key = json.dumps([options, versions, _digest([*files, *sorted(_CODE.rglob("*.py"))])], sort_keys=True)
        return cache / hashlib.sha256(key.encode()).hexdigest()[:32]
    except OSError as error:
        _log.warning("converted models are not kept: %s", error)
        return None


def load_entry(folder: Path, tokenizer: Tokenizer, name: str, threads: int | None) -> LoadedModel | None:
    """The model of an entry; None if there is none or it is damaged.

    Args:
        tokenizer, name: of the model.
        threads: CPU threads that steps will be computed with.
    """
    if not folder.is_dir():
        return None
    try:
        model = _load(folder, tokenizer, name, threads)
        os.utime(folder)
    except Exception as error:
        _log.warning("the converted model in %s is not used: %s", folder, error)
        return None
    return model


def _load(folder: Path, tokenizer: Tokenizer, name: str, threads: int | None) -> LoadedModel:
    from draftwood_model_runner.runners.openvino import serialization
    from draftwood_model_runner.runners.openvino.kv_pages import PageLayout

    if (folder / _DIGEST).read_text(encoding="utf-8") != _digest_of(folder):
        raise ValueError("a file is damaged")
    entry = TypeAdapter(_Entry).validate_json((folder / _FACTS).read_bytes())
    facts, layout = entry.facts, PageLayout(entry.shapes, entry.facts.dtype)
    factory = serialization.load(folder, layout, entry.window, facts.vocab_size, facts.max_context, threads)
    tokenizer.check_ends(facts.eos_token_ids)
    return LoadedModel(
        name=name,
        factory=factory,
        tokenizer=tokenizer,
        grammars=tokenizer.grammars(facts.vocab_size, facts.eos_token_ids),
        **vars(facts),
    )


def save_entry(folder: Path, model: LoadedModel) -> None:
    """Writes an entry in place of whatever is there, if OpenVINO computes the model. Logs what goes wrong."""
    if model.runner_name != "openvino":
        return
    cache = folder.parent
    part = Path(tempfile.mkdtemp(prefix="part-", dir=cache))
    try:
        _write(model, part)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        _remove_old(cache)
    except Exception as error:
        _log.warning("the converted model was not kept: %s", error)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write(model: LoadedModel, folder: Path) -> None:
    from draftwood_model_runner.runners.openvino import serialization

    factory: Any = model.factory
    serialization.save(factory, folder, model.vocab_size, model.max_context)
    entry = _Entry(
        facts=ModelFacts(**{one.name: getattr(model, one.name) for one in fields(ModelFacts)}),
        shapes=factory.converted.layout.shapes,
        window=(factory.converted.window, factory.converted.in_every_layer),
    )
    (folder / _FACTS).write_bytes(TypeAdapter(_Entry).dump_json(entry))
    (folder / _DIGEST).write_text(_digest_of(folder), encoding="utf-8")


def _digest_of(folder: Path) -> str:
    return _digest(path for path in sorted(folder.iterdir()) if path.name != _DIGEST)


def _digest(files: Iterable[Path]) -> str:
    """Of names and contents."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _remove_old(cache: Path) -> None:
    """All entries but the latest used; what an interrupted start left, too. Dense weights stay."""
    entries = (path for path in cache.iterdir() if path.is_dir() and path.name != DENSE)
    folders = sorted(entries, key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_MAX_ENTRIES]:
        shutil.rmtree(folder, ignore_errors=True)
