"""The chains of vLLM's suffix decoding over the same recordings, computed in vLLM's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftwood_benchmarks.replay.peer_program import answer_of, installed
from draftwood_benchmarks.replay.trace import Recording


@dataclass(frozen=True, slots=True)
class SuffixChains:
    """What `peers/suffix_replay.py` counts over a trace; times in microseconds.

    Attributes:
        longest: tokens of a chain, at most.
        steps, tokens, drafted, draft_us, learn_us_per_token: as in `replay.Replayed`.
    """

    longest: int
    steps: int
    tokens: int
    drafted: int
    draft_us: float
    learn_us_per_token: float


def suffix_chains(traces: Mapping[str, Sequence[Recording]], longest: int) -> dict[str, SuffixChains]:
    """By trace; empty if it is not installed. Raises PeerError if it fails."""
    if not installed("vllm"):
        return {}
    return {
        name: SuffixChains(longest=longest, **answer_of("vllm", "suffix_replay", {"longest": longest}, recordings))
        for name, recordings in traces.items()
    }
