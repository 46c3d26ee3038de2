"""The report of `bench load`: rows, table and picture."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from draftwood_benchmarks.harness.report import Rows, half_range, percentile, table
from draftwood_benchmarks.load.closed_loop import Window
from draftwood_benchmarks.load.peers import PeerState
from draftwood_benchmarks.peers.process import OUR_ENGINE

OURS = "draftwood"


def row_of(concurrency: int, drafting: bool, window: Window, peer: Window | None = None) -> dict[str, Any]:
    """The row of the report; latencies in milliseconds, null if no request has one.

    Args:
        peer: the fastest peer's window of the same concurrency; None if there is none.
    """
    rates = window.rates or [0.0]
    succeeded = [result for result in window.results if result.error is None]
    ttft = [1000 * result.ttft for result in succeeded if result.ttft is not None]
    tpot = [1000 * result.tpot for result in succeeded if result.tpot is not None]
    steps = sum(result.steps for result in succeeded)
    return {
        "engine": OURS,
        "drafts": OURS if drafting else "none",
        "warm": True,
        "concurrency": concurrency,
        "drafting": drafting,
        "tokens_per_s": round(window.tokens_per_s, 2),
        "tokens_per_s_min": round(min(rates), 2),
        "tokens_per_s_max": round(max(rates), 2),
        "vs_peer": None if peer is None else _rounded(window.tokens_per_s / peer.tokens_per_s),
        "ttft_p50": _rounded(percentile(ttft, 50)),
        "ttft_p99": _rounded(percentile(ttft, 99)),
        "tpot_p50": _rounded(percentile(tpot, 50)),
        "tpot_p99": _rounded(percentile(tpot, 99)),
        "errors": len(window.results) - len(succeeded),
        "requests": len(window.results),
        "seconds": round(window.seconds, 3),
        "acceptance_length": round(sum(result.tokens for result in succeeded) / steps, 3) if steps else None,
    }


def peer_row(concurrency: int, window: Window, fastest: Window | None, state: PeerState) -> dict[str, Any]:
    """The row of an engine without a service, in which no request fails; latencies are null if it does not time its
    requests."""
    return row_of(concurrency, state.drafts != "none", window, fastest) | {
        "engine": state.engine,
        "drafts": state.drafts,
        "warm": state.warm,
        "acceptance_length": round(window.tokens / window.steps, 3) if window.steps else None,
        "errors": None,
        "requests": len(window.results) or None,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def table_of(rows: Rows, title: str) -> Table:
    peer = any(row["vs_peer"] is not None for row in rows)
    plain = {(row["engine"], row["concurrency"]): row["tokens_per_s"] for row in rows if not row["drafting"]}

    def more(row: dict[str, Any]) -> dict[str, Any]:
        of = row["engine"] if row["engine"] == OUR_ENGINE else OURS
        off = plain[of, row["concurrency"]]
        return {"name": _name(row), "spread": half_range(row), "x_off": row["tokens_per_s"] / off if off else None}

    columns = {"clients": "{concurrency}", "drafts": "{name}", "tok/s": "{tokens_per_s:.0f}", "+-": "{spread:.0%}"}
    columns |= {"x off": "{x_off:.2f}"} | ({"x peer": "{vs_peer:.2f}"} if peer else {})
    columns |= {"accept": "{acceptance_length:.2f}", "TTFT ms": "{ttft_p50:.0f} / {ttft_p99:.0f}"}
    columns |= {"TPOT ms": "{tpot_p50:.1f} / {tpot_p99:.1f}", "err": "{errors}"}
    alone = " engine alone: without gRPC, as the peer;" if any(row["engine"] == OUR_ENGINE for row in rows) else ""
    caption = (
        "+-: half the range of the windows; x off: throughput against drafting off;"
        f"{' x peer: against the fastest peer;' if peer else ''}{alone} accept: acceptance length, tokens per step;"
        " TTFT, TPOT: time to the first token and for each later one, median / 99th percentile;"
        " err: requests that failed"
    )
    return table(title, [row | more(row) for row in rows], columns, caption=caption)


def _name(row: dict[str, Any]) -> str:
    on = f"on{'' if row['warm'] else ', cold'}" if row["drafting"] else "off"
    if row["engine"] == OURS:
        return on
    if row["engine"] == OUR_ENGINE:
        return f"{on}, engine alone"
    return f"{row['engine']}, {row['drafts']}{'' if row['warm'] else ' cold'}" if row["drafting"] else row["engine"]


def draw(rows: Rows, title: str, axes: Any) -> None:
    for name in dict.fromkeys(map(_name, rows)):
        mine = [row for row in rows if _name(row) == name]
        name = f"drafting {name}" if mine[0]["engine"] in (OURS, OUR_ENGINE) else name
        axes.plot([r["concurrency"] for r in mine], [r["tokens_per_s"] for r in mine], marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="clients at once", ylabel="tokens per second")
    axes.legend()
    axes.set_title(title, fontsize=9)
