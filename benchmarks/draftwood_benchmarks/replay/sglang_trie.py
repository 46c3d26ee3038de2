"""A strategy beside the trie of SGLang's n-gram drafts, over the same recordings and with equally many nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from draftwood_benchmarks.peers.process import PeerError
from draftwood_benchmarks.replay.peer_program import answer_of, installed
from draftwood_benchmarks.replay.replay import Replayed, replay
from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import Strategy, create


@dataclass(frozen=True, slots=True)
class TrieReplayed:
    """What `peers/sglang_replay.py` counts over a trace with one number of nodes, as in `Replayed`."""

    steps: int
    tokens: int
    draft_us: float


@dataclass(frozen=True, slots=True)
class PeerRow:
    """A row of the report.

    Attributes:
        known: "nothing" if both began with an empty memory; "half" if both were given the outputs of the first half of
            the trace, SGLang's trie as its corpus, and the other half is replayed.
        budget: nodes of a tree, the last written token among them, as SGLang counts them.
        acceptance_length, peer_acceptance_length: tokens a step.
        draft_us, peer_draft_us: median time of a draft, in microseconds.
        bytes_per_token, peer_bytes_per_token: of the memory, for each token of an output that is in it.
    """

    trace: str
    known: str
    budget: int
    acceptance_length: float
    peer_acceptance_length: float
    draft_us: float
    peer_draft_us: float
    bytes_per_token: float
    peer_bytes_per_token: float


def beside_sglang(
    strategy: str, options: Mapping[str, object], traces: Mapping[str, Sequence[Recording]], budgets: Sequence[int]
) -> list[PeerRow]:
    """Rows for each trace, with an empty memory and with one that knows half.

    Raises:
        PeerError: it is not installed, or failed.
    """
    if not installed("sglang"):
        raise PeerError("SGLang is not installed; `make peers` does that")
    rows = []
    for trace, recordings in traces.items():
        memory = answer_of("sglang", "sglang_replay", {"memory": True}, recordings[:_MEASURED])["bytes_per_token"]
        half = len(recordings) // 2
        for known, replayed in (([], recordings), (recordings[:half], recordings[half:])):
            outputs = [output.tolist() for _, output in known]
            request: dict[str, Any] = {"nodes": list(budgets), "known": outputs}
            theirs = [TrieReplayed(**one) for one in answer_of("sglang", "sglang_replay", request, replayed)]
            for budget, peer in zip(budgets, theirs, strict=True):
                ours = _replayed(create(strategy, **options), known, replayed, budget)
                rows.append(_row(trace, "half" if known else "nothing", budget, ours, peer, memory))
    return rows


_MEASURED = 50
"""Rows whose outputs are put into SGLang's trie to see what it takes of memory."""


def _replayed(strategy: Strategy, known: Sequence[Recording], recordings: Sequence[Recording], budget: int) -> Replayed:
    """With `budget` nodes, the last written token among them, as SGLang counts them."""
    for prompt, output in known:
        drafter = strategy.start(prompt)
        drafter.observe(output, None)
        drafter.close()
    return replay(strategy, recordings, budget - 1)


def _row(trace: str, known: str, budget: int, ours: Replayed, peer: TrieReplayed, memory: float) -> PeerRow:
    return PeerRow(
        trace=trace,
        known=known,
        budget=budget,
        acceptance_length=round(ours.acceptance_length, 4),
        peer_acceptance_length=round(peer.tokens / peer.steps, 4) if peer.steps else 1.0,
        draft_us=round(ours.draft_us, 2),
        peer_draft_us=round(peer.draft_us, 2),
        bytes_per_token=round(ours.bytes_per_token, 1),
        peer_bytes_per_token=round(memory, 1),
    )


def peer_table(rows: Sequence[PeerRow]) -> Table:
    """The rows, with our acceptance length over theirs."""
    table = Table(title="Beside the trie of SGLang's n-gram drafts")
    table.add_column("trace", no_wrap=True)
    table.add_column("known")
    for heading in ("nodes", "tokens/step", "theirs", "ratio", "draft us", "theirs", "bytes/token", "theirs"):
        table.add_column(heading, justify="right")
    for row in rows:
        ratio = row.acceptance_length / row.peer_acceptance_length
        table.add_row(
            row.trace,
            row.known,
            str(row.budget),
            f"{row.acceptance_length:.2f}",
            f"{row.peer_acceptance_length:.2f}",
            f"{ratio:.2f}",
            f"{row.draft_us:.0f}",
            f"{row.peer_draft_us:.0f}",
            f"{row.bytes_per_token:.0f}",
            f"{row.peer_bytes_per_token:.0f}",
        )
    return table
