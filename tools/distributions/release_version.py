"""Checks that everything that is released has one version: `python tools/distributions/release_version.py 0.1.0`.

With `--folders` it prints the folders of the distributions instead. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def folders() -> list[Path]:
    """Of the distributions."""
    return sorted(path.parent for path in REPOSITORY.glob("*/pyproject.toml")) + sorted(
        path.parent for part in ("clients", "plugins") for path in REPOSITORY.glob(f"{part}/*/pyproject.toml")
    )


def versions() -> dict[str, str]:
    """Of each distribution, of the chart and of the image, by where it is written."""
    found = {
        f"{folder.relative_to(REPOSITORY)}/pyproject.toml": tomllib.loads((folder / "pyproject.toml").read_text())[
            "project"
        ]["version"]
        for folder in folders()
    }
    chart = (REPOSITORY / "helm/draftwood/Chart.yaml").read_text()
    for key in ("version", "appVersion"):
        found[f"helm/draftwood/Chart.yaml {key}"] = re.findall(rf"^{key}: (\S+)$", chart, re.M)[0]
    return found


def main() -> int:
    if sys.argv[1] == "--folders":
        print(*(folder.relative_to(REPOSITORY) for folder in folders()), sep="\n")
        return 0
    wrong = [
        f"{place}: {version}, not {sys.argv[1]}" for place, version in versions().items() if version != sys.argv[1]
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
