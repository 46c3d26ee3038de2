"""Tries every causal LM of transformers by both runners, and writes what `draftwood models --families` prints.

    python -m tools.sweep_models [FAMILY ...] [--runner torch] [--again] [--write]

Each family is tried by each runner in a process of its own, which is ended after some minutes. What came of it is kept
in build/sweep, so a sweep that was stopped goes on where it was; `--again` tries all. `--write` writes the table of
`draftwood models --families` and that of docs/models.md of all that is kept there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import time
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers

from draftwood_service.models.families import FILE
from tools.model_sweep.families import FAMILIES, NO_TEXT, kind_of, small_model
from tools.model_sweep.table import docs_table, entry, share
from tools.model_sweep.trial import NEW_TOKENS, PROMPTS, RUNNERS, try_runner

RESULTS = Path(__file__).parent.parent / "build" / "sweep"
DOCS = Path(__file__).parent.parent / "docs" / "models.md"
_SECONDS = 240


def try_family(family: str, runner: str) -> dict[str, Any]:
    """As `try_runner`, with `kind` and `seconds`; in a process of its own."""
    if family in NO_TEXT:
        return {"result": "refused", "reason": NO_TEXT[family], "kind": "attention"}
    context = mp.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(family, runner, sender))
    begun = time.monotonic()
    process.start()
    sender.close()
    try:
        found: dict[str, Any] = (
            receiver.recv() if receiver.poll(_SECONDS) else {"result": "refused", "reason": f"took over {_SECONDS} s"}
        )
    except EOFError:
        found = {"result": "refused", "reason": "the process that tried it ended without a result"}
    process.kill()
    process.join()
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def _try(family: str, runner: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    kind = "attention"
    try:
        module = small_model(family)
        kind = kind_of(family, module)
        sender.send(try_runner(module, runner) | {"kind": kind})
    except Exception as error:
        reason = f"no small model of it can be made or run: {type(error).__name__}: {str(error)[:200]}"
        sender.send({"result": "refused", "reason": reason, "kind": kind})


def write() -> None:
    """Writes the file of `draftwood models --families` and the table of the docs from the results that are kept."""
    entries = [
        entry(family, {runner: _kept(family, runner) for runner in RUNNERS if _file(family, runner).exists()})
        for family in FAMILIES
    ]
    tested = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "openvino": version("openvino"),
        "draftwood": version("draftwood"),
        "prompt_tokens": list(PROMPTS),
        "new_tokens": NEW_TOKENS,
    }
    FILE.write_text(json.dumps({"tested": tested, "families": entries}, indent=1) + "\n")
    DOCS.write_text(docs_table(DOCS.read_text(), entries))
    print(share(entries))


def _file(family: str, runner: str) -> Path:
    return RESULTS / f"{family}.{runner}.json"


def _kept(family: str, runner: str) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads(_file(family, runner).read_text())
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--runner", choices=RUNNERS, help="only this one")
    parser.add_argument("--again", action="store_true", help="try what was tried already")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} and the table of {DOCS.name}")
    options = parser.parse_args()
    runners = [options.runner] if options.runner else list(RUNNERS)
    asked = [(family, runner) for family in options.families for runner in runners]
    RESULTS.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    try_runner(small_model("llama"), "torch")  # what it loads and compiles, processes of families have then
    for done, (family, runner) in enumerate(asked, 1):
        if options.again or not _file(family, runner).exists():
            found = try_family(family, runner)
            _file(family, runner).write_text(json.dumps(found))
            print(
                f"{done} of {len(asked)}: {family}, {runner}: {found['result']} {found.get('reason', '')[:150]}",
                flush=True,
            )
    if options.write:
        write()


if __name__ == "__main__":
    main()
