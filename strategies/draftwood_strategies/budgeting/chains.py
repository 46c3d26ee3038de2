"""Chains out of draft trees, for engines that verify one continuation of a sequence and no tree, or where branches cost
more than they gain.

A chain is the path of a tree with the most accepted tokens to be expected, less what its tokens cost: the sum of its
scores above a least score. So it ends where the next token is not worth its time in the batch.

A branch costs something beside its nodes where a recurrent layer is computed path by path: then the time of a step
depends on the number of paths as well.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from draftwood_strategies.budgeting.budget import min_worthwhile_score
from draftwood_strategies.budgeting.step_time import StepSeconds
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.native import Float32Array, Float64Array, Int32Array, Int64Array, compiled, segment_sizes

_EXPONENT = 1.25
"""Of a token's score in the budget. A token far down a chain is accepted where the text is easy, and there the next
step would have written it as well: it saves less than its score says. 1 costs up to 2% and 2 up to 3%
(docs/decisions, "Chains inside vLLM, measured")."""


class Chains(NamedTuple):
    """A chain for each sequence of a step, one after the other.

    Attributes:
        tokens: int32[n].
        scores: float32[n], estimated probability that the chain is accepted up to and with the token.
        offsets: int32[s + 1]; chain i is `offsets[i]` to `offsets[i + 1]`.
    """

    tokens: Int32Array
    scores: Float32Array
    offsets: Int32Array

    def lists(self) -> list[list[int]]:
        """The tokens of each chain."""
        tokens, offsets = self.tokens.tolist(), self.offsets.tolist()
        return [tokens[begin:end] for begin, end in pairwise(offsets)]


def worthwhile_chains(trees: DraftTrees, longest: Int32Array, base_tokens: int, step_seconds: StepSeconds) -> Chains:
    """A chain of each tree, so long that the step writes the most tokens a second, as far as scores and times say.

    Args:
        longest: int32[s], the most tokens of each chain.
        base_tokens: tokens that the step runs anyway.
    """
    chains = best_chains(trees, longest)
    if not chains.tokens.shape[0]:
        return chains
    return best_chains(trees, longest, min_worthwhile_score(chains.scores, base_tokens, step_seconds, _EXPONENT))


def best_chains(trees: DraftTrees, longest: Int32Array, least: float = 0.0) -> Chains:
    """The path of each tree whose scores above `least` have the largest sum; it has no score below that.

    Args:
        longest: int32[s], the most tokens of each path.
    """
    n, sequences = trees.tokens.shape[0], len(trees)
    tokens, scores, offsets = np.empty(n, np.int32), np.empty(n, np.float32), np.zeros(sequences + 1, np.int32)
    depths, sums = np.empty(n, np.int32), np.empty(n, np.float64)
    _best_chains(
        trees.tokens, trees.parents, trees.scores, trees.offsets, longest, least, depths, sums, tokens, scores, offsets
    )
    end = int(offsets[-1])
    return Chains(tokens[:end], scores[:end], offsets)


def best_chain(tree: DraftTree) -> DraftTree:
    """The path of the tree from its root that is accepted furthest on average: the sum of its scores is largest."""
    tokens, scores, _ = best_chains(DraftTrees.of([tree]), np.array([len(tree)], np.int32))
    return DraftTree(tokens, np.arange(-1, tokens.shape[0] - 1, dtype=np.int32), scores)


@compiled
def _best_chains(
    tree_tokens: Int32Array,
    parents: Int32Array,
    tree_scores: Float32Array,
    tree_offsets: Int32Array,
    longest: Int32Array,
    least: float,
    depths: Int32Array,
    sums: Float64Array,
    tokens: Int32Array,
    scores: Float32Array,
    offsets: Int32Array,
) -> None:
    """Writes the chains; `depths` and `sums` are workspace for a value of each node."""
    end = 0
    for s in range(longest.shape[0]):
        first = tree_offsets[s]
        best, best_sum = -1, -1.0
        for node in range(first, tree_offsets[s + 1]):
            above = parents[node]
            depths[node] = depths[first + above] + 1 if above >= 0 else 1
            gain = tree_scores[node] - least
            sums[node] = gain + (sums[first + above] if above >= 0 else 0.0)
            worth = tree_scores[node] > 0.0 and gain >= 0.0
            if worth and depths[node] <= longest[s] and sums[node] >= best_sum:
                best, best_sum = node, sums[node]
        length = depths[best] if best >= 0 else 0
        node = best
        for at in range(end + length - 1, end - 1, -1):
            tokens[at], scores[at] = tree_tokens[node], tree_scores[node]
            node = first + parents[node]
        end += length
        offsets[s + 1] = end


def branches(trees: DraftTrees) -> Int64Array:
    """How many branches the best k nodes of some trees make, for each k, int64[n + 1]: paths beside the first ones."""
    order = np.argsort(-trees.scores, kind="stable")
    further = np.ones(order.size, np.int64)
    further[np.unique(_above(trees.parents, trees.offsets)[order], return_index=True)[1]] = 0
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(further)])


def branches_in(parents: Int32Array, offsets: Int32Array) -> int:
    """How many branches the tokens of batch rows make, see `StepBatch`."""
    return int(branches_by_row(parents, offsets).sum())


def branches_by_row(parents: Int32Array, offsets: Int32Array) -> Int64Array:
    """As `branches_in`, of each row, int64[s]."""
    followed = np.unique(_above(parents, offsets))
    rows = np.searchsorted(offsets, followed % max(parents.size, 1), side="right") - 1
    return segment_sizes(offsets) - np.bincount(rows, minlength=offsets.size - 1)


def _above(parents: Int32Array, offsets: Int32Array) -> Int64Array:
    """int64[n], what each node follows: a node, or the root of its tree, each by a number of its own."""
    starts = np.repeat(offsets[:-1], segment_sizes(offsets)).astype(np.int64)
    return np.where(parents >= 0, parents + starts, parents.size + starts)


def with_branches(step_seconds: StepSeconds, trees: DraftTrees, seconds: float) -> StepSeconds:
    """The time of a step that verifies the best nodes of trees of which each branch costs so many seconds more."""
    if not seconds:
        return step_seconds
    cost = seconds * branches(trees)
    return lambda fewest, most: step_seconds(fewest, most) + cost[: most - fewest + 1]


def worthwhile_branches(trees: DraftTrees, tokens: int, step_seconds: StepSeconds, seconds: float) -> DraftTrees:
    """The trees, or of each its best chain if the step writes more tokens a second so.

    Args:
        tokens: that the step runs anyway.
        seconds: of a branch.
    """
    if not seconds or not branches(trees)[-1]:
        return trees
    longest = segment_sizes(trees.offsets)
    tokens_of, scores, offsets = best_chains(trees, longest)
    places = np.arange(tokens_of.shape[0], dtype=np.int32) - np.repeat(offsets[:-1], segment_sizes(offsets))
    chains = DraftTrees(tokens_of, (places - 1).astype(np.int32), scores, offsets)
    as_trees = _rate(trees.scores, tokens, with_branches(step_seconds, trees, seconds))
    return trees if as_trees >= _rate(scores, tokens, step_seconds) else chains


def _rate(scores: Float32Array, tokens: int, step_seconds: StepSeconds) -> float:
    """Tokens a second that the best number of nodes with these scores writes."""
    expected = tokens + np.concatenate([[0.0], np.cumsum(-np.sort(-scores), dtype=np.float64)])
    return float((expected / step_seconds(tokens, tokens + scores.shape[0])).max())
