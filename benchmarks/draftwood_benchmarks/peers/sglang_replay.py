"""Replays recordings over the trie of SGLang's n-gram drafts, driven as its worker drives it, with its default options.

Runs in `.venv-peers/sglang` by `serve_peer`, and imports nothing of Draftwood. As a program of its own it compiles the
trie and ends.
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

DEPTH, BREADTHS = 18, (1, 10)
"""SGLang's defaults of `speculative_ngram_max_trie_depth`, `_min_bfs_breadth` and `_max_bfs_breadth`."""
_SPARE = 10_000
"""Nodes beside those that the recordings need: by default there are ten million, which these traces do not fill."""


class Engine:
    """Replays by tries of its own."""

    version = ""

    def __init__(self, request: dict[str, Any]) -> None:
        _corpus(8, 0, _SPARE)  # compiles

    def replay(self, nodes: int, known: list[list[int]], recordings: list[Any]) -> dict[str, Any]:
        """Fields of `replay.Replayed`, of recordings [prompt, output].

        Args:
            nodes: of a tree, the last written token among them.
            known: outputs to load as its corpus. A quarter, half and three quarters of the nodes are given to them, and
                the best of these counts.
        """
        shares = sorted({max(1, nodes * part // 4) for part in (1, 2, 3)}) if known else [0]
        tried = [_replayed(nodes, share, known, recordings) for share in shares if share < nodes]
        return max(tried, key=lambda figures: figures["tokens"] / max(figures["steps"], 1))

    def memory(self, recordings: list[Any]) -> dict[str, float]:
        """What its trie takes for each token of the outputs that were put into it, in bytes."""
        corpus = _corpus(8, 0, _capacity(recordings))
        before, put = _resident(), 0
        for prompt, output in recordings:
            text = [*prompt, *output]
            for at in range(len(prompt) + 1, len(text) + 1):
                corpus.batch_put([text[max(0, at - DEPTH) : at]])
            put += len(output)
            corpus.synchronize()
        return {"bytes_per_token": (_resident() - before) / put}


def _replayed(nodes: int, share: int, known: list[list[int]], recordings: list[Any]) -> dict[str, Any]:
    corpus = _corpus(nodes, share, _capacity(recordings))
    if known:
        loaded = corpus.load_external_corpus_named("known", known)
        corpus.commit_external_corpus_load("known", loaded)
    steps = tokens = 0
    drafting = []
    for number, (prompt, output) in enumerate(recordings):
        text, at = [*prompt, *output], len(prompt) + 1
        while at < len(text):
            tail = text[max(0, at - DEPTH) : at]
            corpus.synchronize()
            before = time.perf_counter()
            drafts, mask = corpus.batch_get([str(number)], [tail], [at])
            drafting.append(time.perf_counter() - before)
            corpus.batch_put([tail])
            accepted = _accepted(drafts.tolist(), mask.reshape(nodes, nodes), text[at:])
            steps, tokens, at = steps + 1, tokens + min(accepted + 1, len(text) - at), at + accepted + 1
        corpus.batch_put([text[-DEPTH:]])
        corpus.erase_match_state([str(number)])
    draft_us = statistics.median(drafting) * 1e6 if drafting else 0.0
    return {"steps": steps, "tokens": tokens, "drafted": steps * (nodes - 1), "draft_us": draft_us}


def _capacity(recordings: list[Any]) -> int:
    """So many nodes that nothing is forgotten: each token begins a path."""
    return DEPTH * sum(DEPTH + len(output) for _, output in recordings) + _SPARE


def _corpus(nodes: int, share: int, capacity: int) -> Any:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    return NgramCorpus(
        max_trie_depth=DEPTH,
        min_bfs_breadth=BREADTHS[0],
        max_bfs_breadth=BREADTHS[1],
        draft_token_num=nodes,
        capacity=capacity,
        external_sam_budget=share,
    )


def _accepted(drafts: list[int], mask: Any, continuation: list[int]) -> int:
    """Draft tokens of the longest path that the text goes on with. Node 0 is the last token written."""
    children: dict[tuple[int, int], int] = {}
    for node in range(1, len(drafts)):
        parent = max(above for above in range(node) if mask[node, above])
        children.setdefault((parent, drafts[node]), node)
    node, accepted = 0, 0
    while accepted < len(continuation) and (node, continuation[accepted]) in children:
        node, accepted = children[node, continuation[accepted]], accepted + 1
    return accepted


def _resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    Engine({})
