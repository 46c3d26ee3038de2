"""`draftwood tenant` and `draftwood experiment` against the real services."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftwood_client.cli import build_app
from tests.service.fakes import serving

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    """Runs the command line against a server that has tenant `filed` in its file."""
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: tenants/filed, weight: 3}]\n")
    async with serving(tenants_file=file) as served:

        async def run_one(*args: str, stdin: str | None = None, **env: str) -> Result:
            settings = {"DRAFTWOOD_TARGET": served.server.address, "NO_COLOR": "1", **env}
            return await asyncio.to_thread(CliRunner().invoke, build_app(), list(args), input=stdin, env=settings)

        yield run_one


async def test_tenants(run: Run, tmp_path: Path) -> None:
    options = ("drafting.strategy=trie", "drafting.options.branch_length=8", "learning.idleTtl=36h", "weight=2")
    made = await run("tenant", "create", "acme", *options)
    assert (made.stderr, made.exit_code) == ("", 0)
    assert (await run("tenant", "create", "acme")).stderr == "error: tenants/acme: exists already\n"
    changed = await run(
        "tenant", "set", "acme", "drafting.options.branch_length=4", "weight=null", "quotas.concurrency=5"
    )
    assert "  weight: 2 -> unset\n" in changed.stdout
    shown = json.loads((await run("tenant", "show", "acme", "--json")).stdout)
    assert shown["drafting"] == {"strategy": "trie", "options": {"branch_length": 4}}
    assert shown["quotas"] == {"concurrency": 5}
    assert "weight" not in shown
    wrong = await run("tenant", "set", "acme", "drafting.options.branch=4")
    assert wrong.stderr.startswith("error: tenant.drafting.options.branch: ")
    filed = await run("tenant", "set", "filed", "weight=1")
    assert filed.stderr == (
        "error: tenants/filed: is defined in the servers' tenants file, and can only be changed there\n"
    )
    listed = (await run("tenant", "list")).stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["acme", "API"], ["filed", "file"]]
    editor = tmp_path / "editor.py"
    editor.write_text(
        "import pathlib, sys\nfile = pathlib.Path(sys.argv[1])\n"
        "text = file.read_text()\nfile.write_text(text.replace('concurrency: 5', 'concurrency: 6'))\n"
    )
    edited = await run("tenant", "edit", "acme", VISUAL=f"{sys.executable} {editor}")
    assert edited.stdout == "  quotas.concurrency: 5 -> 6\ntenant acme changed\n"
    file = tmp_path / "acme.yaml"
    file.write_text((await run("tenant", "show", "acme")).stdout + "weight: 7\n")
    assert (await run("tenant", "apply", "-f", str(file), "--dry-run")).stdout.endswith("  weight: unset -> 7\n")
    assert (await run("tenant", "apply", "-f", str(file))).exit_code == 0
    assert (await run("tenant", "delete", "acme", "--yes")).exit_code == 0
    shown = await run("tenant", "show", "acme")
    assert shown.stderr == "error: tenants/acme: has no configuration; the servers' settings apply\n"


async def test_a_tenants_file_is_checked(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "next.yaml"
    file.write_text(
        "tenants: [{name: tenants/filed, weight: 4}, {name: tenants/b, drafting: {strategy: none, maxNodes: -1}}]\n"
        "experiments:\n- name: experiments/x\n  state: EXPERIMENT_STATE_RUNNING\n  arms: [{id: a}, {id: b}]\n"
    )
    result = await run("tenant", "check", str(file))
    assert result.stdout == "tenants[0] filed: ok\nexperiments[0] x: ok\n"
    assert result.stderr.startswith("tenants[1]: tenant.drafting.max_nodes: -1 is not allowed")
    assert result.exit_code == 1


async def test_experiments(run: Run) -> None:
    arms = ("--arm", "control=trie", "--arm", "long=trie,branch_length=8,max_nodes=7", "--fork", "long")
    made = await run("experiment", "create", "x", *arms, "--tenant", "acme", "--unit", "session", "--burn-in", "5m")
    assert (made.stderr, made.exit_code) == ("", 0)
    wide = await run("experiment", "set", "x", "coverage=0.2")
    assert wide.stdout == "experiment x changed\n  coverage: unset -> 0.2\n"
    assert (await run("experiment", "start", "x")).stdout == "experiment x is running\n"
    frozen = await run("experiment", "set", "x", "unit=request")
    assert frozen.stderr.startswith("error: experiments/x: ")
    assert (await run("experiment", "set", "x", "coverage=1")).exit_code == 0
    concluded = await run("experiment", "conclude", "x", "--winner", "long")
    assert concluded.stdout == "experiment x is concluded, winner long\n"
    tenant = json.loads((await run("tenant", "show", "acme", "--json")).stdout)
    assert tenant["drafting"] == {"strategy": "trie", "options": {"branch_length": 8}, "maxNodes": 7}
    assert (await run("experiment", "delete", "x", "--yes")).exit_code == 0
