"""The version of a release, in every place that has it, and the release's notes. Needs nothing but Python.

release_version.py 0.2.0        fails, with what is wrong, if a place or the changelog's top entry has another version
release_version.py --set 0.2.0  writes the version into every place but the changelog
release_version.py --notes URL  prints the changelog's top entry, with its links to pages below the URL
release_version.py --folders    prints the folders of the distributions
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
VERSION = r"(\d+\.\d+\.\d+)"
_PROJECT = (rf'^version = "{VERSION}"$', rf'"draftwood[\w-]*(?:\[[\w,-]+\])?=={VERSION}"')
_IMAGE = (rf"\bdraftwood:{VERSION}",)
_REQUIRED = (rf" draftwood-\w+=={VERSION}",)
PLACES = {
    "*/pyproject.toml": _PROJECT,
    "clients/*/pyproject.toml": _PROJECT,
    "plugins/*/pyproject.toml": _PROJECT,
    "clients/typescript/package.json": (rf'^  "version": "{VERSION}",$',),
    "clients/typescript/package-lock.json": (rf'"name": "draftwood-client",\s+"version": "{VERSION}"',),
    "clients/typescript/src/options.ts": (rf'^export const VERSION = "{VERSION}";$',),
    "helm/draftwood/Chart.yaml": (rf"^(?:version|appVersion): {VERSION}$",),
    "helm/draftwood/values.yaml": _IMAGE,
    "Dockerfile*": (rf"^ARG VERSION={VERSION}$",),
    "examples/sglang/kubernetes.yaml": _REQUIRED,
    "examples/vllm/values.yaml": _REQUIRED,
    "README.md": _IMAGE,
    "docs/image.md": (*_IMAGE, rf"^\| `VERSION`, `REVISION` \| `{VERSION}`"),
    "docs/releasing.md": (*_IMAGE, rf"\bv{VERSION}\b", rf"--version {VERSION}\b"),
    "docs/telemetry.md": (rf"^draftwood {VERSION} ",),
}
"""Files by pattern, with expressions whose group is the version. The chart's golden files follow with `make golden`."""


def folders() -> list[Path]:
    """Of the distributions."""
    return [path.parent for pattern, found in PLACES.items() if found is _PROJECT for path in _files(pattern)]


def versions() -> list[tuple[str, str]]:
    """Each place by file and line, with the version that is written there."""
    return [
        (f"{path.relative_to(REPOSITORY)}:{text.count(chr(10), 0, match.start(1)) + 1}", match[1])
        for path, text, matches in _written()
        for match in matches
    ]


def set_version(version: str) -> None:
    for path, text, matches in _written():
        for match in reversed(matches):
            text = text[: match.start(1)] + version + text[match.end(1) :]
        path.write_text(text, encoding="utf-8")


def notes() -> tuple[str, str]:
    """The heading of the changelog's top entry, such as "0.2.0 (2026-11-29)" or "Unreleased", and the entry's text."""
    _, entry, *_ = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    heading, _, text = entry.partition("\n")
    return heading, text.strip()


def wrong_for(version: str) -> list[str]:
    """What does not belong to a release of that version."""
    wrong = [f"{place}: {found}, not {version}" for place, found in versions() if found != version]
    heading, _ = notes()
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading):
        wrong.append(f'CHANGELOG.md: the top entry is "{heading}", not "{version} (YEAR-MONTH-DAY)"')
    return wrong


def _files(pattern: str) -> list[Path]:
    """At least one, which is not there if none is."""
    return sorted(REPOSITORY.glob(pattern)) or [REPOSITORY / pattern]


def _written() -> Iterator[tuple[Path, str, list[re.Match[str]]]]:
    """Each file with its text, and where the version is, in order. Raises ValueError for a file that has none."""
    for pattern, expressions in PLACES.items():
        for path in _files(pattern):
            text = path.read_text(encoding="utf-8")
            matches = [match for one in expressions for match in re.finditer(one, text, re.MULTILINE)]
            if not matches:
                raise ValueError(f"{path.relative_to(REPOSITORY)}: no version that PLACES describes")
            yield path, text, sorted(matches, key=lambda match: match.start(1))


def main() -> int:
    match sys.argv[1:]:
        case ["--folders"]:
            print(*(folder.relative_to(REPOSITORY) for folder in folders()), sep="\n")
        case ["--notes", url]:
            print(re.sub(r"\]\((?!https?:)", f"]({url.rstrip('/')}/", notes()[1]))
        case ["--set", version] if re.fullmatch(VERSION, version):
            set_version(version)
        case [version] if re.fullmatch(VERSION, version):
            wrong = wrong_for(version)
            print(*wrong, sep="\n", end="\n" if wrong else "")
            return bool(wrong)
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
