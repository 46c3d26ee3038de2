"""`python -m tests.callers` calls the real gateway with libraries that call OpenAI's API, and prints a row for each
case: client, case, ok. `--json FILE` writes them. Exits with 1 if one is not ok. `make callers` installs the libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwood_benchmarks.harness.servers import running_gateway, running_server
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.system.test_smg import THINKING

_FOLDER, _ROOT = Path(__file__).parent, Path(__file__).parents[2]
_MODEL = "tools"
_TEMPLATE = THINKING.replace("message.content", "message.content.split('</think>')[-1]")
"""Thoughts are what the template leaves out of earlier answers."""
_SECONDS = 600


def rows(python: Path, modules: Path) -> list[dict[str, Any]]:
    """All cases, in front of the bundled model with a template that has tools and thoughts.

    Args:
        python: of the environment with the packages.
        modules: a folder of Node's packages.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / _MODEL
        shutil.copytree(BUNDLED_MODEL, model)
        (model / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
        with (
            running_server("--threads", "1", "--stream-interval", "0", "--model", str(model)) as target,
            running_gateway(target) as gateway,
        ):
            url = f"http://{gateway.target}"
            of_python = _run("python", [str(python), str(_FOLDER / "clients.py"), url, _MODEL], {})
            node = shutil.which("node") or "node"
            of_node = _run("node", [node, str(_FOLDER / "clients.js"), url, _MODEL], {"NODE_PATH": str(modules)})
    return of_python + of_node


def _run(language: str, command: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """The rows that a program prints; one that says why, if it does not run to its end."""
    printed, why = "", ""
    try:
        # LiteLLM would ask the internet for prices.
        variables = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=_SECONDS, check=False)
        printed = done.stdout
        why = done.stderr.strip()[-300:] or f"ended with status {done.returncode}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    found: list[dict[str, Any]] = [json.loads(line) for line in printed.splitlines() if line.startswith('{"client"')]
    return [*found, {"client": language, "case": "runs", "ok": False, "why": why}] if why else found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.callers", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument(
        "--python", type=Path, default=_ROOT / ".venv-peers/callers/bin/python", help="with the packages"
    )
    parser.add_argument("--node-modules", type=Path, default=_ROOT / "build/node/node_modules", help="Node's packages")
    options = parser.parse_args()
    found = rows(options.python, options.node_modules)
    table = Table("client", "case", "ok", "why")
    for row in found:
        table.add_row(row["client"], row["case"], "yes" if row["ok"] else "no", row["why"])
    Console(width=160).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(row["ok"] for row in found) else 1)


if __name__ == "__main__":
    main()
