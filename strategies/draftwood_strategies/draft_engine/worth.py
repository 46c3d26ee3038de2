"""How many draft nodes a step verifies: where expected tokens per second are highest.

The choice is that of vLLM's adaptive verification, carried over to trees: sort the scores of all sequences' nodes,
and take as many as maximise (tokens that the step runs anyway + sum of the best scores) / step time, or none if that
is less than 5% more than without drafts: the best of many estimates is too high where they hardly differ, and the
host's work is not in them. Scores never grow along a path, so the best nodes are a tree. A prompt's token counts like
one that is written, so drafts beside a prompt are narrow and do not delay its first token.

Some engines verify one continuation of a sequence and no tree, and a branch may cost more than it gains: a recurrent
layer may be computed path by path, so that the time of a step depends on the number of paths as well. A chain is the
path of a tree with the most accepted tokens to be expected, less what its tokens cost: the sum of its scores above a
minimum. So it ends where the next token is not worth its time in the batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftwood_strategies.arrays import Float32Array, Float64Array, Int32Array, Int64Array, segment_sizes
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.draft_engine.step_times import StepSeconds
from draftwood_strategies.native import compiled

_MIN_GAIN = 1.05
"""Expected tokens per second, over those without drafts, from which on nodes are taken."""


def min_worthwhile_score(
    scores: Float32Array,
    base_tokens: int,
    step_times: StepSeconds,
    exponent: float = 1.0,
) -> float:
    """The score below which a node is not worth its time in this step; infinite if none is.

    Args:
        scores: float32[n], of all nodes that the step's sequences propose.
        base_tokens: tokens that the step runs anyway.
        step_times: (n, m) -> seconds that the step takes with n, n + 1, ... m tokens, float64[m - n + 1].
        exponent: a node counts as its score to this power.
    """
    if not scores.size:
        return 0.0
    seconds = step_times(base_tokens, base_tokens + scores.size)
    return float(_min_worthwhile(np.sort(scores), base_tokens, seconds, exponent))


def with_drafts(step_times: StepSeconds, trees: DraftTrees, seconds: float) -> StepSeconds:
    """The time of a step that verifies the best nodes of trees; every further draft costs so many seconds more."""
    if not seconds or len(trees) < 2:
        return step_times
    drafts = np.repeat(np.arange(len(trees)), np.diff(trees.offsets))[np.argsort(-trees.scores, kind="stable")]
    first = np.zeros(drafts.size + 1)
    first[1 + np.unique(drafts, return_index=True)[1]] = seconds
    further = np.maximum(np.cumsum(first) - seconds, 0.0)
    return lambda fewest, most: step_times(fewest, most) + further[: most - fewest + 1]


def with_change(step_times: StepSeconds, size: int, seconds: float) -> StepSeconds:
    """The time of a step that takes so many seconds longer if its number of tokens is not `size`."""
    if not seconds:
        return step_times

    def changed(fewest: int, most: int) -> npt.NDArray[np.float64]:
        taken = step_times(fewest, most) + seconds
        if fewest <= size <= most:
            taken[size - fewest] -= seconds
        return taken

    return changed


@compiled
def _min_worthwhile(scores: Float32Array, base_tokens: int, seconds: npt.NDArray[np.float64], exponent: float) -> float:
    """As `min_worthwhile_score`; `scores` grow."""
    tokens, best, lowest = float(base_tokens), _MIN_GAIN * base_tokens / seconds[0], np.inf
    for taken in range(1, seconds.shape[0]):
        score = scores[scores.shape[0] - taken]
        tokens += score**exponent
        if taken < scores.shape[0] and scores[scores.shape[0] - taken - 1] == score:
            continue  # equal scores are taken together, and the next node may begin a block of tokens (`BLOCK`)
        if tokens / seconds[taken] > best:
            best, lowest = tokens / seconds[taken], score
    return lowest


_EXPONENT = 1.25
"""Of a token's score in the budget. A token far down a chain is accepted where the text is easy, and there the next
step would have written it as well: it saves less than its score says. 1 costs up to 2% and 2 up to 3%
(docs/decisions/draft-budget.md)."""


def worthwhile_chains(
    trees: DraftTrees, longest: Int32Array, base_tokens: int, step_seconds: StepSeconds
) -> DraftTrees:
    """A chain of each tree, so long that the step writes the most tokens a second, as far as scores and times say.

    Args:
        longest: int32[s], the most tokens of each chain.
        base_tokens: tokens that the step runs anyway.
    """
    chains = best_chains(trees, longest)
    if not chains.tokens.shape[0]:
        return chains
    return best_chains(trees, longest, min_worthwhile_score(chains.scores, base_tokens, step_seconds, _EXPONENT))


def best_chains(trees: DraftTrees, longest: Int32Array, min_score: float = 0.0) -> DraftTrees:
    """The path of each tree whose scores above `min_score` have the largest sum; it has no score below that.

    Args:
        longest: int32[s], the most tokens of each path.
    """
    n, sequences = trees.tokens.shape[0], len(trees)
    tokens, scores, offsets = np.empty(n, np.int32), np.empty(n, np.float32), np.zeros(sequences + 1, np.int32)
    depths, sums = np.empty(n, np.int32), np.empty(n, np.float64)
    _best_chains(
        trees.tokens,
        trees.parents,
        trees.scores,
        trees.offsets,
        longest,
        min_score,
        depths,
        sums,
        tokens,
        scores,
        offsets,
    )
    end = int(offsets[-1])
    parents = np.arange(-1, end - 1, dtype=np.int32) - np.repeat(offsets[:-1], segment_sizes(offsets))
    return DraftTrees(tokens[:end], parents.astype(np.int32), scores[:end], offsets)


def best_chain(tree: DraftTree) -> DraftTree:
    """The path of the tree from its root that is accepted furthest on average: the sum of its scores is largest."""
    return best_chains(DraftTrees.of([tree]), np.array([len(tree)], np.int32))[0]


@compiled
def _best_chains(
    tree_tokens: Int32Array,
    parents: Int32Array,
    tree_scores: Float32Array,
    tree_offsets: Int32Array,
    longest: Int32Array,
    min_score: float,
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
            gain = tree_scores[node] - min_score
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
    chains = best_chains(trees, segment_sizes(trees.offsets))
    as_trees = _rate(trees.scores, tokens, with_branches(step_seconds, trees, seconds))
    return trees if as_trees >= _rate(chains.scores, tokens, step_seconds) else chains


def _rate(scores: Float32Array, tokens: int, step_seconds: StepSeconds) -> float:
    """Tokens a second that the best number of nodes with these scores writes."""
    expected = tokens + np.concatenate([[0.0], np.cumsum(-np.sort(-scores), dtype=np.float64)])
    return float((expected / step_seconds(tokens, tokens + scores.shape[0])).max())
