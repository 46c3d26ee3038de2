"""What branches of draft trees cost and bring, for models where a path costs something beside its nodes. No torch.

A recurrent layer takes its state from the parent of a node. Where it cannot follow a tree, it is computed path by path:
then the time of a step depends on the number of paths as well.
"""

from __future__ import annotations

import numpy as np

from draftwood_strategies.budgeting.chains import best_chains
from draftwood_strategies.budgeting.step_time import StepSeconds
from draftwood_strategies.draft import DraftTrees, Float32Array
from draftwood_strategies.native import Int32Array, Int64Array, sizes_between


def branches(trees: DraftTrees) -> Int64Array:
    """How many branches the best k nodes of some trees make, for each k, int64[n + 1]: paths beside the first ones."""
    order = np.argsort(-trees.scores, kind="stable")
    further = np.ones(order.size, np.int64)
    further[np.unique(_above(trees.parents, trees.begins)[order], return_index=True)[1]] = 0
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(further)])


def branches_in(parents: Int32Array, begins: Int32Array) -> int:
    """How many branches the tokens of batch rows make, see `StepBatch`."""
    return int(parents.size - np.unique(_above(parents, begins)).size)


def _above(parents: Int32Array, begins: Int32Array) -> Int64Array:
    """int64[n], what each node follows: a node, or the root of its tree, each by a number of its own."""
    starts = np.repeat(begins[:-1], sizes_between(begins)).astype(np.int64)
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
    longest = sizes_between(trees.begins)
    tokens_of, scores, begins = best_chains(trees, longest)
    places = np.arange(tokens_of.shape[0], dtype=np.int32) - np.repeat(begins[:-1], sizes_between(begins))
    chains = DraftTrees(tokens_of, (places - 1).astype(np.int32), scores, begins)
    as_trees = _rate(trees.scores, tokens, with_branches(step_seconds, trees, seconds))
    return trees if as_trees >= _rate(scores, tokens, step_seconds) else chains


def _rate(scores: Float32Array, tokens: int, step_seconds: StepSeconds) -> float:
    """Tokens a second that the best number of nodes with these scores writes."""
    expected = tokens + np.concatenate([[0.0], np.cumsum(-np.sort(-scores), dtype=np.float64)])
    return float((expected / step_seconds(tokens, tokens + scores.shape[0])).max())
