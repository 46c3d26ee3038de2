"""The draft tree: which tokens are guessed to come next, and how sure the guess is.

Knows token ids and numbers only; nothing of text, models or requests.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import numba
import numpy as np
import numpy.typing as npt

Int32Array: TypeAlias = npt.NDArray[np.int32]
Float32Array: TypeAlias = npt.NDArray[np.float32]

ROOT = -1
"""The parent of a node that hangs from the last committed token."""


class MalformedTreeError(ValueError):
    """A draft tree breaks one of its laws; the message names the law, the node and the value."""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Guessed continuations of a sequence, as a tree under its last committed token.

    Attributes:
        tokens: int32[n], the token at each node.
        parents: int32[n], each node's parent, always before the node itself; `ROOT` (-1) for the first level.
        scores: float32[n], estimated probability that the whole path down to the node is accepted.

    Laws (`check` raises `MalformedTreeError`): `-1 <= parents[i] < i`; tokens are not negative; scores lie in
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
            MalformedTreeError: a law is broken.
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
        """Raises `MalformedTreeError` when a law is broken, or a token is not below `vocab_size`."""
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
        law, node = _first_broken_law(
            self.tokens, self.parents, self.scores, 2**31 if vocab_size is None else vocab_size
        )
        if law:
            raise MalformedTreeError(
                f"{_LAWS[law]}, but node {node} has token {self.tokens[node]}, parent {self.parents[node]},"
                f" score {self.scores[node]}"
            )

    @cached_property
    def depths(self) -> Int32Array:
        """int32[n]: 0 for the nodes under the root."""
        return _depths(self.parents)

    def pruned(self, budget: int) -> DraftTree:
        """The `budget` best-scored nodes, in their order; a node's parent is always kept with it."""
        if len(self) <= budget:
            return self
        if budget <= 0:
            return EMPTY_TREE
        kept = np.sort(np.argsort(-self.scores, kind="stable")[:budget])
        new_index = np.full(len(self) + 1, ROOT, np.int32)
        new_index[kept] = np.arange(kept.size, dtype=np.int32)
        return DraftTree(self.tokens[kept], new_index[self.parents[kept]], self.scores[kept])


EMPTY_TREE = DraftTree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))


def merged(trees: SequenceOf[DraftTree]) -> DraftTree:
    """The trees laid over one another by shared prefix; a node that several have keeps its best score."""
    index: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    for tree in trees:
        place = {ROOT: ROOT}
        for node, (token, parent, score) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), strict=True)
        ):
            key = (place[parent], token)
            if key not in index:
                index[key] = len(tokens)
                tokens.append(token)
                parents.append(key[0])
                scores.append(score)
            place[node] = index[key]
            scores[place[node]] = max(scores[place[node]], score)
    return DraftTree(np.array(tokens, np.int32), np.array(parents, np.int32), np.array(scores, np.float32))


def checked(proposed: Any, budget: int, vocab_size: int | None) -> DraftTree:
    """What a strategy proposes, of whatever class, as a lawful tree of arrays that compiled code takes.

    Raises:
        MalformedTreeError: it has more than `budget` nodes, or breaks a law.
        AttributeError: it lacks `tokens`, `parents` or `scores`.
    """
    arrays = proposed.tokens, proposed.parents, proposed.scores
    if len(arrays[0]) > budget:  # before the laws, whose check takes longer for larger trees
        raise MalformedTreeError(f"a draft has at most {budget} nodes, not {len(arrays[0])}")
    plain = type(proposed) is DraftTree and all(type(a) is np.ndarray and a.flags.carray for a in arrays)
    tree = proposed if plain else DraftTree(*(_plain(array) for array in arrays))
    tree.check(vocab_size)
    return cast(DraftTree, tree)


def _plain(array: Any) -> Any:
    """A contiguous, writable copy of an array; anything else as it is, for `check` to refuse."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else array


_LAWS = (
    "",
    "a parent comes before its child and is at least -1",
    "a token is not negative and below the vocabulary size",
    "a score lies in [0, 1]",
    "a score never grows along a path",
    "siblings carry different tokens",
)


@numba.njit(cache=True, nogil=True)
def _first_broken_law(
    tokens: Int32Array, parents: Int32Array, scores: Float32Array, vocab_size: int
) -> tuple[int, int]:
    """Index into `_LAWS` and the node, or (0, 0)."""
    n = tokens.shape[0]
    first_child = np.full(n + 1, -1, np.int32)
    next_sibling = np.full(n, -1, np.int32)
    for i in range(n):
        p = parents[i]
        if p < -1 or p >= i:
            return 1, i
        if tokens[i] < 0 or tokens[i] >= vocab_size:
            return 2, i
        if not 0.0 <= scores[i] <= 1.0:
            return 3, i
        if p >= 0 and scores[i] > scores[p]:
            return 4, i
        sibling = first_child[p]
        while sibling >= 0:
            if tokens[sibling] == tokens[i]:
                return 5, i
            sibling = next_sibling[sibling]
        next_sibling[i] = first_child[p]
        first_child[p] = i
    return 0, 0


@numba.njit(cache=True, nogil=True)
def _depths(parents: Int32Array) -> Int32Array:
    depths = np.zeros(parents.shape[0], np.int32)
    for i in range(parents.shape[0]):
        if parents[i] >= 0:
            depths[i] = depths[parents[i]] + 1
    return depths
