"""What the benchmarks' tests share: a run of a command, peers that are small programs, and traces."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftwood_benchmarks.commands import bench
from draftwood_benchmarks.peers import process

UsePeer = Callable[[str], None]
"""Makes a program that of every peer."""
ReportOf = Callable[..., dict[str, Any]]
"""Runs `draftwood bench` with some arguments, and returns the report that it writes."""
ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["op"] == "load":
        answer = {"version": request["dtype"] + " " + request["weights"]}
    elif request["op"] == "generate":
        answer = {"tokens": request["prompt"][: request["max_tokens"]], "seconds": 0.5}
    else:
        answer = {"tokens": len(request["prompts"]) * request["streams"], "seconds": request["seconds"]}
    print(json.dumps(answer), flush=True)
"""
"""Its answers are the first tokens of the prompts."""


@pytest.fixture
def report_of(tmp_path: Path) -> ReportOf:
    def run(*arguments: str) -> dict[str, Any]:
        file = tmp_path / "report.json"
        assert bench([*arguments, "--json", str(file)]) == 0
        report: dict[str, Any] = json.loads(file.read_text())
        return report

    return run


@pytest.fixture
def use_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UsePeer:
    def use(program: str) -> None:
        script = tmp_path / "peer.py"
        script.write_text(program)
        command_of = process.command_of

        def command(name: str, module: str) -> list[str]:
            return [sys.executable, str(script)] if name in process.DRAFTS else command_of(name, module)

        monkeypatch.setattr(process, "command_of", command)

    return use


def write_trace(path: Path, rows: int) -> Path:
    """A trace whose outputs differ in their last token."""
    lines = [{"prompt_ids": [1, i], "output_ids": [*range(10, 40), i]} for i in range(2, 2 + rows)]
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path
