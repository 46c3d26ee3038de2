"""Draft trees by their paths: made of paths from the root, and asked what the model said after one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from strategies.base import Feedback
from strategies.draft import ROOT, DraftTree


class PathTree:
    """A draft tree made of paths from the root."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._nodes: dict[tuple[int, int], int] = {}
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []

    def add(self, path: Iterable[int], scores: Iterable[float]) -> None:
        """Adds a path as far as the budget reaches. Scores must not grow along it; a node that is there already keeps
        the better one."""
        node = ROOT
        for token, score in zip(path, scores, strict=False):
            child = self._nodes.get((node, token))
            if child is None:
                if len(self.tokens) == self._budget:
                    return
                child = self._nodes[node, token] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
                self._scores.append(score)
            elif score > self._scores[child]:
                self._scores[child] = score
            node = child

    def tree(self) -> DraftTree:
        return DraftTree(
            np.array(self.tokens, np.int32), np.array(self._parents, np.int32), np.array(self._scores, np.float32)
        )


class PathPredictions:
    """What the model said after the paths of a verified tree, which may have lost nodes since it was proposed."""

    def __init__(self, feedback: Feedback) -> None:
        edges = zip(feedback.parents.tolist(), feedback.tokens.tolist(), strict=True)
        self._nodes = {edge: node for node, edge in enumerate(edges)}
        self._predictions = feedback.predictions.tolist()

    def after(self, path: Iterable[int]) -> int | None:
        """The model's next token; None where the path was not verified."""
        node = 0
        for token in path:
            child = self._nodes.get((node, token))
            if child is None:
                return None
            node = child
        return int(self._predictions[node])
