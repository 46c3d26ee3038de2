"""Replays a strategy over recorded outputs: how many draft tokens would have been accepted, without running a model.

A strategy that reads only token ids proposes the same drafts in a replay as with the model that wrote the trace. Each
step drafts a tree; the longest path that the recorded output follows is accepted, plus the one token that the model's
own forward pass adds. The memory starts empty and grows over the trace.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

from draftwood_benchmarks.replay.trace import Recording
from draftwood_strategies import DraftTree, Strategy
from draftwood_strategies.draft import Int32Array
from draftwood_strategies.tree_index import NO_NODE


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        steps: decoding steps, each one forward pass of the model. The first token of an output comes from the
            prefill, which is not counted.
        tokens: tokens written in the steps.
        accepted: draft tokens among them.
        expected: sum of the scores of all drafts, which is the number of accepted tokens that the strategy predicted.
        draft_us: median time of a draft, in microseconds.
        learn_us_per_token: time in `start`, `observe` and `close` per token of prompts and outputs, in microseconds.
        bytes_per_token: size of the strategy's memory per token in it; 0 if the strategy has no `nbytes`.
    """

    steps: int
    tokens: int
    accepted: int
    expected: float
    draft_us: float
    learn_us_per_token: float
    bytes_per_token: float

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per step."""
        return self.tokens / self.steps if self.steps else 1.0


def accepted_length(tree: DraftTree, continuation: Int32Array) -> int:
    """Length of the longest path of the tree that `continuation`, int32[n], begins with."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))}
    node, length = NO_NODE, 0
    for token in continuation.tolist():
        child = children.get((node, token))
        if child is None:
            break
        node, length = child, length + 1
    return length


def replay(strategy: Strategy, recordings: Iterable[Recording], budget: int) -> Replayed:
    """Replays the recordings in order, with at most `budget` draft nodes per step; `strategy` learns from each."""
    clock = time.perf_counter
    steps = tokens = accepted = seen = 0
    expected = learning = 0.0
    drafting: list[float] = []
    for prompt, output in recordings:
        seen += prompt.size + output.size
        before = clock()
        drafter = strategy.start(prompt)
        drafter.observe(output[:1], None)
        learning += clock() - before
        at = 1
        while at < output.size:
            before = clock()
            tree = drafter.propose(budget)
            drafting.append(clock() - before)
            length = accepted_length(tree, output[at:])
            written = output[at : at + length + 1]
            before = clock()
            drafter.observe(written, None)
            learning += clock() - before
            steps, tokens, accepted = steps + 1, tokens + written.size, accepted + length
            expected += float(tree.scores.sum())
            at += written.size
        before = clock()
        drafter.close()
        learning += clock() - before
    stored = getattr(strategy, "tokens", 0)
    return Replayed(
        steps=steps,
        tokens=tokens,
        accepted=accepted,
        expected=expected,
        draft_us=statistics.median(drafting) * 1e6 if drafting else 0.0,
        learn_us_per_token=learning / seen * 1e6 if seen else 0.0,
        bytes_per_token=getattr(strategy, "nbytes", 0) / stored if stored else 0.0,
    )
