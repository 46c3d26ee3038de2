"""The picture of the README: bars of one stream's speed beside the peers, where drafts win and where they do not."""

from __future__ import annotations

import json
from html import escape
from typing import NamedTuple

from tools.measurements.suite import DOCS, MEASUREMENTS

PLOT = DOCS / "images" / "comparison.svg"
_PANELS = {"smollm2-chat-bfloat16": "weights of 16 bits", "smollm2-chat-int4": "weights of 4 bits"}
"""Measurements, and what tells one from the other."""
_LEFT, _WIDTH, _BAR, _GAP, _TOP, _HEADING = 250, 760, 20, 6, 40, 26
_STYLE = "text { fill: #222; } .peer { fill: #8a99ad; } .own { fill: #2e8b3d; } .small { font-size: 12px; fill: #555; }"
_PEERS = {
    "transformers": "transformers",
    "openvino-genai": "OpenVINO GenAI",
    "vllm": "vLLM",
    "llama.cpp": "llama.cpp",
}
_DRAFTS = {"none": "", "suffix": ", suffix decoding"}
"""What a bar of a peer says of its drafts; peers with others are left out."""


class Bar(NamedTuple):
    """One bar.

    Attributes:
        multiple: of the speed of the fastest peer without drafts.
    """

    name: str
    is_ours: bool
    tokens_per_s: float
    multiple: float


def one_stream(name: str) -> tuple[str, list[Bar]]:
    """The title and the bars of a measurement: greedy, Draftwood with `hybrid` or without drafts."""
    (measurement,) = (each for each in MEASUREMENTS if each.name == name)
    report = json.loads(measurement.file.read_text(encoding="utf-8"))
    greedy = [row for row in report["rows"] if not row["sampled"]]
    plain = [row for row in greedy if row["engine"] != "draftwood" and row["strategy"] == "none"]
    fastest = max(row["tokens_per_s"] for row in plain)
    bars = []
    for row in greedy:
        is_ours = row["engine"] == "draftwood"
        if is_ours and row["strategy"] in ("none", "hybrid"):
            warm = f"warm after {report['warm_prompts']} answers" if row["warm"] else "cold"
            memory = "asked again" if row["again"] else warm
            name = f"Draftwood, {'drafting off' if row['strategy'] == 'none' else memory}"
        elif not is_ours and row["strategy"] in _DRAFTS:
            warm = ", warm" if row["warm"] else ""
            name = f"{_PEERS[row['engine']]}{_DRAFTS[row['strategy']]}{warm}"
        else:
            continue
        bars.append(Bar(name, is_ours, row["tokens_per_s"], row["tokens_per_s"] / fastest))
    model = report["model"].split(",")[0]
    return f"Tokens per second of one stream on {report['run']['cores']} CPU cores: {model}, MT-Bench", bars


def plot() -> str:
    """The picture, as SVG. Bars are multiples of the speed of the fastest peer without drafts, on one scale."""
    panels = {}
    for name, heading in _PANELS.items():
        title, panels[heading] = one_stream(name)
    scale = (_WIDTH - _LEFT - 150) / max(bar.multiple for bars in panels.values() for bar in bars)
    parts, y = [f'<text x="16" y="24" font-weight="bold">{escape(title)}</text>'], _TOP
    for heading, bars in panels.items():
        parts.append(f'<text x="{_LEFT}" y="{y + 14}" font-weight="bold">{escape(heading)}</text>')
        y += _HEADING
        for bar in bars:
            width = max(1, round(bar.multiple * scale))
            parts.append(f'<text x="{_LEFT - 10}" y="{y + 15}" text-anchor="end">{escape(bar.name)}</text>')
            kind = "own" if bar.is_ours else "peer"
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" rx="2"/>')
            label = f"{bar.multiple:.2f} x, {bar.tokens_per_s:,.0f} tokens/s"
            parts.append(f'<text class="small" x="{_LEFT + width + 8}" y="{y + 15}">{label}</text>')
            y += _BAR + _GAP
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{y + 8}" fill="#ffffff"/>',
        f"<style>{_STYLE}</style>",
    ]
    return "\n".join([*body, *parts, "</svg>\n"])
