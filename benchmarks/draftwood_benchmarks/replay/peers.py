"""The drafts of other engines over the same recordings, by programs that run in their environments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftwood_benchmarks.peers.process import running_program
from draftwood_benchmarks.replay.replay import Replayed, replay
from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import create

_TIMEOUT = 3600.0
_MEASURED = 50
"""Recordings whose outputs are put into SGLang's trie to see what it takes of memory."""


def suffix_decoding(traces: Mapping[str, Sequence[Recording]], longest: int) -> Iterator[tuple[str, Replayed]]:
    """By trace, the chains of vLLM's suffix decoding of at most `longest` tokens, without the size of its memory.

    Raises:
        PeerError: it is not installed, or failed.
    """
    with running_program("vllm", "suffix_replay") as program:
        for name, recordings in traces.items():
            request = {"op": "replay", "longest": longest, "recordings": _lists(recordings)}
            yield name, Replayed(**program.ask(request, _TIMEOUT))


def sglang_trie(
    strategy: str, options: Mapping[str, object], traces: Mapping[str, Sequence[Recording]], budgets: Sequence[int]
) -> Iterator[tuple[str, str, int, Replayed, Replayed]]:
    """A strategy beside the trie of SGLang's n-gram drafts: trace, what both knew, nodes, ours and theirs.

    Both know "nothing" at first, or "half": the outputs of the first half of the trace, SGLang's trie as its corpus,
    and the other half is replayed. The last written token is one of the nodes, as SGLang counts them.

    Raises:
        PeerError: it is not installed, or failed.
    """
    with running_program("sglang", "sglang_replay") as program:
        for trace, recordings in traces.items():
            measured = {"op": "memory", "recordings": _lists(recordings[:_MEASURED])}
            size = program.ask(measured, _TIMEOUT)["bytes_per_token"]
            half = len(recordings) // 2
            for known, replayed in (([], recordings), (recordings[:half], recordings[half:])):
                outputs = [output.tolist() for _, output in known]
                for nodes in budgets:
                    request = {"op": "replay", "nodes": nodes, "known": outputs, "recordings": _lists(replayed)}
                    theirs = Replayed(**program.ask(request, _TIMEOUT), bytes_per_token=size)
                    ours: Any = create(strategy, **options)
                    for prompt, output in known:
                        drafter = ours.start(prompt)
                        drafter.observe(output, None)
                        drafter.close()
                    yield trace, "half" if known else "nothing", nodes, replay(ours, replayed, nodes - 1), theirs


def _lists(recordings: Sequence[Recording]) -> list[list[list[int]]]:
    return [[prompt.tolist(), output.tolist()] for prompt, output in recordings]
