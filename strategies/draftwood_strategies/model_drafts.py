"""Drafts that a model makes: a smaller one of the same vocabulary, or a head on the hidden states of the target model.

The host of the drafters computes them, level by level of the draft tree, each level in a pass that costs a share of a
step of the target. So a strategy decides how many levels pay. It counts how often a level was right, for contexts in
which the drafts of other sources promise as much, and how often these were right as well. Each verified text counts, as
in HedgeSpec (arXiv 2510.20064): also where the model was not asked, its prediction of the next token is known as soon
as it reads on. So nothing is tried at a request's expense.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple, Protocol

import numpy as np

from draftwood_strategies.arrays import Float32Array, Float64Array, Int32Array
from draftwood_strategies.base import Feedback, ModelAsk, Proposing, StepFeedback
from draftwood_strategies.built_in import ModelDraftOptions
from draftwood_strategies.dispatch import run_together
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.native import compiled

MOST_LEVELS = 16
_BIN_STARTS = np.array([0.1, 0.3, 0.6, 1.0, 1.7, 3.0, 6.0])
"""Accepted tokens that other sources promise: where the second bin begins, the third, and so on."""
_BINS = _BIN_STARTS.size + 1
_WINDOW = 200.0
"""Observations that a mean is taken over, about: more would follow a tenant's text too slowly. Not tuned."""
_RIGHT, _PRIOR = 0.5, 4.0
"""How often a level is right before anything is known, and how many observations that counts as."""
_DOUBT = 16.0
"""Observations that `_RIGHT` counts as besides, where it is decided whether a model reads. Not tuned."""
_LEAST_GAIN = 0.03
"""Of tokens a second, from which on a model reads what is written, which takes a share of each step. Not tuned."""
_ALSO_RIGHT = np.array([0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.8, 0.9])
"""How often others are right as well where the model is, before anything is known, by what they promise."""


class ModelSource(Protocol):
    """A model of the host that drafts for its rows."""

    def level_share(self, rows: int | None = None) -> float:
        """What a level costs in a step whose drafts have one level more, as a share of the step; 0 while unknown.

        Args:
            rows: that share the step; None for as many as share the one that is drafted for.
        """

    def reads(self, row: Any) -> bool:
        """Whether it reads what the row writes, so that it can draft for it."""

    def draft(self, rows: SequenceOf[Any], budgets: Int32Array, levels: Int32Array, least: Float32Array) -> DraftTrees:
        """A draft tree for each row.

        Args:
            budgets: int32[s], the most nodes of each.
            levels: int32[s], how deep each is at most; 0 for no draft.
            least: float32[s], a level is left out if the nodes that it would follow are accepted less often, together.
        """

    def position(self, row: Any) -> int:
        """Of the next token that the row writes."""

    def agreed(self, row: Any) -> tuple[int, list[bool]]:
        """What the model has read since the last call: the position of its first token, and for each of its tokens
        whether it was among the model's most probable ones, as many as follow a node of a draft."""


class ModelStrategy:
    """One tenant's drafts by a model; a `BatchStrategy` whose drafters are told their rows (`DraftsForRow`).

    Args:
        source: the host's model.
        options: those of `ModelDraftOptions`, by name.

    Attributes:
        models: the sources, see `AsksModels`.

    Raises:
        ValueError: an option's value is not allowed.
    """

    top_k = 0

    def __init__(self, source: ModelSource, **options: Any) -> None:
        self.options = ModelDraftOptions(**options)
        self.models = [source]
        self.gains = LevelGains(self.options.depth)
        self._source = source

    def keep_learned(self, earlier: ModelStrategy) -> None:
        self.gains = earlier.gains

    def start(self, prompt: Int32Array) -> ModelDrafter:
        return ModelDrafter(self)

    def start_read_only(self, prompt: Int32Array) -> ModelDrafter:
        return ModelDrafter(self, learns=False)

    def propose_all(self, drafters: SequenceOf[ModelDrafter], budgets: Int32Array) -> DraftTrees:
        return run_together([self.propose_asking(drafters, budgets)])[0]

    def propose_asking(self, drafters: SequenceOf[ModelDrafter], budgets: Int32Array) -> Proposing:
        return self.propose_beside(drafters, budgets, DraftTrees.empty(len(drafters)))

    def propose_beside(self, drafters: SequenceOf[ModelDrafter], budgets: Int32Array, others: DraftTrees) -> Proposing:
        """As `propose_asking`, beside drafts that other sources made at no cost: no deeper than pays.

        Args:
            others: a draft for each drafter.
        """
        # Without a row, as in a warm-up of strategies, there is no host.
        asking = [i for i, one in enumerate(drafters) if one.row is not None]
        promised = promises(others)
        bins = np.searchsorted(_BIN_STARTS, promised, side="right")
        for i in asking:
            if drafters[i].learns:
                self.gains.count(int(bins[i]))
        reading = [i for i in asking if self._source.reads(drafters[i].row)]
        if not reading:
            return DraftTrees.empty(len(drafters))
        bins, promised = bins[reading], promised[reading]
        levels, least = self.gains.worthwhile(bins, promised, self._source.level_share())
        rows = [drafters[i].row for i in reading]
        trees = (yield ModelAsk(self._source, rows, budgets[reading], levels, least)).trees
        for place, i in enumerate(reading):
            drafter = drafters[i]
            drafter.latest = Latest(
                self._source.position(drafter.row), int(bins[place]), int(levels[place]), others[i], trees[place]
            )
            drafter.learn_unasked(*self._source.agreed(drafter.row))
        return DraftTrees.scattered([(reading, trees)], len(drafters))

    def models_for(self, rows: int) -> list[ModelSource]:
        """See `AsksModels`."""
        share = self._source.level_share(rows)
        return self.models if self.gains.gain(share) >= _LEAST_GAIN else []

    def observe_all(
        self,
        drafters: SequenceOf[ModelDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        bounds = offsets.tolist()
        for i, drafter in enumerate(drafters):
            drafter.observe(accepted[bounds[i] : bounds[i + 1]], None)


class Latest(NamedTuple):
    """The latest draft of a sequence.

    Attributes:
        position: of its first token.
        bin: of what others promised.
        levels: that the model was asked for.
        others, own: the drafts of other sources and of the model.
    """

    position: int
    bin: int
    levels: int
    others: DraftTree
    own: DraftTree


class ModelDrafter:
    """Drafts for one sequence.

    Attributes:
        learns: whether its drafts count.
        row: of the host, see `follow_row`.
        latest: None before the first draft, and once it has learned what came of one.
    """

    def __init__(self, strategy: ModelStrategy, learns: bool = True) -> None:
        self._strategy = strategy
        self.learns = learns
        self._unasked: dict[int, tuple[int, int]] = {}
        self.row: Any = None
        self.latest: Latest | None = None

    def follow_row(self, row: Any) -> None:
        self.row = row

    def propose(self, budget: int) -> DraftTree:
        return self._strategy.propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        latest, self.latest = self.latest, None
        if latest is None or not self.learns:
            return
        others = right_levels(latest.others.tokens, latest.others.parents, accepted)
        if latest.levels:
            # What the host did not verify gained nothing, were it right or not.
            own = min(right_levels(latest.own.tokens, latest.own.parents, accepted), accepted.shape[0] - 1)
            self._strategy.gains.learn(latest.bin, latest.levels, others, own)
        else:
            self._unasked[latest.position] = latest.bin, others

    def learn_unasked(self, first: int, agreed: list[bool]) -> None:
        """What is known by now of texts before which the model was not asked, see `ModelSource.agreed`."""
        for position in [position for position in self._unasked if position < first + len(agreed)]:
            of_bin, others = self._unasked.pop(position)
            if position >= first:
                self._strategy.gains.learn_unasked(of_bin, others, agreed[position - first])

    def close(self) -> None:
        """The tenant's counts keep what was learned."""


class LevelGains:
    """How often the levels of a tenant's drafts were right, by what other sources promised.

    Args:
        depth: levels at most.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        shape = (_BINS, depth)
        self._right, self._right_seen = np.full(shape, _RIGHT), np.full(shape, _PRIOR)
        self._also, self._also_seen = np.tile(_ALSO_RIGHT[:, None], depth), np.full(shape, _PRIOR)
        self._drafts = np.eye(1, _BINS)[0]

    @property
    def gained(self) -> Float64Array:
        """float64[bin, depth + 1], the accepted tokens that so many levels add to those of others."""
        return self._gained(self._right)

    def _gained(self, right: Float64Array) -> Float64Array:
        added = np.cumprod(right, axis=1) * (1.0 - self._also)
        return np.concatenate([np.zeros((_BINS, 1)), np.cumsum(added, axis=1)], axis=1)

    def worthwhile(self, bins: Any, promised: Float32Array, share: float) -> tuple[Int32Array, Float32Array]:
        """int32[s], the levels that write the most tokens in the time that they take, and float32[s], the probability
        from which on one more does; both by the sequence.

        Args:
            bins: int[s], of what others promise.
            promised: float32[s], tokens that these promise.
            share: that a level takes, of the time of a step.
        """
        rates = self._rates(self.gained[bins], promised, share)
        return rates.argmax(axis=1).astype(np.int32), (share * rates.max(axis=1)).astype(np.float32)

    def gain(self, share: float) -> float:
        """How many more tokens a second the latest drafts would have brought with the best number of levels each, as a
        share of what they bring without, if a level takes this share of a step.

        As much of the text as before is written where others promise little. What was seen a few times counts little:
        a model that rests learns nothing, so it must not rest for a few tokens that were wrong.
        """
        promised = np.append(np.float32(0.0), _BIN_STARTS.astype(np.float32))
        likely = (self._right * self._right_seen + _RIGHT * _DOUBT) / (self._right_seen + _DOUBT)
        slower = (1.0 + promised) / self._rates(self._gained(likely), promised, share).max(axis=1)
        return float(self._drafts.sum() / (self._drafts @ slower)) - 1.0

    def _rates(self, gained: Float64Array, promised: Float32Array, share: float) -> Float64Array:
        """float64[s, depth + 1], tokens that so many levels write in the time of a step."""
        return (1.0 + promised[:, None] + gained) / (1.0 + share * np.arange(self._depth + 1))

    def count(self, bin: int) -> None:
        """Counts a draft, beside others that promised as much."""
        self._drafts *= 1.0 - 1.0 / _WINDOW
        self._drafts[bin] += 1.0

    def learn(self, bin: int, levels: int, others: int, own: int) -> None:
        """Counts a verified draft.

        Args:
            bin: of what others promised.
            levels: that the model was asked for.
            others, own: how many levels of the drafts of others and of the model were right.
        """
        for level in range(min(own + 1, levels)):
            self._add(self._right, self._right_seen, bin, level, own > level)
        for level in range(own):
            self._add(self._also, self._also_seen, bin, level, others > level)

    def learn_unasked(self, bin: int, others: int, agreed: bool) -> None:
        """Counts a text before which the model was not asked: whether its first token was the model's."""
        self._add(self._right, self._right_seen, bin, 0, agreed)
        if agreed:
            self._add(self._also, self._also_seen, bin, 0, others > 0)

    def _add(self, means: Float64Array, seen: Float64Array, bin: int, level: int, value: bool) -> None:
        seen[bin, level] = min(seen[bin, level] + 1.0, _WINDOW)
        means[bin, level] += (value - means[bin, level]) / seen[bin, level]


def promises(trees: DraftTrees) -> Float32Array:
    """float32[s], the accepted tokens that trees promise: of each, the sum of the scores of its nodes, which is what is
    accepted on average where siblings' scores are probabilities."""
    return np.add.reduceat(np.append(trees.scores, np.float32(0.0)), trees.offsets[:-1]) * (
        trees.offsets[1:] > trees.offsets[:-1]
    )


@compiled
def right_levels(tokens: Int32Array, parents: Int32Array, written: Int32Array) -> int:
    """How many of the tokens that were written, int32[n], are a path of a tree from its root on."""
    at, depth = -1, 0
    for node in range(tokens.shape[0]):
        if depth < written.shape[0] and parents[node] == at and tokens[node] == written[depth]:
            at, depth = node, depth + 1
    return depth
