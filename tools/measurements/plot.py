"""The picture of the README: bars of one stream's speed, beside the peer."""

from __future__ import annotations

import json
from html import escape

from tools.measurements.suite import DOCS, MEASUREMENTS

PLOT = DOCS / "images" / "comparison.svg"
_MEASUREMENT = "one-stream"
_LEFT, _WIDTH, _BAR, _GAP, _TOP = 190, 760, 22, 8, 44
_STYLE = "text { fill: #222; } .peer { fill: #8a99ad; } .own { fill: #2e8b3d; } .small { font-size: 12px; fill: #555; }"


def one_stream() -> tuple[str, dict[str, tuple[float, float]]]:
    """The title; tokens per second and multiple of the peer, by what is shown."""
    (measurement,) = (one for one in MEASUREMENTS if one.name == _MEASUREMENT)
    report = json.loads(measurement.file.read_text(encoding="utf-8"))
    greedy = [row for row in report["rows"] if not row["sampled"]]
    (peer,) = (row for row in greedy if row["engine"] not in ("draftwood", "transformers"))
    ours = {(row["strategy"], row["warm"]): row for row in greedy if row["engine"] == "draftwood"}
    shown = {
        "OpenVINO GenAI": peer,
        "Draftwood, drafting off": ours["none", False],
        "no answers in memory": ours["hybrid", False],
        f"{report['warm_prompts']} answers in memory": ours["hybrid", True],
    }
    title = (
        f"Tokens per second of one stream on {report['run']['cores']} CPU cores: {report['model'].split(', cpu')[0]}"
    )
    return title, {name: (row["tokens_per_s"], row["vs_peer"]) for name, row in shown.items()}


def plot() -> str:
    """The picture, as SVG. Bars are multiples of the peer's speed, on one scale."""
    title, shown = one_stream()
    scale = (_WIDTH - _LEFT - 150) / max(multiple for _, multiple in shown.values())
    parts, y = [f'<text x="16" y="26" font-weight="bold">{title}</text>'], _TOP
    for number, (name, (speed, multiple)) in enumerate(shown.items()):
        kind = "own" if number else "peer"
        width = max(1, round(multiple * scale))
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{escape(name)}</text>')
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
