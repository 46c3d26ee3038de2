"""`python -m tools.measurements` writes the page and the README's picture from the JSON files of `docs/measurements`.

With `run` the benchmarks write these first: what needs no further files, some minutes on two idle cores, or the named
ones. Those with prompts get the paths of their files: `python -m tools.measurements run smollm2-chat-int4
prompts=FOLDER`. They take 5 to 15 minutes each.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from types import MappingProxyType

from tools.measurements.page import PAGE, page
from tools.measurements.plot import PLOT, plot
from tools.measurements.suite import DOCS, FOLDER, MEASUREMENTS, Measurement


def measure(names: Sequence[str], paths: Mapping[str, str] = MappingProxyType({})) -> None:
    """Measures, and replaces the files when all of it has succeeded.

    Files that are written meanwhile would make the commit of the later ones "-dirty".

    Args:
        names: of measurements; empty for all that need no paths.
        paths: what stands for `$name` in their arguments.
    """
    wanted = [one for one in MEASUREMENTS if (one.name in names if names else not _needed(one))]
    unknown = sorted(set(names) - {measurement.name for measurement in wanted})
    if unknown:
        sys.exit(f"no measurement {', '.join(unknown)}; there are {', '.join(m.name for m in MEASUREMENTS)}")
    missing = sorted({path for one in wanted for path in _needed(one)} - set(paths))
    if missing:
        sys.exit(f"paths are missing: {', '.join(f'{name}=PATH' for name in missing)}")
    with tempfile.TemporaryDirectory() as folder:
        for measurement in wanted:
            command = [
                "draftwood",
                "bench",
                *(Template(part).substitute(paths) for part in shlex.split(measurement.arguments)),
            ]
            print("$", shlex.join(command), flush=True)
            file = Path(folder, measurement.file.name)
            subprocess.run([*command, "--json", str(file)], cwd=DOCS.parent, check=True)
            file.write_text(_without(file.read_text(encoding="utf-8"), paths), encoding="utf-8")
        FOLDER.mkdir(exist_ok=True)
        for measurement in wanted:
            shutil.copy(Path(folder) / measurement.file.name, measurement.file)


def _needed(measurement: Measurement) -> list[str]:
    """The names of the paths in its arguments."""
    return Template(measurement.arguments).get_identifiers()


def _without(report: str, paths: Mapping[str, str]) -> str:
    """The text of a JSON file with the names of paths in place of the paths, which belong to one machine."""
    for name, path in paths.items():
        report = report.replace(json.dumps(path)[1:-1], f"${name}")
    return report


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        given = [argument.partition("=") for argument in sys.argv[2:]]
        measure(
            [name for name, separator, _ in given if not separator],
            {name: path for name, separator, path in given if separator},
        )
    PAGE.write_text(page(), encoding="utf-8")
    PLOT.write_text(plot(), encoding="utf-8")
