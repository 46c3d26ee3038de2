"""`python -m tests.faults` shows that faults which readers and testers found stay mended: a row for each, and the
tests that would fail. `--json FILE` writes the rows, `--list` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

_ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    """What went wrong, by its part in the report, and the tests of what is right; none where it is not mended."""

    part: str
    fault: str
    tests: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """It shows whether the fault is mended."""
        return shlex.join(["pytest", "-m", "system or not system", *self.tests]) if self.tests else ""


def read_faults() -> list[Fault]:
    rows = tomllib.loads((_ROOT / "tests/faults.toml").read_text(encoding="utf-8"))["fault"]
    return [Fault(row["part"], row["fault"], tuple(row["tests"])) for row in rows]


def outcomes(faults: Sequence[Fault]) -> list[bool]:
    """Whether the tests of each pass, all of them run at once."""
    wanted = list(dict.fromkeys(test for fault in faults for test in fault.tests))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "system or not system", f"--junitxml={report}", *wanted]
        subprocess.run([*command, "-o", "junit_family=xunit1"], cwd=_ROOT, check=False, stdout=sys.stderr)
        cases = list(ET.parse(report).iter("testcase"))
    passed: dict[str, bool] = {}
    for case in cases:
        name = f"{case.get('file')}::{str(case.get('name')).partition('[')[0]}"
        fine = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
        for key in (name, str(case.get("file"))):
            passed[key] = passed.get(key, True) and fine
    return [bool(fault.tests) and all(passed.get(test, False) for test in fault.tests) for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    parser.add_argument("--list", action="store_true", help="show what would be run")
    options = parser.parse_args()
    faults = read_faults()
    found: list[bool | None] = [None] * len(faults) if options.list else [*outcomes(faults)]
    table = Table("part", "fault", "ok", title="Faults that readers and testers found")
    for fault, is_fine in zip(faults, found, strict=True):
        table.add_row(fault.part, fault.fault, {None: "", True: "yes", False: "no"}[is_fine])
    Console().print(table)
    if options.json is not None:
        rows = [
            {"part": fault.part, "fault": fault.fault, "command": fault.command, "ok": is_fine}
            for fault, is_fine in zip(faults, found, strict=True)
        ]
        options.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(is_fine is False for is_fine in found))


if __name__ == "__main__":
    main()
