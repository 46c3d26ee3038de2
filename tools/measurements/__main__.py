"""`python -m tools.measurements` writes the page and the README's picture from the JSON files of `docs/measurements`.

With `run` the benchmarks write these first: all of them, some 40 minutes on two idle cores, or the named ones, as in
`python -m tools.measurements run one-stream`.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.measurements.page import PAGE, page
from tools.measurements.plot import PLOT, plot
from tools.measurements.suite import DOCS, FOLDER, MEASUREMENTS


def measure(names: Sequence[str]) -> None:
    """Measures, and replaces the files when all of it has succeeded.

    Files that are written meanwhile would make the commit of the later ones "-dirty".
    """
    wanted = [measurement for measurement in MEASUREMENTS if not names or measurement.name in names]
    unknown = sorted(set(names) - {measurement.name for measurement in wanted})
    if unknown:
        sys.exit(f"no measurement {', '.join(unknown)}; there are {', '.join(m.name for m in MEASUREMENTS)}")
    with tempfile.TemporaryDirectory() as folder:
        for measurement in wanted:
            command = ["draftwood", "bench", *shlex.split(measurement.arguments)]
            print("$", shlex.join(command), flush=True)
            subprocess.run([*command, "--json", f"{folder}/{measurement.file.name}"], cwd=DOCS.parent, check=True)
        FOLDER.mkdir(exist_ok=True)
        for measurement in wanted:
            shutil.copy(Path(folder) / measurement.file.name, measurement.file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        measure(sys.argv[2:])
    PAGE.write_text(page(), encoding="utf-8")
    PLOT.write_text(plot(), encoding="utf-8")
