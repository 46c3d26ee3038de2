"""What a report says of its run, so that somebody can repeat it: command, date, version, commit and machine."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

_OUTPUT_FLAGS = ("--json", "--plot")


class RunFacts(TypedDict):
    """Of one run of a benchmark.

    Attributes:
        command: without the files that it writes.
        date: UTC, as YYYY-MM-DD.
        version: of the benchmarks; None where they are run without being installed.
        commit: that the code was installed from, with "-dirty" if files were changed; None outside a clone.
        processor: the CPU's name; "" if it is unknown.
        cores: that the process may use.
    """

    command: str
    date: str
    version: str | None
    commit: str | None
    processor: str
    cores: int


def run_facts() -> RunFacts:
    return {
        "command": command(sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "version": _version(),
        "commit": _commit(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


def _version() -> str | None:
    try:
        return version("draftwood-benchmarks")
    except PackageNotFoundError:
        return None


def command(arguments: Iterable[str]) -> str:
    """The command line of `draftwood` with these arguments, without the flags that name output files."""
    kept, left = list[str](), iter(arguments)
    for argument in left:
        if argument in _OUTPUT_FLAGS:
            next(left, None)
        elif not argument.startswith(tuple(f"{flag}=" for flag in _OUTPUT_FLAGS)):
            kept.append(argument)
    return shlex.join(["draftwood", *kept])


def _commit() -> str | None:
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment may lie in somebody else's clone
        return _git("describe", "--always", "--dirty", "--exclude=*", "--abbrev=9")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return ""
    return found.group(1).strip() if found else ""
