"""Which families of models were tried, what runners draft for them, and why not: `draftwood models --families`.

`tools/sweep_models.py` writes the file. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MULTIMODAL = (
    "gemma3",
    "gemma4",
    "internvl",
    "llama4",
    "llava",
    "mistral3",
    "qwen2_5_vl",
    "qwen3_5",
    "qwen3_vl",
)
"""Multimodal model types whose checkpoints were tried: their text is served, images are not."""
FILE = Path(__file__).parent / "families.json"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: those of one model type of transformers.

    Attributes:
        name: the model type.
        models: well-known models of it.
        kind: "attention", "hybrid" (some layers keep a state) or "recurrent" (all do).
        torch, openvino: what the runner verifies: draft "trees", only "chains", or nothing: "refused".
        reason: why a runner refuses it; empty if none does.
    """

    name: str
    models: str
    kind: str
    torch: str
    openvino: str
    reason: str

    def verified_by(self, runner: str) -> str:
        """What a runner, "torch" or "openvino", verifies, for people: "not tried" where nothing is known."""
        return "not tried" if f"{runner}: not tried" in self.reason else str(getattr(self, runner))


def trial_conditions() -> dict[str, Any]:
    """Versions and numbers of the trial."""
    tested: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["tested"]
    return tested


def families() -> list[Family]:
    """All causal LMs of transformers, by name."""
    return [Family(**entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["families"]]
