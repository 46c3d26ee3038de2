"""Replays recordings over the trie of SGLang's n-gram drafts, driven as its worker drives it, with its default options.

Runs in `.venv-peers/sglang` by `serve_peer`, and imports nothing of Draftwood. As a program of its own it compiles the
trie and ends.
"""

from __future__ import annotations

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
        _corpus(8, _SPARE)  # compiles

    def replay(self, nodes: int, recordings: list[Any]) -> dict[str, Any]:
        """Fields of `replay.Replayed`, of recordings [prompt, output].

        Args:
            nodes: of a tree, the last written token among them.
        """
        # So many that nothing is forgotten: each token begins a path.
        corpus = _corpus(nodes, DEPTH * sum(DEPTH + len(output) for _, output in recordings) + _SPARE)
        steps = [0] * len(recordings)
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
                at += _accepted(drafts.tolist(), mask.reshape(nodes, nodes), text[at:]) + 1
                steps[number] += 1
            corpus.batch_put([text[-DEPTH:]])
            corpus.erase_match_state([str(number)])
        return {
            "steps": steps,
            "tokens": sum(len(output) - 1 for _, output in recordings),
            "drafted": sum(steps) * (nodes - 1),
            "draft_us": statistics.median(drafting) * 1e6 if drafting else 0.0,
        }


def _corpus(nodes: int, capacity: int) -> Any:
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    return NgramCorpus(
        max_trie_depth=DEPTH,
        min_bfs_breadth=BREADTHS[0],
        max_bfs_breadth=BREADTHS[1],
        draft_token_num=nodes,
        capacity=capacity,
        external_sam_budget=0,
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


if __name__ == "__main__":
    Engine({})
