"""What is kept of models in the folder of converted models. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftwood_model_runner.loading.sources.dense_weights import DENSE


@dataclass(frozen=True, slots=True)
class KeptModel:
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


def kept_models(cache: Path) -> list[KeptModel]:
    """All entries, the last used first. One that disappears meanwhile, or that is being written, is left out."""
    dense = [("dense weights", folder) for folder in cache.glob(f"{DENSE}/*/*") if (folder / "config.json").is_file()]
    converted = [("converted", file.parent) for file in cache.glob("*/facts.json")]
    found = []
    for kind, folder in dense + converted:
        if folder.name.startswith("part-") or folder.parent.name.startswith("part-"):
            continue
        try:
            size = sum(file.stat().st_size for file in folder.iterdir())
            found.append(KeptModel(kind, folder.name, folder, size, folder.stat().st_mtime))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda one: one.used, reverse=True)
