"""The TypeScript client: its own tests against a real service, lint, generated code; `make test-system` installs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood_benchmarks.harness.servers import running_server
from tools import typescript_reference

REPOSITORY = Path(__file__).resolve().parents[3]
CLIENT = REPOSITORY / "clients" / "typescript"
NPM = shutil.which("npm")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        NPM is None or not (CLIENT / "node_modules" / ".installed").exists(),
        reason="npm or the client's packages are missing: run `make clients/typescript/node_modules/.installed`",
    ),
]


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """The output of a command that must succeed, in the client's folder."""
    done = subprocess.run(
        command,
        cwd=CLIENT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def npm(*arguments: str, environment: dict[str, str] | None = None) -> str:
    assert NPM is not None
    return run(NPM, *arguments, environment=environment)


def test_its_own_tests_against_a_service() -> None:
    with running_server() as target:
        output = npm("test", environment={"DRAFTWOOD_TARGET": target})
    assert "# skipped 0" in output
    assert "# fail 0" in output


def test_lint_and_format() -> None:
    npm("run", "check")


def test_generated_code_is_current(tmp_path: Path) -> None:
    script = REPOSITORY / "tools" / "generate_typescript.sh"
    run(str(script), str(tmp_path / "gen"), environment={"PYTHON": sys.executable})
    run("diff", "-r", str(tmp_path / "gen"), str(CLIENT / "src" / "gen"))


def test_the_reference_is_current(tmp_path: Path) -> None:
    run(str(CLIENT / "node_modules" / ".bin" / "tsc"), "--outDir", str(tmp_path), "--emitDeclarationOnly")
    assert typescript_reference.page(tmp_path) == typescript_reference.PAGE.read_text(encoding="utf-8"), (
        "run `npm run build` in clients/typescript and `python -m tools.typescript_reference`"
    )
