"""Tries every family of `model_sweep.families` by both runners, and writes what `draftwood models` prints.

    python -m tools.sweep_models [FAMILY ...] [--write]

Each family is tried in a process of its own: one that ends it is noted as such. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

from draftwood_model_runner.loading.supported_models import FILE
from tools.model_sweep.families import FAMILIES, small_model
from tools.model_sweep.trial import NEW_TOKENS, PROMPTS, RUNNERS, try_runner

_SECONDS = 180


def try_family(family: str) -> dict[str, Any]:
    """An entry of the file; the runners' results are those of `try_runner`."""
    runners = {runner: _in_a_process(family, runner) for runner in RUNNERS}
    print(family, {name: result.get("reason", "yes")[:150] for name, result in runners.items()}, flush=True)
    return {"family": family, "models": FAMILIES[family], "since": version("draftwood"), "runners": runners}


def write(entry: dict[str, Any]) -> None:
    """Puts an entry into the file, in place of the family's last one."""
    kept = json.loads(FILE.read_text())["families"] if FILE.exists() else []
    entries = {old["family"]: old for old in kept} | {entry["family"]: entry}
    tested = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "openvino": version("openvino"),
        "prompt_tokens": list(PROMPTS),
        "new_tokens": NEW_TOKENS,
    }
    data = {"tested": tested, "families": [entries[family] for family in sorted(entries)]}
    FILE.write_text(json.dumps(data, indent=1) + "\n")


def _in_a_process(family: str, runner: str) -> dict[str, Any]:
    context = mp.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(family, runner, sender))
    process.start()
    sender.close()
    try:
        result: dict[str, Any] = (
            receiver.recv() if receiver.poll(_SECONDS) else {"supported": False, "reason": f"took over {_SECONDS} s"}
        )
    except EOFError:
        result = {"supported": False, "reason": "the process ended"}
    process.kill()
    process.join()
    return result


def _try(family: str, runner: str, sender: Connection) -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    try:
        sender.send(try_runner(small_model(family), runner))
    except Exception as error:
        reason = f"no small model of it can be made or run: {type(error).__name__}: {str(error)[:200]}"
        sender.send({"supported": False, "reason": reason})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name}, keeping the families not tried")
    options = parser.parse_args()
    for family in options.families:
        entry = try_family(family)
        if options.write:
            write(entry)


if __name__ == "__main__":
    main()
