"""Pictures of a step as SVG: the draft, its mask, the walk, and what is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from tools.step_pictures.recording import Node, Step

_WIDTH, _MARGIN = 860, 20
_COLUMN, _ROW, _BOX = 132, 44, 30
_STYLE = """
.node { fill: #eef2f7; stroke: #8a99ad; }
.kept { fill: #d6f0d9; stroke: #2e8b3d; stroke-width: 2; }
.own { fill: #fff3cd; stroke: #c9971c; stroke-width: 2; }
.root { fill: #ffffff; stroke: #333333; stroke-width: 2; }
.edge { stroke: #8a99ad; fill: none; }
.path { stroke: #2e8b3d; stroke-width: 3; fill: none; }
.seen { fill: #4a78b5; }
.unseen { fill: #ffffff; stroke: #d5dbe3; }
.small { font-size: 12px; fill: #555555; }
text { fill: #222222; }
"""


def pictures(step: Step) -> dict[str, str]:
    """The SVG files, by name."""
    return {
        "step-1-draft.svg": _tree_picture(
            "The draft: what followed in earlier answers, with the probability that the path down to here is accepted",
            step,
            lambda node: f"{node.score:.0%}",
            accepted=False,
        ),
        "step-2-mask.svg": _mask_picture(step),
        "step-3-walk.svg": _tree_picture(
            "The walk: under each node what the model itself writes there; green nodes are what it wrote",
            step,
            lambda node: f"→ {node.chosen}",
            accepted=True,
        ),
        "step-4-keep.svg": _kept_picture(step),
    }


def _tree_picture(title: str, step: Step, note: Callable[[Node], str], accepted: bool) -> str:
    depths, rows = _places(step.nodes)
    height = _MARGIN * 2 + 24 + _ROW * (max(rows) + 1) + 12
    root_row = _mean([rows[at] for at, node in enumerate(step.nodes) if node.parent < 0])

    def centre(at: int) -> tuple[float, float]:
        depth, row = (0, root_row) if at < 0 else (depths[at], rows[at])
        return _MARGIN + 10 + depth * _COLUMN, _MARGIN + 40 + row * _ROW

    parts = []
    for at, node in enumerate(step.nodes):
        (x, y), (to_x, to_y) = centre(node.parent), centre(at)
        kind = "path" if accepted and node.accepted else "edge"
        parts.append(f'<path class="{kind}" d="M{x + 96:.0f} {y:.0f} L{to_x:.0f} {to_y:.0f}"/>')
    below = f"→ {step.first}" if accepted else "the last token"
    parts += _box(centre(-1), step.context[-1], "root", below)
    for at, node in enumerate(step.nodes):
        parts += _box(centre(at), node.text, "kept" if accepted and node.accepted else "node", note(node))
    return _svg(title, height, parts)


def _box(centre: tuple[float, float], text: str, kind: str, note: str) -> list[str]:
    x, y = centre
    return [
        f'<rect class="{kind}" x="{x:.0f}" y="{y - _BOX / 2:.0f}" width="96" height="{_BOX}" rx="6"/>',
        _text(x + 48, y - 1, text, "middle"),
        _text(x + 48, y + 11, note, "middle", "small"),
    ]


def _mask_picture(step: Step) -> str:
    cell, left, top = 22, 250, 74
    names = [step.context[-1], *(node.text for node in step.nodes)]
    ancestors = _ancestors(step.nodes)
    depths, _ = _places(step.nodes)
    parts = [
        _text(left - 12, top - 10, "token, position", "end", "small"),
        _text(left + 36, top - 10, "context", "middle", "small"),
    ]
    parts.append(_text(left + 80, top - 10, "the step's own tokens", "start", "small"))
    for row, name in enumerate(names):
        y = top + row * (cell + 2)
        position = "t" if row == 0 else f"t + {depths[row - 1]}"
        parts.append(_text(left - 12, y + 16, f"{name}, {position}", "end"))
        parts.append(f'<rect class="seen" x="{left}" y="{y}" width="72" height="{cell}"/>')
        for column in range(len(names)):
            kind = "seen" if column in ancestors[row] else "unseen"
            parts.append(
                f'<rect class="{kind}" x="{left + 80 + column * (cell + 2)}" y="{y}" width="{cell}" height="{cell}"/>'
            )
    return _svg(
        "The mask: in one pass each token sees the context, its own ancestors and itself",
        top + len(names) * (cell + 2) + _MARGIN,
        parts,
    )


def _kept_picture(step: Step) -> str:
    kept = [node.text for node in step.nodes if node.accepted]
    parts, x = [_text(_MARGIN, 62, "… ", "start")], _MARGIN + 22
    for text, kind in [
        *((one, "root") for one in step.context[-3:]),
        *((one, "kept") for one in kept),
        (step.own, "own"),
    ]:
        width = 24 + 8 * len(text)
        parts += [
            f'<rect class="{kind}" x="{x}" y="42" width="{width}" height="{_BOX}" rx="6"/>',
            _text(x + width / 2, 62, text, "middle"),
        ]
        x += width + 8
    told = f"{len(kept)} draft tokens (green) and one of the model's own (yellow): {len(kept) + 1} tokens for one pass"
    return _svg("What is kept", 112, [*parts, _text(_MARGIN, 98, told, "start", "small")])


def _places(nodes: list[Node]) -> tuple[list[int], list[float]]:
    """Depth from 1 and row of each node: leaves one below the other, parents in the middle of their children."""
    depths: list[int] = []
    for node in nodes:
        depths.append(1 if node.parent < 0 else depths[node.parent] + 1)
    rows = [0.0] * len(nodes)
    leaves = 0

    def place(at: int) -> None:
        nonlocal leaves
        children = [child for child, node in enumerate(nodes) if node.parent == at]
        for child in children:
            place(child)
        if children and at >= 0:
            rows[at] = _mean([rows[child] for child in children])
        elif at >= 0:
            rows[at] = leaves
            leaves += 1

    place(-1)
    return depths, rows


def _ancestors(nodes: list[Node]) -> list[set[int]]:
    """What each token of the step sees of it, itself included; 0 is the last token of the context."""
    found: list[set[int]] = [{0}]
    for at, node in enumerate(nodes):
        found.append({*found[node.parent + 1], at + 1})
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text{attribute} x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    body = [f"<title>{escape(title)}</title>", f'<rect width="{_WIDTH}" height="{height:.0f}" fill="#ffffff"/>']
    body += [f"<style>{_STYLE}</style>", f'<text x="{_MARGIN}" y="26" font-weight="bold">{escape(title)}</text>']
    return "\n".join([head, *body, *parts, "</svg>\n"])
