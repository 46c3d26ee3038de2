"""Online learning of a mixture's weights: after each step, one gradient step for every token that was written.

The gradient is that of the logarithm of the probability that the mixture gave to the token, as for the mixers of PAQ
compressors.
"""

from __future__ import annotations

import math

from draftwood_strategies.mixing.candidates import OUTSIDE, Workspace, collect, to_probabilities
from draftwood_strategies.mixing.sources.source_trees import SourceTrees
from draftwood_strategies.mixing.weights import SOURCES, Weights, chance_bin
from draftwood_strategies.native import Float32Array, Int32Array, Integer, Real, compiled
from draftwood_strategies.successors import ORDERS, WIDTH
from draftwood_strategies.tree_index import NO_NODE

_RATE, _TRUST_RATE = 0.03, 0.003
"""Steps of all weights but `Weights.trust`, and of this one, since its inputs are up to ten times as large. The
prior was fitted with them."""
_FIRST_RATE, _FIRST_TOKENS = 5.0, 40.0
"""The first tokens count five times, half of what is more after 40: weights that were fitted to other text adapt to a
tenant's soon. On random text scores added up to 2.1 times what was accepted instead of 3.1, elsewhere acceptance
lengths changed by -2.8 to +2.4% (docs/decisions, "The first tokens teach a hybrid more")."""
_GREATEST = 8.0
"""Bounds every weight; a logit of 8 is a probability of 0.9997."""


@compiled
def learn(
    trees: SourceTrees,
    weights: Weights,
    workspace: Workspace,
    rows: Int32Array,
    model_table: Int32Array,
    tail: Int32Array,
    accepted: Int32Array,
) -> None:
    """One gradient step for each accepted token.

    Args:
        trees to tail: as in `expansion.expand`, of the latest draft.
        accepted: int32[a], the tokens that the step wrote.
    """
    context = workspace.context
    node: Integer = NO_NODE
    for depth in range(accepted.shape[0]):
        for order in range(ORDERS):
            context[order] = accepted[depth - 1 - order] if order < depth else tail[ORDERS - 1 - order + depth]
        n, longest, level = collect(trees, weights, workspace, rows, model_table, node)
        target = n - 1
        while target > 0 and workspace.tokens[target] != accepted[depth]:
            target -= 1
        to_probabilities(workspace.logits, n, workspace.probabilities)
        _correct(trees, weights, workspace, n, target, longest, level)
        node = workspace.nodes[target] if target > 0 and workspace.nodes[target] >= 0 else OUTSIDE


@compiled
def _correct(
    trees: SourceTrees, weights: Weights, workspace: Workspace, n: int, target: int, longest: int, level: int
) -> None:
    """One gradient step at a node where candidate `target` was written, 0 where no source had the token.

    Args:
        n, longest, level: what `candidates.collect` returned for the node.
    """
    levels = workspace.levels
    seen = weights.seen[level, longest]
    weights.seen[level, longest] = seen + 1.0
    rate = _RATE * (1.0 + (_FIRST_RATE - 1.0) / (1.0 + seen / _FIRST_TOKENS))
    for i in range(n):
        gradient = (1.0 if i == target else 0.0) - workspace.probabilities[i]
        if i == 0:
            _step(weights.escapes[level], longest, rate * gradient)
        for order in range(longest):
            rank = workspace.ranks[i, order]
            if rank < WIDTH:
                _step(weights.ranks[level, longest, order, workspace.steadiness[order]], rank, rate * gradient)
        for source in range(SOURCES):
            if levels[source] == 0:
                continue
            node = workspace.nodes[i]
            chance: Real = trees.chances[node, source] if node >= 0 else 0.0
            if chance > 0.0:
                _step(weights.bias[source, levels[source]], chance_bin(chance), rate * gradient)
                _step(weights.trust[source], levels[source], _TRUST_RATE * gradient * math.log(chance))
            else:
                _step(weights.trust[source], levels[source], _TRUST_RATE * gradient * workspace.left[source])


@compiled
def _step(row: Float32Array, at: Integer, by: Real) -> None:
    row[at] = min(_GREATEST, max(-_GREATEST, row[at] + by))
