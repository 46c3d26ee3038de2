"""What a report says of its run, so that somebody can repeat it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftwood_model_runner.runners.capacity.host import processor_name

_OUTPUT_FLAGS = ("--json", "--plot")


def run_facts() -> dict[str, Any]:
    """Command, without the files that it writes; date in UTC as YYYY-MM-DD; version of the benchmarks, None if they are
    not installed; commit that the code was installed from, with "-dirty" if files were changed, None outside a clone;
    processor, "" if it is unknown; cores that the process may use."""
    installed, commit = None, None
    with suppress(PackageNotFoundError):
        installed = version("draftwood-benchmarks")
    with suppress(OSError, subprocess.SubprocessError):
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie in somebody else's clone
        commit = _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=9")
    return {
        "command": command(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "version": installed,
        "commit": commit,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
    }


def command(arguments: Iterable[str]) -> str:
    """The command line of `draftwood` with these arguments, without the flags that name output files."""
    kept, left = list[str](), iter(arguments)
    for argument in left:
        if argument in _OUTPUT_FLAGS:
            next(left, None)
        elif not argument.startswith(tuple(f"{flag}=" for flag in _OUTPUT_FLAGS)):
            kept.append(argument)
    return shlex.join(["draftwood", *kept])


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
