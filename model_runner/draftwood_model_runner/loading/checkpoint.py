"""Where a model's files are, before any of them is loaded. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from draftwood_model_runner.errors import ModelNotFoundError

BUNDLED_MODEL = str(Path(__file__).parent / "demo")
"""The model that ships with Draftwood; see its README.md."""


def require_folder(path_or_id: str) -> None:
    """A path that is meant as one must exist: the hub would answer with something less clear.

    Raises:
        ModelNotFoundError: there is no such folder, or no model in it.
    """
    looks_like_path = os.path.isabs(path_or_id) or path_or_id.startswith((".", "~")) or path_or_id.count("/") > 1
    if not path_or_id or (looks_like_path and not Path(path_or_id).is_dir()):
        raise ModelNotFoundError(f"model {path_or_id!r}: no such folder; give a folder or a hub id such as org/name")
    if Path(path_or_id).is_dir() and not (Path(path_or_id) / "config.json").is_file():
        raise ModelNotFoundError(f"model {path_or_id!r}: the folder has no config.json")


def name_of(path_or_id: str) -> str:
    """What clients know the model as."""
    if path_or_id == BUNDLED_MODEL:
        return "draftwood-demo"
    return Path(path_or_id).resolve().name if Path(path_or_id).is_dir() else path_or_id


def cannot_be_loaded(path_or_id: str, error: Exception) -> ModelNotFoundError:
    """What to raise where transformers raised `error`."""
    text = str(error).strip()
    return ModelNotFoundError(
        f"model {path_or_id!r} cannot be loaded: {text.splitlines()[0] if text else type(error).__name__}"
    )
