"""Online learning of a mixture: after a step, from what its drafts were and what the model wrote."""

from __future__ import annotations

import math
from typing import NamedTuple

from draftwood_strategies.arrays import Float32Array, Int32Array, Int64Array, Integer, Real
from draftwood_strategies.mixing.candidates import (
    OUTSIDE,
    SOURCES,
    Mixing,
    MixingWorkspace,
    Weights,
    chance_bin,
    collect,
    to_probabilities,
)
from draftwood_strategies.mixing.drafting import UNKNOWN, MixedDraft, SequenceArrays
from draftwood_strategies.native import arrays_at, compiled
from draftwood_strategies.successors import ORDERS, WIDTH, TableArrays, update_table, wants_growth
from draftwood_strategies.tree_index import NO_NODE

VERIFIED, ACCEPTED = range(2)
"""Rows of the counts, int64[2, SOURCES + 1]: a column for each source, the table last."""
_RATE, _TRUST_RATE = 0.03, 0.003
"""Steps of all weights but `Weights.trust`, and of this one, since its inputs are up to ten times as large. The
prior was fitted with them."""
_FIRST_RATE, _FIRST_TOKENS = 5.0, 40.0
"""The first tokens count five times, half of what is more after 40: weights that were fitted to other text adapt to a
tenant's soon. On random text scores added up to 2.1 times what was accepted instead of 3.1, elsewhere acceptance
lengths changed by -2.8 to +2.4% (docs/decisions/hybrid.md)."""
_GREATEST = 8.0
"""Bounds every weight; a logit of 8 is a probability of 0.9997."""


class Verified(NamedTuple):
    """What a step wrote and verified, as in `BatchStrategy.observe_all`.

    Attributes:
        has_feedback: there is feedback; else the whole draft was verified, and the other arrays are empty.
        has_top_tokens: there are `top_tokens`, int32[m, k >= WIDTH].
    """

    accepted: Int32Array
    accepted_offsets: Int32Array
    has_feedback: bool
    has_top_tokens: bool
    tokens: Int32Array
    parents: Int32Array
    top_tokens: Int32Array
    offsets: Int32Array


@compiled
def learn_all(
    sequences: Int64Array,
    first: int,
    accepted: Int32Array,
    accepted_offsets: Int32Array,
    has_feedback: bool,
    has_top_tokens: bool,
    verified_tokens: Int32Array,
    verified_parents: Int32Array,
    top_tokens: Int32Array,
    verified_offsets: Int32Array,
    table_address: Integer,
    model_table: Int32Array,
    updates_table: bool,
    workspace_address: Integer,
) -> int:
    """Learns from the latest drafts, from the sequence `first` on, and moves the sequences on.

    Args:
        sequences: as in `draft_all`, with space for `top_tokens`.
        accepted to verified_offsets: as in `Verified`.
        table_address, workspace_address: of `TableArrays` and `MixingWorkspace`.
        model_table: int32[r, COLUMNS], the model's successor table, from which nothing is changed.
        updates_table: the table is that of the tenant, and learns here, too.

    Returns:
        The sequence to go on with after the table has grown; s after the last one.
    """
    table = arrays_at(TableArrays, table_address)
    workspace = arrays_at(MixingWorkspace, workspace_address)
    for s in range(first, sequences.shape[0]):
        sequence = arrays_at(SequenceArrays, sequences[s])
        written = accepted[accepted_offsets[s] : accepted_offsets[s + 1]]
        begin, end = verified_offsets[s], verified_offsets[s + 1]
        tokens, parents = verified_tokens[begin:end], verified_parents[begin:end]
        drafted = sequence.state[0].drafted
        if drafted >= 0:
            attribute(
                sequence.draft, drafted, has_feedback, tokens, parents, written, workspace.located, sequence.counts
            )
            weights = arrays_at(Weights, sequence.state[0].weights)
            learn(Mixing(sequence.trees, weights, workspace, table.rows, model_table, sequence.tail), written)
        tops = top_tokens[begin:end] if has_top_tokens else top_tokens[:0]
        _keep_top_tokens(sequence, tops)
        if updates_table and sequence.state[0].learns:
            update_table(table, sequence.tail, tokens[: tops.shape[0]], parents, tops)
        _move_on(sequence.tail, written)
        if updates_table and wants_growth(table):
            return s + 1
    return int(sequences.shape[0])


@compiled
def _keep_top_tokens(sequence: SequenceArrays, top_tokens: Int32Array) -> None:
    """The latest draft is done with; its `top_tokens`, if there are any, fill unused nodes of the next one."""
    n = top_tokens.shape[0]
    sequence.state[0].drafted = UNKNOWN
    sequence.state[0].tops = n
    for node in range(n):
        for rank in range(WIDTH):
            sequence.top[node, rank] = top_tokens[node, rank]


@compiled
def _move_on(tail: Int32Array, written: Int32Array) -> None:
    """The sequence ends with these tokens now."""
    n = min(ORDERS, written.shape[0])
    for i in range(ORDERS - n):
        tail[i] = tail[i + n]
    for i in range(n):
        tail[ORDERS - n + i] = written[written.shape[0] - n + i]


@compiled
def learn(mixing: Mixing, accepted: Int32Array) -> None:
    """One gradient step for each token that a step wrote, int32[a], at the nodes of the latest draft.

    The gradient is that of the logarithm of the probability that the mixture gave to the token, as for the mixers of
    PAQ compressors.
    """
    workspace = mixing.workspace
    context, tail = workspace.context, mixing.tail
    node: Integer = NO_NODE
    for depth in range(accepted.shape[0]):
        for order in range(ORDERS):
            context[order] = accepted[depth - 1 - order] if order < depth else tail[ORDERS - 1 - order + depth]
        n, longest, level = collect(mixing, node)
        target = n - 1
        while target > 0 and workspace.tokens[target] != accepted[depth]:
            target -= 1
        to_probabilities(workspace.logits, n, workspace.probabilities)
        _correct(mixing, n, target, longest, level)
        node = workspace.nodes[target] if target > 0 and workspace.nodes[target] >= 0 else OUTSIDE


@compiled
def _correct(mixing: Mixing, n: int, target: int, longest: int, level: int) -> None:
    """One gradient step at a node where candidate `target` was written, 0 where no source had the token.

    Args:
        n, longest, level: what `candidates.collect` returned for the node.
    """
    trees, weights, workspace = mixing.trees, mixing.weights, mixing.workspace
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


@compiled
def attribute(
    drafted: MixedDraft,
    nodes: int,
    has_feedback: bool,
    verified: Int32Array,
    verified_parents: Int32Array,
    accepted: Int32Array,
    located: Int32Array,
    counts: Int64Array,
) -> None:
    """Adds a step to the counts. A node counts for its dominant source when it was drafted.

    What was verified may be less than what was drafted, since the engine prunes, and more, where a grammar forces
    tokens.

    Args:
        nodes: of the draft.
        has_feedback: `verified` and `verified_parents`, int32[m], are the tree that was verified, as in `Feedback`;
            else it was the whole draft.
        accepted: int32[a], the tokens that the step wrote.
        located: int32[nodes or more], workspace.
        counts: int64[2, SOURCES + 1].
    """
    at, depth, latest = NO_NODE, 0, 0
    for node in range(nodes):
        parent, token = drafted.parents[node], drafted.tokens[node]
        if has_feedback:
            located[node] = NO_NODE
            above: Integer = located[parent] if parent >= 0 else 0
            if above >= 0:
                located[node] = _find(verified, verified_parents, token, above, latest)
            if located[node] < 0:
                continue
            latest = located[node]
        counts[VERIFIED, drafted.sources[node]] += 1
        if parent == at and depth < accepted.shape[0] and token == accepted[depth]:
            at, depth = node, depth + 1
            counts[ACCEPTED, drafted.sources[node]] += 1


@compiled
def _find(verified: Int32Array, parents: Int32Array, token: Integer, parent: Integer, first: Integer) -> int:
    """The verified node with this token and parent; looked for from `first` on, since the engine keeps the order."""
    n = verified.shape[0]
    for step in range(n):
        node = (first + step) % n
        if verified[node] == token and parents[node] == parent:
            return int(node)
    return NO_NODE
