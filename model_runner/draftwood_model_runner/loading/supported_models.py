"""Which families of models were tried, by which runner they are computed, and why not: the table of `draftwood models`.

`tools/sweep_models.py` writes the file. No torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "supported_models.json"


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models: those of one model type of transformers.

    Attributes:
        family: the model type.
        models: well-known models of it.
        runners: the runners that compute it.
        since: the version of Draftwood that was tried.
        tested: how many of the greedy answers, drafted, were those of transformers; empty if it is not supported.
        reason: why a runner does not compute it; empty if all do.
    """

    family: str
    models: str
    runners: tuple[str, ...]
    since: str
    tested: str
    reason: str


def trial_conditions() -> dict[str, Any]:
    """Versions and numbers of the trial."""
    tested: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))["tested"]
    return tested


def families() -> list[Family]:
    """All that were tried, by name."""
    return [_family(entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["families"]]


def _family(entry: dict[str, Any]) -> Family:
    results: dict[str, dict[str, Any]] = entry["runners"]
    runners = tuple(name for name, result in results.items() if result["supported"])
    counts = (f"{name} {results[name]['identical']} of {results[name]['answers']}" for name in runners)
    reasons = dict.fromkeys(  # where no runner computes it, one says enough
        result["reason"] for name, result in results.items() if not result["supported"] and (runners or name == "torch")
    )
    return Family(entry["family"], entry["models"], runners, entry["since"], ", ".join(counts), "; ".join(reasons))
