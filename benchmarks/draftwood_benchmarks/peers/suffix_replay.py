"""Replays recordings over the suffix trees of vLLM's suffix decoding (arctic-inference), with vLLM's own settings.

Runs in `.venv-peers/vllm` by `serve_peer`, and imports nothing of Draftwood.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

DEPTH, CACHED, FACTOR, PROBABILITY = 24, 10_000, 1.0, 0.1
"""vLLM's defaults of `suffix_decoding_max_tree_depth`, `max_cached_requests`, `max_spec_factor`, `min_token_prob`."""


class Engine:
    """Replays by a function of its own."""

    version = ""

    def __init__(self, request: dict[str, Any]) -> None:
        pass

    def replay(self, longest: int, recordings: list[Any]) -> dict[str, Any]:
        """Fields of `replay.Replayed`, of recordings [prompt, output] and chains of at most `longest` tokens."""
        return _replayed(longest, recordings)


def _replayed(longest: int, recordings: list[Any]) -> dict[str, Any]:
    import numpy as np
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(max_tree_depth=DEPTH, max_cached_requests=CACHED)
    steps = tokens = drafted = seen = 0
    learning, drafting = 0.0, []
    for number, (prompt, output) in enumerate(recordings):
        text = np.array([*prompt, *output], np.int32)
        before = time.perf_counter()
        cache.start_request(number, text[: len(prompt)])
        cache.add_active_response(number, text[len(prompt) : len(prompt) + 1])
        learning += time.perf_counter() - before
        seen += len(text)
        at = len(prompt) + 1
        while at < len(text):
            before = time.perf_counter()
            draft = cache.speculate(
                number,
                text[max(0, at - DEPTH) : at],
                max_spec_tokens=longest,
                max_spec_factor=FACTOR,
                min_token_prob=PROBABILITY,
            ).token_ids
            drafting.append(time.perf_counter() - before)
            accepted = 0
            while accepted < len(draft) and at + accepted < len(text) and draft[accepted] == text[at + accepted]:
                accepted += 1
            written = text[at : at + accepted + 1]
            before = time.perf_counter()
            cache.add_active_response(number, written)
            learning += time.perf_counter() - before
            steps, tokens, drafted = steps + 1, tokens + len(written), drafted + len(draft)
            at += len(written)
        cache.stop_request(number)
    return {
        "steps": steps,
        "tokens": tokens,
        "drafted": drafted,
        "draft_us": statistics.median(drafting) * 1e6 if drafting else 0.0,
        "learn_us_per_token": learning / seen * 1e6 if seen else 0.0,
    }
