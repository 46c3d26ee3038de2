"""Replaying recorded outputs."""

from __future__ import annotations

import numpy as np

from draftwood_benchmarks.replay.replay import accepted_length, replay
from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import DraftTree, Feedback, NoDrafts, TrieStrategy
from draftwood_strategies.draft import Int32Array


def recording(prompt: list[int], output: list[int]) -> Recording:
    return np.array(prompt, np.int32), np.array(output, np.int32)


class Counting:
    """Drafts a chain of the next integers, and records its observations."""

    top_k = 0

    def __init__(self) -> None:
        self.observed: list[list[int]] = []
        self.last = 0
        self.closed = 0

    def start(self, prompt: Int32Array) -> Counting:
        return self

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.of(np.arange(self.last + 1, self.last + 1 + budget))

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self.observed.append(accepted.tolist())
        self.last = int(accepted[-1])

    def close(self) -> None:
        self.closed += 1


def test_the_accepted_length_is_the_longest_path_that_the_output_follows() -> None:
    tree = DraftTree.of([5, 6, 7, 8, 9], [-1, -1, 1, 1, 3], [0.9, 0.8, 0.7, 0.6, 0.5])
    for continuation, length in (([6, 8, 9, 1], 3), ([6, 8], 2), ([5, 7], 1), ([4], 0), ([], 0)):
        assert accepted_length(tree, np.array(continuation, np.int32)) == length


def test_a_replay_counts_steps_as_the_engine_would() -> None:
    """The first token is that of the prefill; a step writes the accepted tokens and one more, up to the end."""
    strategy = Counting()
    result = replay(strategy, [recording([1], [3, 4, 5, 6, 90, 91, 92])], budget=2)
    assert strategy.observed == [[3], [4, 5, 6], [90], [91, 92]]
    assert (result.steps, result.tokens, result.drafted) == (3, 6, 6)
    assert result.acceptance_length == 2.0
    assert strategy.closed == 1


def test_without_drafts_every_step_writes_one_token() -> None:
    result = replay(NoDrafts(), [recording([1, 2], [3, 4, 5]), recording([1], [9])], budget=8)
    assert (result.steps, result.tokens, result.acceptance_length) == (2, 2, 1.0)
    assert result.bytes_per_token == 0.0
    assert replay(NoDrafts(), [], budget=8).acceptance_length == 1.0


def test_memory_grows_over_the_recordings() -> None:
    output = list(range(100, 150))
    strategy = TrieStrategy()
    once = replay(strategy, [recording([1, 2], output)], budget=16)
    again = replay(strategy, [recording([1, 3], output)], budget=16)
    assert once.acceptance_length == 1.0
    assert again.acceptance_length > 8.0
    assert strategy.tokens == 100
