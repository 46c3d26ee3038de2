"""The gain of each source: by how much it raised the probability of the tokens that were written.

The mixture is compared with the mixture without the source. So a source that only repeats others gains nothing, and
one that is wrong with confidence has a negative gain.
"""

from __future__ import annotations

import math

from draftwood_strategies.mixing.candidates import Workspace
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES, TABLE, Weights
from draftwood_strategies.native import Int32Array, Real, compiled
from draftwood_strategies.successors import ORDERS, WIDTH

_RATE = 0.005
"""Weight of the latest token in the running mean: about 200 tokens. That gains are differences of
probabilities matters: as differences of logarithms they switched off good sources before they had learned
(docs/decisions, "Sources of a hybrid vote")."""


@compiled
def record_gains(
    trees: SourceTrees,
    weights: Weights,
    workspace: Workspace,
    n: int,
    target: int,
    longest: int,
    level: int,
    active: Int32Array,
) -> None:
    """Moves the gain of each active source towards that at one node.

    Args:
        n, longest, level: what `candidates.collect` returned for the node.
        target: the candidate that was written, 0 where no source had it.
        active: int32[SOURCES + 1], 1 for each source that took part in the draft.
    """
    for source in range(SOURCES + 1):
        if not active[source]:
            continue
        gain = 0.0
        if target > 0:
            others = 0
            for other in range(SOURCES):
                if other != source:
                    others = max(others, workspace.levels[other])
            without = _probability_without(trees, weights, workspace, n, target, source, longest, level, others)
            gain = workspace.probabilities[target] - without
        weights.gains[source] += _RATE * (gain - weights.gains[source])


@compiled
def _probability_without(
    trees: SourceTrees,
    weights: Weights,
    workspace: Workspace,
    n: int,
    target: int,
    source: int,
    longest: int,
    level: int,
    level_of_others: int,
) -> Real:
    """The probability of candidate `target` without a source; 0 if only that source has it.

    Args:
        longest, level: what `candidates.collect` returned.
        level_of_others: the highest confidence level of the other tree-shaped sources.
    """
    contributions, logits, escapes = workspace.contributions, workspace.logits, weights.escapes
    if source == TABLE:
        none = logits[0] - escapes[level, longest] + escapes[level, 0]
    else:
        none = logits[0] - contributions[0, source] - escapes[level, longest] + escapes[level_of_others, longest]
    right = 0.0
    total = math.exp(none)
    for i in range(1, n):
        if _others_have(trees, workspace, i, source):
            weight = math.exp(logits[i] - contributions[i, source])
            total += weight
            if i == target:
                right = weight
    return right / total


@compiled
def _others_have(trees: SourceTrees, workspace: Workspace, i: int, source: int) -> bool:
    """Whether any other source has candidate i."""
    held = False
    for other in range(SOURCES + 1):
        held = held or (other != source and _has(trees, workspace, i, other))
    return held


@compiled
def dominant_source(trees: SourceTrees, workspace: Workspace, i: int) -> int:
    """The source that has candidate i and raised it most above "none of these"; -1 where none has it."""
    best, most = -1, 0.0
    for source in range(SOURCES + 1):
        raised = workspace.contributions[i, source] - workspace.contributions[0, source]
        if _has(trees, workspace, i, source) and (best < 0 or raised > most):
            best, most = source, raised
    return best


@compiled
def _has(trees: SourceTrees, workspace: Workspace, i: int, source: int) -> bool:
    if source != TABLE:
        node = workspace.nodes[i]
        return bool(node >= 0 and trees.chances[node, source] > 0.0)
    least = WIDTH
    for order in range(ORDERS):
        least = min(least, workspace.ranks[i, order])
    return least < WIDTH
