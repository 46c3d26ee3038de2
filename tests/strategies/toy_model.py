"""A model of a few lines for drafters that need one: what comes next depends on the last two tokens alone."""

from __future__ import annotations

import numpy as np

from draftwood_strategies import Drafter, DraftTree, Feedback
from draftwood_strategies.arrays import Int32Array

VOCAB = 50


class ToyModel:
    """A fixed random ranking of all tokens after each pair of tokens."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB) -> None:
        random = np.random.default_rng(seed)
        self._ranking = random.permuted(np.tile(np.arange(vocab, dtype=np.int32), (vocab, vocab, 1)), axis=2)

    def top(self, text: list[int]) -> Int32Array:
        """int32[vocab]: all tokens, the most probable first."""
        ranking: Int32Array = self._ranking[text[-2] if len(text) > 1 else 0, text[-1]]
        return ranking

    def write(self, text: list[int], count: int) -> list[int]:
        """What plain decoding writes."""
        written: list[int] = []
        for _ in range(count):
            written.append(int(self.top([*text, *written])[0]))
        return written

    def verify(self, text: list[int], tree: DraftTree, top_k: int = 8) -> tuple[list[int], Feedback]:
        """The accepted tokens, and the model's predictions at the root and at every node."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            paths.append([*paths[parent + 1], token])
        top = np.stack([self.top(text + path) for path in paths])
        feedback = Feedback(
            tokens=np.concatenate([np.array(text[-1:], np.int32), tree.tokens]),
            parents=np.concatenate([np.array([-1], np.int32), tree.parents + 1]),
            predictions=np.ascontiguousarray(top[:, 0]),
            top_tokens=np.ascontiguousarray(top[:, :top_k]) if top_k else None,
        )
        accepted: list[int] = []
        while accepted in paths:
            accepted = [*accepted, int(self.top(text + accepted)[0])]
        return accepted, feedback


def run(model: ToyModel, drafter: Drafter, prompt: list[int], count: int, budget: int, top_k: int = 8) -> list[int]:
    """Writes `count` tokens or a few more; returns how many each step wrote. Every draft must be valid."""
    text, steps = [*prompt], []
    while len(text) < len(prompt) + count:
        tree = drafter.propose(budget)
        tree.check()
        assert len(tree) <= budget
        accepted, feedback = model.verify(text, tree, top_k)
        drafter.observe(np.array(accepted, np.int32), feedback)
        text += accepted
        steps.append(len(accepted))
    assert text[len(prompt) :] == model.write(prompt, len(text) - len(prompt))
    return steps
