"""Figures of a summary stand in the section that the summary links to; those of CPUs come from measured JSON files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.pages import ROOT, pages

SUMMARIES = {"README.md": "What you gain"}
"""Pages, and the section of each with a table whose figures are links. `docs/measurements.md` is written from the JSON
files (`test_site.py`)."""
_LINK = re.compile(r"\[([^\]]*\d[^\]]*)\]\(([^)#]+)#([^)]+)\)")


class Cell(NamedTuple):
    """A link in a table."""

    page: str
    figures: str
    target: Path
    anchor: str


def section(text: str, anchor: str) -> str:
    """What stands under the heading of an anchor, up to the next heading of its level or above it."""
    lines, level, found = text.splitlines(), 0, list[str]()
    for line in lines:
        heading = re.match(r"(#+) (.*)", line)
        if level and heading and len(heading[1]) <= level:
            break
        if level:
            found.append(line)
        elif heading and slug(heading[2]) == anchor:
            level = len(heading[1])
    assert level, f"no heading of #{anchor}"
    return "\n".join(found)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def cells() -> list[Cell]:
    found = []
    for page, heading in SUMMARIES.items():
        rows = [row for row in section(pages()[page], slug(heading)).splitlines() if row.startswith("|")]
        for figures, target, anchor in _LINK.findall("\n".join(rows)):
            found.append(Cell(page, figures, ((ROOT / page).parent / target).resolve(), anchor))
    return found


@pytest.mark.parametrize("cell", cells(), ids=lambda cell: f"{cell.page}: {cell.figures}")
def test_a_figure_of_a_summary_stands_where_it_links_to(cell: Cell) -> None:
    measured = section(cell.target.read_text(encoding="utf-8"), cell.anchor)
    known = set(re.findall(r"\d[\d,]*\.?\d*", measured))
    assert set(re.findall(r"\d[\d,]*\.?\d*(?<!,)", cell.figures)) <= known


def test_each_summary_has_figures() -> None:
    assert {cell.page for cell in cells()} == set(SUMMARIES)
