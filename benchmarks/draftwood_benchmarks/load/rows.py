"""The report of `bench load`: rows, tables and picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from draftwood_benchmarks.harness.report import percentile, shown
from draftwood_benchmarks.load.closed_loop import Window
from draftwood_benchmarks.load.peers import PeerState

OURS = "draftwood"
_SPLITS = 2000
"""Random splits of the permutation test; resolves probabilities to about 0.005 at 0.05."""


def row_of(
    concurrency: int, drafting: bool, window: Window, plain: Window, peer: Window | None = None
) -> dict[str, Any]:
    """The row of the report; latencies in milliseconds, null if no request has one.

    Args:
        plain: the window of the same concurrency without drafting.
        peer: that of the peer; None if there is none.
    """
    succeeded = [result for result in window.results if result.error is None]
    ttft = _ttft(window)
    tpot = [1000 * result.tpot for result in succeeded if result.tpot is not None]
    steps = sum(result.steps for result in succeeded)
    p99, plain_p99 = percentile(ttft, 99), percentile(_ttft(plain), 99)
    return {
        "engine": OURS,
        "drafts": OURS if drafting else "none",
        "warm": True,
        "concurrency": concurrency,
        "drafting": drafting,
        **_speeds(window),
        "vs_peer": None if peer is None else _rounded(window.tokens_per_s / peer.tokens_per_s),
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(p99),
        "ttft_p99_vs_off": _rounded(p99 / plain_p99 if p99 and plain_p99 else None),
        "ttft_p99_chance": _rounded(p_value(ttft, _ttft(plain))),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.results) - len(succeeded),
        "requests": len(window.results),
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(sum(result.tokens for result in succeeded) / steps, 3) if steps else None,
    }


def peer_row(
    engine: str, concurrency: int, window: Window, plain: Window | None, state: PeerState, steps: int
) -> dict[str, Any]:
    """The row of a peer, in which no request fails; latencies are null if it does not time its requests."""
    drafting = state.drafts != "none"
    row = row_of(concurrency, drafting, window, window, plain)
    length = round(window.tokens / steps, 3) if steps else None
    named = {"engine": engine, "drafts": state.drafts, "warm": state.warm, "acceptance_length": length}
    not_compared = {"ttft_p99_vs_off": None, "ttft_p99_chance": None, "errors": None}
    return {**row, **named, **not_compared, "requests": len(window.results) or None}


def _speeds(window: Window) -> dict[str, float]:
    rates = window.rates or [0.0]
    return {
        "tokens_per_s": round(window.tokens_per_s, 2),
        "tokens_per_s_min": round(min(rates), 2),
        "tokens_per_s_max": round(max(rates), 2),
    }


def p_value(values: Sequence[float], others: Sequence[float], percent: float = 99) -> float | None:
    """The p-value of a one-sided permutation test: is the percentile of `values` above that of `others`?

    That is the share of random splits of all values whose ratio of percentiles is at least the measured one. None if
    either is empty. Requests of one burst are not independent, so the true p-value of a small difference is larger.
    """
    if not values or not others:
        return None
    pooled = np.array([*values, *others])
    shuffled = np.random.default_rng(0).permuted(np.tile(pooled, (_SPLITS, 1)), axis=1)
    splits = np.concatenate([pooled[None], shuffled])  # the measured split is one of them
    first, second = (np.percentile(part, percent, axis=1) for part in np.split(splits, [len(values)], axis=1))
    ratios = first / second
    return float(np.mean(ratios >= ratios[0]))


def _ttft(window: Window) -> list[float]:
    """Milliseconds to the first token, of each request that ended without an error."""
    return [1000 * result.ttft for result in window.results if result.error is None and result.ttft is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    table = Table(title=title, title_justify="left", padding=(0, 0 if peer else 1))  # fits 80 columns
    headings = ["clients", "drafts", "tok/s", "+-", "x off", *(["x peer"] if peer else [])]
    for heading in [*headings, "accept", "TTFT ms", "TPOT ms", "err"]:
        table.add_column(heading, justify="right", no_wrap=True)
    plain = {row["concurrency"]: row["tokens_per_s"] for row in rows if row["engine"] == OURS and not row["drafting"]}
    for row in rows:
        off = plain[row["concurrency"]]
        table.add_row(
            str(row["concurrency"]),
            _name(row) if row["engine"] == OURS else _name(row).replace(row["engine"], "peer"),
            f"{row['tokens_per_s']:.0f}",
            _spread(row),
            shown(row["tokens_per_s"] / off if off else None),
            *([shown(row["vs_peer"])] if peer else []),
            shown(row["acceptance_length"]),
            f"{shown(row['ttft_p50'], 0)} / {shown(row['ttft_p99'], 0)}",
            f"{shown(row['tpot_p50'], 1)} / {shown(row['tpot_p99'], 1)}",
            "-" if row["errors"] is None else str(row["errors"]),
        )
    table.caption = (
        "+-: half the range of the windows; x off: throughput against drafting off;"
        f"{' x peer: against the peer;' if peer else ''} accept: acceptance length, tokens per step;"
        " TTFT, TPOT: time to the first token and for each later one, median / 99th percentile;"
        " err: requests that failed"
    )
    return table


def first_tokens(rows: list[dict[str, Any]]) -> Table:
    """The 99th percentile of TTFT with drafting relative to that without, with its p-value."""
    table = Table(title="TTFT, 99th percentile, drafting on", title_justify="left")
    for heading in ("clients", "x off", "p-value"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row["drafting"] and row["engine"] == OURS:
            table.add_row(str(row["concurrency"]), shown(row["ttft_p99_vs_off"]), shown(row["ttft_p99_chance"]))
    table.caption = (
        "p-value: probability of a ratio as large if drafting made no difference (permutation test); below 0.05 the"
        " difference is significant"
    )
    return table


def _name(row: dict[str, Any]) -> str:
    if row["engine"] != OURS:
        drafts = f", {row['drafts']}{'' if row['warm'] else ' cold'}" if row["drafting"] else ""
        return f"{row['engine']}{drafts}"
    return "on" if row["drafting"] else "off"


def _spread(row: dict[str, Any]) -> str:
    if not row["tokens_per_s"]:
        return "-"
    return f"{(row['tokens_per_s_max'] - row['tokens_per_s_min']) / 2 / row['tokens_per_s']:.0%}"


def draw(rows: list[dict[str, Any]], title: str, axes: Any) -> None:
    for name in dict.fromkeys(map(_name, rows)):
        mine = [row for row in rows if _name(row) == name]
        name = f"drafting {name}" if mine[0]["engine"] == OURS else name
        axes.plot([r["concurrency"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("clients at once")
    axes.set_ylabel("tokens per second")
    axes.legend()
    axes.set_title(title, fontsize=9)
