"""Makes what a tag releases, without the images, into `build/release`, and publishes nothing: `make release-check`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from helm_python.chart import Chart

from tools.distributions.lock import ROOT
from tools.distributions.release_version import folders, notes, versions, wrong_for

FOLDER = ROOT / "build/release"


def make(into: Path) -> None:
    """Wheels and source archives of all distributions, the chart, and the notes."""
    for folder in folders():
        for builder in (SdistBuilder(str(folder)), WheelBuilder(str(folder))):
            list(builder.build(directory=str(into)))
    Chart.load(ROOT / "helm/draftwood").save(into)
    (into / "notes.md").write_text(notes()[1] + "\n", encoding="utf-8")


def main() -> int:
    version = versions()[0][1]
    if wrong := wrong_for(version):
        print(*wrong, sep="\n")
        return 1
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    make(FOLDER)
    print(f"{version}, in {FOLDER.relative_to(ROOT)}:", *sorted(path.name for path in FOLDER.iterdir()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
