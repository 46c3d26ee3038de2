"""Draws three rows of a table of `docs/comparison.md` as bars: `python -m tools.comparison_plot`."""

from __future__ import annotations

from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPARISON = ROOT / "docs" / "comparison.md"
PLOT = ROOT / "docs" / "images" / "comparison.svg"
_SECTION = "### With the peer's own drafts"
_SHOWN = ("OpenVINO GenAI", "Draftwood, drafting off", "Draftwood, hybrid, warm")
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 190, 760, 22, 8, 44
_STYLE = "text { fill: #222; } .peer { fill: #8a99ad; } .own { fill: #2e8b3d; } .small { font-size: 12px; fill: #555; }"


def one_stream(text: str) -> dict[str, tuple[float, float]]:
    """Tokens per second and multiple of the peer, by engine: the rows of one client in the section's table."""
    lines = text.split(_SECTION)[1].split("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    speed, multiple = rows[0].index("tokens/s"), rows[0].index("x peer")
    return {row[2]: (float(row[speed].replace(",", "")), float(row[multiple])) for row in rows if row[1] == "1"}


def plot() -> str:
    """The picture, as SVG. Bars are multiples of the peer's speed, on one scale."""
    rows = one_stream(COMPARISON.read_text(encoding="utf-8"))
    shown = [(engine, *rows[engine]) for engine in _SHOWN]
    scale = (_WIDTH - _LEFT - 150) / max(multiple for _, _, multiple in shown)
    title = "Tokens per second of one stream on two CPU cores, 110M parameters"
    parts, y = [f'<text x="16" y="26" font-weight="bold">{title}</text>'], _TOP
    for engine, speed, multiple in shown:
        kind = "own" if engine.startswith("Draftwood") else "peer"
        width = max(1, round(multiple * scale))
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(engine)}</text>')
        parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>')
        label = f"{multiple:.2f} x, {speed:,.0f} tokens/s"
        parts.append(f'<text class="small" x="{_LEFT + width + 8}" y="{y + 16}">{label}</text>')
        y += _BAR + _GAP
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{y + 8}" fill="#ffffff"/>',
        f"<style>{_STYLE}</style>",
    ]
    return "\n".join([*body, *parts, "</svg>\n"])


if __name__ == "__main__":
    PLOT.write_text(plot(), encoding="utf-8")
