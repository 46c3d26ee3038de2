"""`draftwood models`: which families of models are served, by which runner, with which drafts, and why not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from draftwood_service.models.families import Family, families, trial_conditions


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
        table.add_row(family.name, family.models, family.kind, family.torch, family.openvino, family.reason)
    console = Console()
    console.print(table)
    served = [sum(runner != "refused" for runner in runners) for runners in zip(*_runners(listed), strict=True)]
    console.print(
        f"Of {len(listed)} families torch serves {served[0]} and OpenVINO {served[1]}, tried as small random models"
        f" with transformers {tested['transformers']}: drafted greedy answers against generate."
    )
    return 0


def _runners(listed: list[Family]) -> list[tuple[str, str]]:
    return [(family.torch, family.openvino) for family in listed]
