"""`draftwood models`: which families of models are supported, by which runner, how that was tested, and why not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from draftwood_model_runner.loading.supported_models import families, trial_conditions


def models(args: list[str]) -> int:
    """Prints the table, or with `--json` the same as JSON; returns 0."""
    parser = argparse.ArgumentParser(prog="draftwood models", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(args)
    listed, tested = families(), trial_conditions()
    if options.json:
        print(json.dumps({"tested": tested, "families": [asdict(family) for family in listed]}, indent=1))
        return 0
    table = Table("family", "models", "runners", "identical answers", "since", "why not")
    for family in listed:
        table.add_row(
            family.family,
            family.models,
            ", ".join(family.runners) or "none",
            family.tested,
            family.since,
            family.reason,
        )
    console = Console()
    console.print(table)
    supported = sum(bool(family.runners) for family in listed)
    console.print(
        f"{supported} of {len(listed)} families listed are supported, tried as small random models with transformers"
        f" {tested['transformers']}: drafted greedy answers against generate."
    )
    return 0
