"""The draft tree: tokens that may come next, and the probability that each is accepted.

Knows token ids and numbers only; nothing of text, models or requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from draftwood_strategies.arrays import Float32Array as Float32Array
from draftwood_strategies.arrays import Int32Array as Int32Array
from draftwood_strategies.arrays import segment_sizes
from draftwood_strategies.native import compiled
from draftwood_strategies.tree_index import NO_NODE, TreeIndex, check_array, check_trees, insert, unlinked
from draftwood_strategies.tree_index import MalformedTreeError as MalformedTreeError


@dataclass(eq=False)
class DraftTree:
    """Guessed continuations of a sequence, as a tree under its last committed token. Nobody changes it; a frozen one
    would take three times as long to make.

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

    def check(self, vocab_size: int | None = None) -> None:
        """Raises `MalformedTreeError` when an invariant is violated, or a token is not below `vocab_size`."""
        check_trees(self.tokens, self.parents, self.scores, None, vocab_size)

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


@dataclass(eq=False, slots=True)
class DraftTrees:
    """The draft trees of several sequences in flat arrays, one tree after the other. Nobody changes them.

    Attributes:
        tokens, parents, scores: int32[n], int32[n] and float32[n], as in `DraftTree`; parents are counted from the
            beginning of their tree.
        offsets: int32[s + 1]; the nodes of tree i are `offsets[i]` to `offsets[i + 1]`.
    """

    tokens: Int32Array
    parents: Int32Array
    scores: Float32Array
    offsets: Int32Array

    @classmethod
    def of(cls, trees: SequenceOf[DraftTree]) -> DraftTrees:
        """The trees of a sequence each, in this order."""
        if len(trees) == 1:
            tree = trees[0]
            return cls(tree.tokens, tree.parents, tree.scores, np.array([0, len(tree)], np.int32))
        filled = [tree for tree in trees if len(tree)] or [EMPTY_TREE]
        offsets = np.zeros(len(trees) + 1, np.int32)
        np.cumsum([len(tree) for tree in trees], out=offsets[1:])
        return cls(
            np.concatenate([tree.tokens for tree in filled]),
            np.concatenate([tree.parents for tree in filled]),
            np.concatenate([tree.scores for tree in filled]),
            offsets,
        )

    @classmethod
    def scattered(cls, parts: SequenceOf[tuple[SequenceOf[int], DraftTrees]], sequences: int) -> DraftTrees:
        """Trees for so many sequences, of parts that are each for some of them, in ascending order; others get none."""
        if len(parts) == 1 and len(parts[0][0]) == sequences:
            return parts[0][1]
        sizes = np.zeros(sequences + 1, np.int32)
        for rows, trees in parts:
            sizes[np.asarray(rows, np.int64) + 1] = segment_sizes(trees.offsets)
        offsets = np.cumsum(sizes, dtype=np.int32)
        if len(parts) == 1:
            only = parts[0][1]
            return cls(only.tokens, only.parents, only.scores, offsets)
        n = int(offsets[-1])
        made = cls(np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.float32), offsets)
        for rows, trees in parts:
            starts = offsets[np.asarray(rows, np.int64)]
            nodes = np.arange(trees.tokens.shape[0]) + np.repeat(
                starts - trees.offsets[:-1], segment_sizes(trees.offsets)
            )
            made.tokens[nodes], made.parents[nodes], made.scores[nodes] = trees.tokens, trees.parents, trees.scores
        return made

    @classmethod
    def empty(cls, sequences: int) -> DraftTrees:
        """A tree without nodes for each of so many sequences."""
        return cls(*tree_arrays(sequences, 0))

    @classmethod
    def written(cls, tokens: Int32Array, parents: Int32Array, scores: Float32Array, offsets: Int32Array) -> DraftTrees:
        """The trees that were written into the beginning of `tree_arrays`."""
        end = offsets.item(-1)
        return cls(tokens[:end], parents[:end], scores[:end], offsets)

    def part(self, begin: int, end: int) -> DraftTrees:
        """Those of the sequences from `begin` to `end`."""
        first, last = self.offsets[begin].item(), self.offsets[end].item()
        offsets = self.offsets[begin : end + 1] - np.int32(first)
        return DraftTrees(self.tokens[first:last], self.parents[first:last], self.scores[first:last], offsets)

    def __len__(self) -> int:
        return int(self.offsets.shape[0]) - 1

    def __getitem__(self, sequence: int) -> DraftTree:
        begin, end = self.offsets[sequence : sequence + 2].tolist()
        return DraftTree(self.tokens[begin:end], self.parents[begin:end], self.scores[begin:end])

    def __iter__(self) -> Iterator[DraftTree]:
        return map(self.__getitem__, range(len(self)))


def tree_arrays(sequences: int, nodes: int) -> tuple[Int32Array, Int32Array, Float32Array, Int32Array]:
    """Tokens, parents, scores and offsets, as in `DraftTrees`, with space for so many nodes; `offsets` is 0."""
    return (
        np.empty(nodes, np.int32),
        np.empty(nodes, np.int32),
        np.empty(nodes, np.float32),
        np.zeros(sequences + 1, np.int32),
    )


def merged(trees: SequenceOf[DraftTree], capacity: int | None = None) -> DraftTree:
    """The trees laid over one another by shared prefix; a node that several have keeps its best score.

    Args:
        trees: their siblings may be equal.
        capacity: how many nodes there are at most; further ones are left out, with what hangs from them. None for all.
    """
    space = sum(len(tree) for tree in trees) if capacity is None else capacity
    index = unlinked(np.empty(space, np.int32))
    parents, scores, size = np.empty(space, np.int32), np.empty(space, np.float32), 0
    for tree in trees:
        located = np.empty(len(tree), np.int32)
        size = _merge(index, parents, scores, size, tree.tokens, tree.parents, tree.scores, located)
    return DraftTree(index["token"][1 : size + 1].copy(), parents[:size], scores[:size])


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


def checked_all(proposed: Any, budgets: Int32Array, vocab_size: int | None) -> DraftTrees:
    """What a strategy proposes for a step, of whatever class, as checked trees of arrays that compiled code takes.

    Args:
        budgets: int32[s], the most nodes of each.

    Raises:
        MalformedTreeError: a tree has more nodes than its budget, or violates an invariant.
        AttributeError: an array is missing.
    """
    arrays = proposed.tokens, proposed.parents, proposed.scores, proposed.offsets
    plain = type(proposed) is DraftTrees and all(type(a) is np.ndarray and a.flags.carray for a in arrays)
    trees = proposed if plain else DraftTrees(*(_plain(array) for array in arrays))
    check_array("offsets", trees.offsets, np.int32)
    offsets, n = trees.offsets.tolist(), len(trees.tokens)
    if len(offsets) != len(budgets) + 1 or offsets[0] != 0 or offsets[-1] != n:
        raise MalformedTreeError(f"offsets must delimit {budgets.size} trees of {n} nodes")
    if not all(0 <= b - a <= budget for a, b, budget in zip(offsets, offsets[1:], budgets.tolist(), strict=False)):
        sizes = segment_sizes(trees.offsets).tolist()
        raise MalformedTreeError(f"drafts have at most {budgets.tolist()} nodes, not {sizes}")
    check_trees(trees.tokens, trees.parents, trees.scores, trees.offsets, vocab_size)
    return cast(DraftTrees, trees)


def _plain(array: Any) -> Any:
    """A contiguous, writable copy of an array; anything else as it is, for `check` to refuse."""
    return np.array(array, order="C") if isinstance(array, np.ndarray) else array


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
