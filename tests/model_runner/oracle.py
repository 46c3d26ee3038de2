"""A strategy for tests that knows the answer, and lies as it is told: exercises trees that real drafts rarely form."""

from __future__ import annotations

import numpy as np

from draftwood_strategies import EMPTY_TREE, DraftTree, Feedback
from draftwood_strategies.arrays import Int32Array


class OracleStrategy:
    """Drafts the true continuation, wrong from a random depth on, with random wrong branches beside and under it.

    Args:
        answers: prompt -> the tokens that plain decoding writes after it.
        vocab: tokens are below it.
    """

    top_k = 3

    def __init__(self, answers: dict[tuple[int, ...], list[int]], vocab: int, seed: int) -> None:
        self._answers = answers
        self._vocab = vocab
        self._random = np.random.default_rng(seed)

    def start(self, prompt: Int32Array) -> _OracleDrafter:
        return _OracleDrafter(self._answers[tuple(prompt.tolist())], self._vocab, self._random)


class _OracleDrafter:
    def __init__(self, answer: list[int], vocab: int, random: np.random.Generator) -> None:
        self._answer = answer
        self._vocab = vocab
        self._random = random
        self._written = 0
        self._asked = False

    def propose(self, budget: int) -> DraftTree:
        self._asked = True
        rest = self._answer[self._written :]
        if not rest:
            return EMPTY_TREE
        right = min(int(self._random.integers(0, 9)), len(rest))
        tokens: list[int] = []
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()
        true_path = [-1]
        while len(tokens) < budget and len(tokens) < 40:
            depth = len(true_path) - 1
            if depth < right and self._random.random() < 0.5:
                parent, token = true_path[-1], rest[depth]
            else:
                parent = int(self._random.integers(-1, len(tokens)))
                token = int(self._random.integers(0, self._vocab))
            if (parent, token) in taken:
                if self._random.random() < 0.1:
                    break
                continue
            taken.add((parent, token))
            if parent == true_path[-1] and depth < len(rest) and token == rest[depth]:
                true_path.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
        return DraftTree.of(tokens, parents, 0.9 ** np.array(_depths(parents)))

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._written += len(accepted)
        if feedback is None:
            assert not self._asked
            return
        assert feedback.top_tokens is not None
        assert feedback.top_tokens.shape == (len(feedback.tokens), 3)
        assert (feedback.top_tokens == feedback.predictions[:, None]).any(1).all()

    def close(self) -> None:
        pass


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
