"""Trees that grow from the predictions of a model, level by level, as in EAGLE-2 (arXiv 2406.16858): of each level the
most probable nodes are followed, and of all nodes the most probable ones are drafted."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.draft import DraftTrees

_LEAST_TOGETHER = 1e-3
"""Probability of the nodes of a level below which no other follows, while it is not known what levels cost."""


class Logits(NamedTuple):
    """The most probable tokens behind r tokens of a pass.

    Attributes:
        tokens: int32[r, k], best first.
        log_probabilities: float32[r, k].
        hidden: float32[r, d], what a head hands on; None for a whole model.
    """

    tokens: Int32Array
    log_probabilities: Float32Array
    hidden: Float32Array | None

    @classmethod
    def joined(cls, parts: SequenceOf[Logits]) -> Logits:
        """Those of several passes."""
        hidden = [part.hidden for part in parts if part.hidden is not None]
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.log_probabilities for part in parts]),
            np.concatenate(hidden) if hidden else None,
        )

    def part(self, rows: SequenceOf[int]) -> Logits:
        """Those of some of the tokens."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return Logits(self.tokens[rows], self.log_probabilities[rows], hidden)


class TreeGrowth:
    """Trees of s rows that grow level by level; all have the same number of followed nodes.

    Args:
        roots: predictions behind the texts.
        width: nodes that a level follows.
        levels: int32[s], at most.
        least: float32[s], see `ModelSource.draft`.
        room: int32[s], nodes that can be followed at most.

    Attributes:
        followed: nodes of each row that were followed, those of the level that is being computed included.
    """

    def __init__(self, roots: Logits, width: int, levels: Int32Array, least: Float32Array, room: Int32Array) -> None:
        rows = roots.tokens.shape[0]
        self.width, self.followed = width, 0
        self._levels, self._least, self._room = levels, least, room
        self._depth = 1
        self._tokens, self._logs = roots.tokens, roots.log_probabilities
        self._parents: Int32Array = np.full(roots.tokens.shape, -1, np.int32)
        self._newest = slice(0, roots.tokens.shape[1])
        # Of followed nodes: the column of each among all nodes, the followed node above it, its depth.
        self._columns, self._above, self._depths = np.empty((3, rows, 0), np.int32)
        self._roots = roots.hidden
        self._hidden = None if roots.hidden is None else np.empty((rows, 0, roots.hidden.shape[1]), np.float32)

    @property
    def hidden_width(self) -> int:
        return 0 if self._roots is None else int(self._roots.shape[1])

    def next_level(self) -> npt.NDArray[np.int64]:
        """Chooses what the next level follows; returns the rows that have one, none at the end."""
        logs = self._logs[:, self._newest]
        best = np.argsort(-logs, axis=1, kind="stable")[:, : self.width]
        together = np.exp(np.take_along_axis(logs, best, axis=1)).sum(axis=1)
        deeper = (self._levels > self._depth) & (together > np.maximum(self._least, _LEAST_TOGETHER))
        active = np.flatnonzero(deeper & (self._room >= self.followed + self.width))
        if active.size:
            columns = (best + self._newest.start).astype(np.int32)
            self._columns = np.concatenate([self._columns, columns], axis=1)
            self._above = np.concatenate([self._above, self._followed_above(columns)], axis=1)
            self._depths = np.concatenate([self._depths, np.full_like(columns, self._depth)], axis=1)
            self.followed += self.width
            self._depth += 1
        return active

    def _followed_above(self, columns: Int32Array) -> Int32Array:
        """Of nodes, int32[s, width], the followed node that is their parent; -1 for the root."""
        parents = np.take_along_axis(self._parents, columns.astype(np.int64), axis=1)
        above: Int32Array = np.full_like(parents, -1)
        if self.followed:
            found = self._columns[:, None, : self.followed] == parents[:, :, None]
            above = np.where(parents < 0, -1, found.argmax(axis=2)).astype(np.int32)
        return above

    def path_arrays(self, rows: npt.NDArray[np.int64]) -> tuple[Int32Array, Int32Array, Int32Array]:
        """int32[rows, followed]: tokens; parents, counted in a row of a batch behind the token of the root; depths."""
        columns = self._columns[rows]
        tokens = np.take_along_axis(self._tokens[rows], columns.astype(np.int64), axis=1)
        return tokens, self._above[rows] + np.int32(1), self._depths[rows]

    def hidden_of_parents(self, rows: npt.NDArray[np.int64]) -> Float32Array:
        """float32[rows, followed, d], what the parents of followed nodes hand on."""
        assert self._roots is not None
        assert self._hidden is not None
        known = np.concatenate([self._roots[:, None], self._hidden], axis=1)[rows]
        index = (self._above[rows] + 1).astype(np.int64)
        taken: Float32Array = np.take_along_axis(known, index[:, :, None], axis=1)
        return taken

    def add(self, rows: npt.NDArray[np.int64], logits: Logits) -> None:
        """The predictions behind the nodes that some rows followed latest."""
        all_rows, width, children = self._tokens.shape[0], self.width, logits.tokens.shape[1]
        tokens = np.zeros((all_rows, width * children), np.int32)
        logs = np.full(tokens.shape, -np.inf, np.float32)
        tokens[rows] = logits.tokens.reshape(rows.size, -1)
        latest = self._columns[:, -width:]
        above = np.take_along_axis(self._logs, latest.astype(np.int64), axis=1)[rows]
        logs[rows] = (above[:, :, None] + logits.log_probabilities.reshape(rows.size, width, -1)).reshape(rows.size, -1)
        self._newest = slice(self._tokens.shape[1], self._tokens.shape[1] + tokens.shape[1])
        self._tokens = np.concatenate([self._tokens, tokens], axis=1)
        self._logs = np.concatenate([self._logs, logs], axis=1)
        self._parents = np.concatenate([self._parents, np.repeat(latest, children, axis=1)], axis=1)
        if self._hidden is not None and logits.hidden is not None:
            hidden = np.zeros((all_rows, width, self.hidden_width), np.float32)
            hidden[rows] = logits.hidden.reshape(rows.size, width, -1)
            self._hidden = np.concatenate([self._hidden, hidden], axis=1)

    def best(self, budgets: Int32Array) -> DraftTrees:
        """The most probable nodes of each row, with their parents; at most `budgets`, int32[s]."""
        ranks = np.argsort(np.argsort(-self._logs, axis=1, kind="stable"), axis=1)
        taken = (ranks < budgets[:, None]) & np.isfinite(self._logs)
        places = np.cumsum(taken, axis=1, dtype=np.int32) - np.int32(1)
        above = np.take_along_axis(places, np.maximum(self._parents, 0).astype(np.int64), axis=1)
        parents = np.where(self._parents < 0, -1, above).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(taken.sum(axis=1))]).astype(np.int32)
        scores = np.exp(np.minimum(self._logs, 0.0)).astype(np.float32)
        return DraftTrees(self._tokens[taken], parents[taken], scores[taken], offsets)
