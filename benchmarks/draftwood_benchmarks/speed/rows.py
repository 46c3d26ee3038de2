"""The report of `bench speed`: rows, table and picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from draftwood_benchmarks.harness.report import half_range, table

if TYPE_CHECKING:
    from draftwood_benchmarks.speed.contenders import Tally

PLAIN = "none"
"""The strategy name of drafting off."""


def rows_of(tallies: Sequence[Tally], *, quantized: bool = False) -> list[dict[str, Any]]:
    """The rows of the report. Ratios to transformers and to the fastest peer are null where they did not run, or not
    with the same sampling; a peer whose drafts know earlier answers is compared with warm rows alone, and none with
    rows of the same prompts "again".
    "sampled_vs_greedy" is the speed of sampled answers relative to that of the greedy ones of the same contender; null
    for the latter.

    "identical" and "identical_share" compare answers with those of "identical_to": transformers' greedy `generate`, or
    drafting off where transformers did not run, for sampled answers, or if our model is quantized, which is another
    model than transformers runs. "identical_to_plain" is the share of answers that equal ours with drafting off.

    Args:
        quantized: our weights are quantized.
    """
    reference = next((tally for tally in tallies if tally.contender.engine == "transformers"), None)
    peers = [tally for tally in tallies if tally.contender.engine not in ("transformers", "draftwood")]
    rows = []
    for tally in tallies:
        own = tally.contender
        others = [other for other in tallies if other.contender.engine == "draftwood"]
        plain = next(t for t in others if t.contender.strategy == PLAIN and t.contender.sampled == own.sampled)
        judge = _alike(reference, tally)
        expected = plain if judge is None or quantized else judge
        greedy = next((t for t in tallies if _case(t) == _case(tally) and not t.contender.sampled), None)
        rows.append(
            {
                "engine": own.engine,
                "strategy": own.strategy,
                "warm": own.warm,
                "again": own.again,
                "sampled": own.sampled,
                "tokens_per_s": round(tally.tokens_per_s, 2),
                "tokens_per_s_min": round(tally.spread[0], 2),
                "tokens_per_s_max": round(tally.spread[1], 2),
                "acceptance_length": round(tally.acceptance_length, 3),
                "nodes_per_step": round(tally.nodes_per_step, 2),
                "vs_transformers": _ratio(tally, judge),
                "vs_peer": _ratio(tally, _fastest(peers, tally)),
                "vs_plain": _ratio(tally, plain),
                "sampled_vs_greedy": _ratio(tally, greedy) if own.sampled else None,
                "identical": tally.share_like(expected) == 1.0,
                "identical_share": round(tally.share_like(expected), 3),
                "identical_to": "drafting off" if expected is plain else "transformers' generate",
                "identical_to_plain": round(tally.share_like(plain), 3),
            }
        )
    return rows


def _alike(reference: Tally | None, tally: Tally) -> Tally | None:
    """The reference, if it chose tokens as this contender did."""
    return reference if reference is not None and reference.contender.sampled == tally.contender.sampled else None


def _fastest(peers: Sequence[Tally], tally: Tally) -> Tally | None:
    """The fastest of the peers that chose tokens as this contender did, and knew no more than it."""
    own = tally.contender
    alike = [peer for peer in peers if _alike(peer, tally) and peer.contender.warm <= own.warm and not own.again]
    return max(alike, key=lambda peer: peer.tokens_per_s, default=None)


def _case(tally: Tally) -> tuple[str, str, bool, bool]:
    """What a sampled contender and its greedy one have in common."""
    return tally.contender.engine, tally.contender.strategy, tally.contender.warm, tally.contender.again


def _ratio(tally: Tally, other: Tally | None) -> float | None:
    return None if other is None else round(tally.tokens_per_s / other.tokens_per_s, 3)


def label(row: dict[str, Any]) -> str:
    """Name of a row's contender in tables and pictures."""
    if row["engine"] == "transformers":
        return "HF generate" if row["strategy"] == PLAIN else "HF prompt lookup"
    if row["engine"] != "draftwood":
        drafts = f", {row['strategy']}{' warm' * row['warm']}" if row["strategy"] != PLAIN else ""
        return f"{row['engine']}{drafts}"
    memory = "asked again" if row["again"] else "warm" if row["warm"] else "cold"
    name = "drafting off" if row["strategy"] == PLAIN else f"{row['strategy']}, {memory}"
    return f"{name}, sampled" if row["sampled_vs_greedy"] is not None else name


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    sampled = any(row["sampled_vs_greedy"] is not None for row in rows)
    columns = {"": "{label}", "tok/s": "{tokens_per_s:.1f}", "+-": "{spread:.0%}", "x HF": "{vs_transformers:.2f}"}
    columns |= {"x peer": "{vs_peer:.2f}"} if peer else {}
    columns |= {"x off": "{vs_plain:.2f}"}
    columns |= {"greedy": "{sampled_vs_greedy:.2f}"} if sampled else {}
    columns |= {"acc.": "{acceptance_length:.2f}", "nodes": "{nodes_per_step:.1f}", "same": "{identical_share:.0%}"}
    caption = (
        "+-: half the range of the rounds, - for one; HF: transformers; x HF, x off: speed relative to its"
        f" generate and to drafting off; {'x peer: to the fastest peer; ' if peer else ''}acc.: tokens per step;"
        f" nodes: draft tokens verified per step; same: answers identical to those of {rows[0]['identical_to']}"
        f"{', sampled ones to those of drafting off; greedy: relative to the same without sampling' if sampled else ''}"
    )
    shown = [{**row, "label": label(row), "spread": half_range(row) or None} for row in rows]
    return table(title, shown, columns, texts=1, caption=caption)
