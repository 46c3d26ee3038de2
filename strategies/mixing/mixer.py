"""One tree out of several sources: what tree-shaped sources advise and what the successor table holds, mixed at every
node, the most probable nodes first.

Sources are not laid side by side: a node that a tree advises is continued from the table where the tree has nothing
more to say, and the other way round. Knows token ids only; nothing of tenants and strategies.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from strategies.base import Feedback
from strategies.draft import DraftTree, Float32Array, Int32Array
from strategies.mixing.advice import Advice, advice_for, overlay
from strategies.mixing.calibration import (
    ADVISED,
    SOURCES,
    TABLE,
    TOKEN,
    Float32Table,
    Float64Array,
    Float64Table,
    Weights,
    correct,
    prior_weights,
    to_probabilities,
)
from strategies.mixing.credit import credit
from strategies.mixing.gains import most_outspoken, record_gains
from strategies.mixing.successors import COLUMNS, NOWHERE, ORDERS, WIDTH, SuccessorTable, read_context
from strategies.mixing.weighing import NOT_ADVISED, Room, room_for, weigh
from strategies.native import Integer, Real, compiled

_ITEM_TOKEN, _ITEM_PARENT, _ITEM_ADVISED, _ITEM_SOURCE = range(4)
_NO_ROWS = np.empty((0, COLUMNS), np.int32)
_NO_SOURCES = np.empty(0, np.int32)
_NO_NODES = np.empty(0, np.int32)
_NO_TOP_TOKENS = np.empty((0, WIDTH), np.int32)


class Mixer:
    """What a tenant's sequences share: the weights of the sources, and the successor table if it is one of them."""

    def __init__(self, table: SuccessorTable | None) -> None:
        self.table = table
        self.weights: Weights = prior_weights()
        self._budget = 0
        self._room: Room | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of table and weights; live sequences' own and room to draft in are not counted."""
        return sum(weights.nbytes for weights in self.weights) + (self.table.nbytes if self.table else 0)

    def room(self, budget: int) -> Room:
        """Room for drafts of up to `budget` nodes."""
        if self._room is None or budget > self._budget:
            self._budget = max(budget, 64)
            self._room = room_for(self._budget)
        return self._room


class SequenceMixer:
    """One live sequence's end, and the advice of its latest draft.

    Attributes:
        counts: int64[2, SOURCES + 1], how many nodes of each source, the table last, were verified and accepted.
    """

    def __init__(self, mixer: Mixer, prompt: Int32Array) -> None:
        self._mixer = mixer
        self.counts = np.zeros((2, SOURCES + 1), np.int64)
        tail = prompt[-ORDERS:]
        self._tail = np.full(ORDERS, NOWHERE, np.int32)
        self._tail[ORDERS - tail.shape[0] :] = tail
        self._tree: DraftTree | None = None
        self._sources = _NO_SOURCES
        self._advice = advice_for(64)
        self._place = np.empty(64, np.int32)
        self._awake = np.zeros(SOURCES + 1, np.int32)

    def draft(self, trees: SequenceOf[DraftTree | None], with_table: bool, budget: int) -> DraftTree:
        """A tree of at most `budget` nodes.

        Args:
            trees: what each tree-shaped source proposes, lawful and in the order of their numbers, at most `SOURCES`;
                None for one that is not asked.
            with_table: the successor table takes part.
        """
        self._overlay(trees)
        table = self._mixer.table if with_table else None
        self._awake[TABLE] = table is not None
        tokens, parents, sources = np.empty((3, budget), np.int32)
        scores = np.empty(budget, np.float32)
        room: tuple[Any, ...] = self._mixer.room(budget)
        arguments: tuple[Any, ...] = (
            *self._advice, *self._mixer.weights, *room, _NO_ROWS if table is None else table.rows, self._tail,
            tokens, parents, scores, sources,
        )  # fmt: skip
        n = draft(*arguments)
        tree = DraftTree(tokens[:n], parents[:n], scores[:n])
        self._tree, self._sources = tree, sources[:n]
        return tree

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        """Learns from what came true and from what the model said, and moves on."""
        table = self._mixer.table
        room = self._mixer.room(1)
        if self._tree is not None:
            self._credit(self._tree, accepted, feedback, room.items)
            rows = table.rows if table is not None and self._awake[TABLE] else _NO_ROWS
            arguments: tuple[Any, ...] = (
                *self._advice, *self._mixer.weights, *room, rows, self._tail, accepted, self._awake,
            )  # fmt: skip
            learn(*arguments)
        if table is not None:
            if feedback is None or feedback.top_tokens is None:
                table.note(self._tail, _NO_NODES, _NO_NODES, _NO_TOP_TOKENS)
            else:
                table.note(self._tail, feedback.tokens, feedback.parents, feedback.top_tokens)
        self._tree = None
        written = accepted[-ORDERS:]
        self._tail[: ORDERS - written.shape[0]] = self._tail[written.shape[0] :]
        self._tail[ORDERS - written.shape[0] :] = written

    def _credit(self, tree: DraftTree, accepted: Int32Array, feedback: Feedback | None, room: Int32Array) -> None:
        if feedback is not None:
            verified, parents = feedback.tokens, feedback.parents
        else:  # all of it
            verified, parents = np.append(self._tail[-1:], tree.tokens), np.append(np.int32(-1), tree.parents + 1)
        credit(tree.tokens, tree.parents, self._sources, verified, parents, accepted, room, self.counts)

    def _overlay(self, trees: SequenceOf[DraftTree | None]) -> None:
        nodes = sum(len(tree) for tree in trees if tree is not None)
        if nodes > self._place.shape[0]:
            self._advice, self._place = advice_for(nodes), np.empty(nodes, np.int32)
        self._advice.first[0] = -1
        size = 0
        for source, tree in enumerate(trees):
            self._awake[source] = tree is not None
            if tree is not None:
                arguments: tuple[Any, ...] = (
                    *self._advice, size, source, tree.tokens, tree.parents, tree.scores, self._place,
                )  # fmt: skip
                size = overlay(*arguments)


@compiled
def draft(
    advised: Int32Array,
    following: Int32Array,
    first: Int32Array,
    chances: Float32Table,
    ranks: Float32Table,
    escapes: Float32Table,
    trust: Float32Table,
    bias: Float32Table,
    gains: Float32Array,
    seen: Float32Table,
    candidates: Int32Array,
    said: Float64Table,
    probabilities: Float64Array,
    context: Int32Array,
    found: Int32Array,
    steadiness: Int32Array,
    levels: Int32Array,
    left: Float64Array,
    items: Int32Array,
    item_scores: Float64Array,
    waiting: Int32Array,
    rows: Int32Array,
    tail: Int32Array,
    tokens: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    sources: Int32Array,
) -> int:
    """Drafts at most `tokens.shape[0]` nodes; returns how many.

    Args:
        advised to waiting: an `Advice`, `Weights` and a `Room`, laid out flat.
        rows: int32[r, COLUMNS], the successor table.
        tail: int32[ORDERS], the last tokens of the sequence, the newest last.
        tokens, parents, scores: [budget], set to the tree.
        sources: int32[budget], set to the source that speaks most for each node.
    """
    advice = Advice(advised, following, first, chances)
    weights = Weights(ranks, escapes, trust, bias, gains, seen)
    room = Room(candidates, said, probabilities, context, found, steadiness, levels, left, items, item_scores, waiting)
    budget = int(tokens.shape[0])
    made, end = 0, 0
    parent = -1
    place: Integer = -1
    score: Real = 1.0
    for drafted in range(budget):
        begin, wanted = drafted, budget - drafted
        if end - begin < wanted or score > item_scores[waiting[end - 1]]:
            read_context(tail, tokens, parents, parent, 0, context)
            n, _, _ = weigh(advice, weights, room, rows, place)
            to_probabilities(said, n, probabilities)
            for i in range(1, n):
                made, end = _offer(advice, room, i, parent, score * probabilities[i], wanted, made, begin, end)
        if begin == end:
            return drafted
        best = waiting[begin]
        tokens[drafted] = items[best, _ITEM_TOKEN]
        parents[drafted] = items[best, _ITEM_PARENT]
        sources[drafted] = items[best, _ITEM_SOURCE]
        score = item_scores[best]
        scores[drafted] = score
        parent, place = drafted, items[best, _ITEM_ADVISED]
    return budget


@compiled
def _offer(
    advice: Advice, room: Room, i: int, parent: int, score: Real, wanted: int, made: int, begin: int, end: int
) -> tuple[int, int]:
    """Puts candidate i into the frontier if it is among the `wanted` best; returns the new `made` and `end`."""
    items, scores, waiting = room.items, room.item_scores, room.waiting
    if end - begin == wanted:
        if score <= scores[waiting[end - 1]]:
            return made, end
        end -= 1
    if made == items.shape[0]:
        return made, end
    items[made, _ITEM_TOKEN] = room.candidates[i, TOKEN]
    items[made, _ITEM_PARENT] = parent
    items[made, _ITEM_ADVISED] = room.candidates[i, ADVISED] if room.candidates[i, ADVISED] >= 0 else NOT_ADVISED
    items[made, _ITEM_SOURCE] = most_outspoken(advice, room, i)
    scores[made] = score
    at = end
    while at > begin and scores[waiting[at - 1]] < score:
        waiting[at] = waiting[at - 1]
        at -= 1
    waiting[at] = made
    return made + 1, end + 1


@compiled
def learn(
    advised: Int32Array,
    following: Int32Array,
    first: Int32Array,
    chances: Float32Table,
    ranks: Float32Table,
    escapes: Float32Table,
    trust: Float32Table,
    bias: Float32Table,
    gains: Float32Array,
    seen: Float32Table,
    candidates: Int32Array,
    said: Float64Table,
    probabilities: Float64Array,
    context: Int32Array,
    found: Int32Array,
    steadiness: Int32Array,
    levels: Int32Array,
    left: Float64Array,
    items: Int32Array,
    item_scores: Float64Array,
    waiting: Int32Array,
    rows: Int32Array,
    tail: Int32Array,
    accepted: Int32Array,
    awake: Int32Array,
) -> None:
    """One gradient step for each accepted token, and what each source gained there.

    Args:
        advised to tail: as in `draft`, of the latest draft.
        awake: int32[SOURCES + 1], 1 for each source that took part in it.
    """
    advice = Advice(advised, following, first, chances)
    weights = Weights(ranks, escapes, trust, bias, gains, seen)
    room = Room(candidates, said, probabilities, context, found, steadiness, levels, left, items, item_scores, waiting)
    place: Integer = -1
    for depth in range(accepted.shape[0]):
        for order in range(ORDERS):
            context[order] = accepted[depth - 1 - order] if order < depth else tail[ORDERS - 1 - order + depth]
        n, longest, level = weigh(advice, weights, room, rows, place)
        came = n - 1
        while came > 0 and candidates[came, TOKEN] != accepted[depth]:
            came -= 1
        to_probabilities(said, n, probabilities)
        record_gains(advice, weights, room, n, came, longest, level, awake)
        correct(weights, candidates, probabilities, n, came, longest, level, levels, steadiness, chances, left)
        place = candidates[came, ADVISED] if came > 0 and candidates[came, ADVISED] >= 0 else NOT_ADVISED
