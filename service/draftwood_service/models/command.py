"""`draftwood models`: which families of models are served, by which runner, with which drafts, and why not."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftwood_client.cli.apps import new_app, run
from draftwood_service.models.families import MULTIMODAL, Family, families, trial_conditions

app = new_app()


def models(args: list[str]) -> int:
    """The command. Returns the exit status."""
    return run(app, args, "models")


@app.command()
def _models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """List the families of models that were tried: which runner serves them, with which drafts, and why not."""
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
