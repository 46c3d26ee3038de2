"""The draft tree: tokens that may come next, and the probability that each is accepted.

Knows token ids and numbers only; nothing of text, models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from draftwood_strategies.native import Float32Array as Float32Array
from draftwood_strategies.native import Int32Array as Int32Array
from draftwood_strategies.native import compiled, flattened
from draftwood_strategies.tree_index import NO_NODE, TreeIndex, find_child, insert, link, unlinked


class MalformedTreeError(ValueError):
    """A draft tree violates an invariant; the message names the invariant, the node and the value."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Guessed continuations of a sequence, as a tree under its last committed token.

    Attributes:
        tokens: int32[n], the token at each node.
        parents: int32[n], each node's parent, always before the node itself; `NO_NODE` (-1) for the first level.
        scores: float32[n], estimated probability that the whole path down to the node is accepted.

    Invariants (`check` raises `MalformedTreeError`): `-1 <= parents[i] < i`; tokens are not negative; scores lie in
    [0, 1] and never grow along a path, so that the k best nodes are always a tree themselves; siblings carry
    different tokens.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array

    @classmethod
    def of(
        cls, tokens: npt.ArrayLike, parents: npt.ArrayLike | None = None, scores: npt.ArrayLike | None = None
    ) -> DraftTree:
        """A checked tree of anything array-like. Without `parents` the tokens are one chain; without `scores`, all 1.

        Raises:
            MalformedTreeError: an invariant is violated.
        """
        token_array = np.asarray(tokens, np.int32)
        tree = cls(
            token_array,
            np.arange(-1, token_array.size - 1, dtype=np.int32) if parents is None else np.asarray(parents, np.int32),
            np.ones(token_array.size, np.float32) if scores is None else np.asarray(scores, np.float32),
        )
        tree.check()
        return tree

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    def __repr__(self) -> str:
        nodes = ", ".join(
            f"{t}<-{p} {s:.2f}"
            for t, p, s in zip(
                self.tokens[:6].tolist(), self.parents[:6].tolist(), self.scores[:6].tolist(), strict=True
            )
        )
        return f"DraftTree({len(self)} nodes: {nodes}{', ...' if len(self) > 6 else ''})"

    def check(self, vocab_size: int | None = None) -> None:
        """Raises `MalformedTreeError` when an invariant is violated, or a token is not below `vocab_size`."""
        for name, array, dtype in (
            ("tokens", self.tokens, np.int32),
            ("parents", self.parents, np.int32),
            ("scores", self.scores, np.float32),
        ):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise MalformedTreeError(f"{name} must be a {np.dtype(dtype).name}[n] array, not {found}")
        if not len(self.tokens) == len(self.parents) == len(self.scores):
            lengths = (len(self.tokens), len(self.parents), len(self.scores))
            raise MalformedTreeError(f"tokens, parents and scores must be of one length, not {lengths}")
        violated, node = _first_violation(
            unlinked(self.tokens), self.parents, self.scores, 2**31 if vocab_size is None else vocab_size
        )
        if violated:
            raise MalformedTreeError(
                f"{_INVARIANTS[violated]}, but node {node} has token {self.tokens[node]}, parent {self.parents[node]},"
                f" score {self.scores[node]}"
            )

    @cached_property
    def depths(self) -> Int32Array:
        """int32[n]: 0 for the first level."""
        depths = np.empty(len(self), np.int32)
        _set_depths(self.parents, depths)
        return depths

    def pruned(self, budget: int) -> DraftTree:
        """The `budget` best-scored nodes, in their order; a node's parent is always kept with it."""
        if len(self) <= budget:
            return self
        if budget <= 0:
            return EMPTY_TREE
        kept = np.sort(np.argsort(-self.scores, kind="stable")[:budget])
        new_index = np.full(len(self) + 1, NO_NODE, np.int32)
        new_index[kept] = np.arange(kept.size, dtype=np.int32)
        return DraftTree(self.tokens[kept], new_index[self.parents[kept]], self.scores[kept])


EMPTY_TREE = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


class TreeBuilder:
    """A draft tree made by laying trees over one another by shared prefix; a node of several keeps its best score.

    Args:
        capacity: how many nodes it takes; further ones are left out, with what hangs from them.
    """

    def __init__(self, capacity: int) -> None:
        self._nodes = DraftTree(
            np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.float32)
        )
        self._index = unlinked(self._nodes.tokens)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, tokens: Int32Array, parents: Int32Array, scores: Float32Array) -> None:
        """Adds a tree, laid out as in `DraftTree`; its siblings may be equal."""
        located = np.empty(tokens.shape[0], np.int32)
        self._size = _merge(
            self._index, self._nodes.parents, self._nodes.scores, self._size, tokens, parents, scores, located
        )

    def tree(self) -> DraftTree:
        """What was added so far."""
        made, n = self._nodes, self._size
        return DraftTree(made.tokens[:n], made.parents[:n], made.scores[:n])


def merged(trees: SequenceOf[DraftTree]) -> DraftTree:
    """The trees laid over one another by shared prefix; a node that several have keeps its best score."""
    builder = TreeBuilder(sum(len(tree) for tree in trees))
    for tree in trees:
        builder.add(tree.tokens, tree.parents, tree.scores)
    return builder.tree()


def checked(proposed: Any, budget: int, vocab_size: int | None) -> DraftTree:
    """What a strategy proposes, of whatever class, as a checked tree of arrays that compiled code takes.

    Raises:
        MalformedTreeError: it has more than `budget` nodes, or violates an invariant.
        AttributeError: it lacks `tokens`, `parents` or `scores`.
    """
    arrays = proposed.tokens, proposed.parents, proposed.scores
    if len(arrays[0]) > budget:  # first, since `check` takes longer for larger trees
        raise MalformedTreeError(f"a draft has at most {budget} nodes, not {len(arrays[0])}")
    plain = type(proposed) is DraftTree and all(type(a) is np.ndarray and a.flags.carray for a in arrays)
    tree = proposed if plain else DraftTree(*(_plain(array) for array in arrays))
    tree.check(vocab_size)
    return cast(DraftTree, tree)


def _plain(array: Any) -> Any:
    """A contiguous, writable copy of an array; anything else as it is, for `check` to refuse."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else array


_INVARIANTS = (
    "",
    "a parent comes before its child and is at least -1",
    "a token is not negative and below the vocabulary size",
    "a score lies in [0, 1]",
    "a score never grows along a path",
    "siblings carry different tokens",
)


@flattened
@compiled
def _first_violation(index: TreeIndex, parents: Int32Array, scores: Float32Array, vocab_size: int) -> tuple[int, int]:
    """Index into `_INVARIANTS` and the node, or (0, 0). Links the nodes of the tree as it goes."""
    tokens = index.tokens
    for i in range(tokens.shape[0]):
        p = parents[i]
        if p < NO_NODE or p >= i:
            return 1, i
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            return 2, i
        if not 0.0 <= scores[i] <= 1.0:
            return 3, i
        if p >= 0 and scores[i] > scores[p]:
            return 4, i
        if find_child(index, p, tokens[i]) >= 0:
            return 5, i
        link(index, i, p)
    return 0, 0


@flattened
@compiled
def _merge(
    index: TreeIndex,
    index_parents: Int32Array,
    index_scores: Float32Array,
    size: int,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    located: Int32Array,
) -> int:
    """Inserts a tree and sets parents and scores of the index's nodes; returns the new size."""
    end = insert(index, size, tokens, parents, located)
    for node in range(size, end):
        index_scores[node] = 0.0
    for i in range(tokens.shape[0]):
        node = located[i]
        if node >= 0:
            index_parents[node] = located[parents[i]] if parents[i] >= 0 else NO_NODE
            index_scores[node] = max(index_scores[node], scores[i])
    return end


@compiled
def _set_depths(parents: Int32Array, depths: Int32Array) -> None:
    for i in range(parents.shape[0]):
        depths[i] = depths[parents[i]] + 1 if parents[i] >= 0 else 0
