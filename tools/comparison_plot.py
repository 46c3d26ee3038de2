"""Draws the tables of one stream in `docs/comparison.md` as bars: `python -m tools.comparison_plot`."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARISON = ROOT / "docs" / "comparison.md"
PLOT = ROOT / "docs" / "images" / "comparison.svg"
_TITLES = ("Bundled model (6M), float32", "110M parameters, bfloat16", "407M parameters, bfloat16")
"""Of the first tables of the page, in their order."""
_LEFT, _WIDTH, _BAR, _GAP, _TITLE = 290, 860, 18, 6, 34
_STYLE = "text { fill: #222; } .peer { fill: #8a99ad; } .own { fill: #2e8b3d; } .small { font-size: 12px; fill: #555; }"


def tables(text: str) -> list[list[tuple[str, float, float]]]:
    """Engine, tokens per second and multiple of the peer, of each table of one stream."""
    found = []
    for part in re.split(r"\n(?=\| engine \| tokens/s \|)", text)[1 : len(_TITLES) + 1]:
        lines = part.split("\n\n")[0].splitlines()
        at = [cell.strip() for cell in lines[0].split("|")].index("x peer")
        cells = [[cell.strip() for cell in line.split("|")] for line in lines[2:]]
        found.append([(row[1], float(row[2].replace(",", "")), float(row[at])) for row in cells])
    return found


def plot() -> str:
    """The picture, as SVG. Bars are multiples of the peer's speed, on one scale."""
    shown = tables(COMPARISON.read_text(encoding="utf-8"))
    scale = (_WIDTH - _LEFT - 170) / max(multiple for rows in shown for _, _, multiple in rows)
    parts, y = list[str](), 8
    for title, rows in zip(_TITLES, shown, strict=True):
        parts.append(f'<text x="16" y="{y + 20}" font-weight="bold">{escape(title)}</text>')
        y += _TITLE
        for engine, speed, multiple in rows:
            kind = "own" if engine.startswith("Draftwood") else "peer"
            width = max(1, round(multiple * scale))
            parts.append(
                f'<text x="{_LEFT - 10}" y="{y + 14}" text-anchor="end">{escape(engine.replace("`", ""))}</text>'
            )
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>')
            label = f"{multiple:.2f} x, {speed:,.0f} tokens/s"
            parts.append(f'<text class="small" x="{_LEFT + width + 8}" y="{y + 14}">{label}</text>')
            y += _BAR + _GAP
        y += 8
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        "<title>Tokens per second of one stream on two CPU cores, relative to OpenVINO GenAI</title>",
        f'<rect width="{_WIDTH}" height="{y + 8}" fill="#ffffff"/>',
        f"<style>{_STYLE}</style>",
    ]
    return "\n".join([*body, *parts, "</svg>\n"])


if __name__ == "__main__":
    PLOT.write_text(plot(), encoding="utf-8")
