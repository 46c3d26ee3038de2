"""`draftwood models`: which families of models are served, by which runner, with which drafts, and why not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from draftwood_service.models.families import MULTIMODAL, Family, families, trial_conditions


def models(args: list[str]) -> int:
    """Prints the table, or with `--json` the same as JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="draftwood models", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    listed, tested = families(), trial_conditions()
    if options.json:
        print(json.dumps({"tested": tested, "families": [asdict(family) for family in listed]}, indent=1))
        return 0
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
    return 0


def _served(listed: list[Family], runner: str) -> str:
    verified = [family.verified_by(runner) for family in listed]
    tried = len(verified) - verified.count("not tried")
    served = tried - verified.count("refused")
    return str(served) if tried == len(listed) else f"{served} of the {tried} tried"
