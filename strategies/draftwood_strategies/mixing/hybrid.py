"""The hybrid strategy: several strategies under one budget, as one tree.

Each part drafts on its own; their trees, and the successor table of `recycling`, are mixed node by node with learned
weights (see `candidates`). A part without a gain drafts in a probe now and then only, and a part that fails is left
out for the rest of its sequence.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

from draftwood_strategies.base import Drafter, Feedback, Readable, SourceCounts, Strategy, Successors, SuccessorSource
from draftwood_strategies.draft import DraftTree, checked
from draftwood_strategies.mixing.mixer import Mixer, SequenceMixer
from draftwood_strategies.mixing.weights import SOURCES, TABLE
from draftwood_strategies.native import Int32Array
from draftwood_strategies.options import Option, OptionValue, read_options
from draftwood_strategies.registry import create, options_of, register
from draftwood_strategies.successors import COLUMNS, WIDTH, has_layout

_LEAST_GAIN = 0.005
"""The probability that a source must add to the token that is written. Not tuned; jacobi, which gains 0.005 a node,
costs 100 us (docs/decisions.md)."""
_PROBE_EVERY, _PROBE_FOR = 256, 8
"""All sources take part in 8 of 256 drafts, the probe. Not tuned."""

_SOURCES = "trie,recycling"
_log = logging.getLogger(__name__)


@register("hybrid")
class HybridStrategy:
    """One tenant's instances of the parts, and the learned weights of their mixture.

    Args:
        sources: names of registered strategies, separated by commas; at most four besides the one with a successor
            table.
        options: the parts' own options, each given to every part that has it.

    Attributes:
        parts: the parts that draft trees, by name; their order is their numbers as sources.
        failures: how many sequences each part was dropped for.

    Raises:
        UnknownStrategyError: a source is not registered.
        TypeError: no part has an option.
        ValueError: the sources cannot be mixed, or an option's value is not allowed.
    """

    @staticmethod
    def options(given: Mapping[str, OptionValue]) -> dict[str, Option]:
        """Its own, and those of the sources that are `given`, by name."""
        own = read_options(HybridStrategy)
        sources = str(own["sources"].checked(given.get("sources", _SOURCES)))
        return {**own, **{name: option for source in _names(sources) for name, option in options_of(source).items()}}

    def __init__(self, *, sources: str = _SOURCES, **options: object) -> None:
        made = _parts_of(sources, options)
        tables = {name: part for name, part in made.items() if isinstance(part, SuccessorSource)}
        self.parts = {name: part for name, part in made.items() if name not in tables}
        if len(tables) > 1:
            raise ValueError(f"sources: {' and '.join(tables)} have a successor table each; one can be mixed")
        if len(self.parts) > SOURCES:
            raise ValueError(f"sources: {sources!r} names more than {SOURCES} strategies that draft trees")
        self.table_name = next(iter(tables), "")
        self.mixer = Mixer(_checked_table(self.table_name, tables[self.table_name]) if tables else None)
        self.top_k = max(int(part.top_k) for part in made.values())
        self.failures: Counter[str] = Counter()
        self._drafts = 0

    @property
    def tokens(self) -> int:
        """How many tokens the parts' memories hold."""
        return sum(int(getattr(part, "tokens", 0)) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the parts' memories, and of the weights."""
        return self.mixer.nbytes + sum(int(getattr(part, "nbytes", 0)) for part in self.parts.values())

    def sequences(self) -> Iterator[Int32Array]:
        """The sequences in the parts' memories, int32[n] each, the oldest first; `learn` takes them again."""
        for part in self.parts.values():
            if hasattr(part, "sequences"):
                yield from part.sequences()

    def learn(self, tokens: Int32Array) -> None:
        """Adds a whole recorded sequence, int32[n], to the memory of each part that has one."""
        for part in self.parts.values():
            if hasattr(part, "learn"):
                part.learn(tokens)

    def start(self, prompt: Int32Array) -> HybridDrafter:
        return HybridDrafter(self, prompt)

    def start_reading(self, prompt: Int32Array) -> HybridDrafter:
        """As `start`, without learning; a part that cannot draft so takes no part."""
        return HybridDrafter(self, prompt, learns=False)

    def sources_to_ask(self) -> list[bool]:
        """Whether each part takes part in the next draft, and last whether the table does. Called once a draft.

        A source takes part if its gain is worth its time, and all of them do in a probe. How many nodes are drafted,
        and in which steps, is the engine's decision. The source with the highest gain always takes part: of two that
        predict the same, neither gains anything over the other.
        """
        self._drafts += 1
        gains: list[float] = self.mixer.weights.gains.tolist()
        gains = [*gains[: len(self.parts)], gains[TABLE] if self.table_name else -math.inf]
        if self._drafts % _PROBE_EVERY < _PROBE_FOR:
            return [*[True] * len(self.parts), bool(self.table_name)]
        least = min(_LEAST_GAIN, max(gains))
        return [gain >= least and gain > -math.inf for gain in gains]


def _names(sources: str) -> list[str]:
    names = [name.strip() for name in sources.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"sources: {sources!r} names a strategy twice")
    if "hybrid" in names:
        raise ValueError(f"sources: {sources!r} names hybrid, which cannot be a source of itself")
    return names


def _parts_of(sources: str, options: dict[str, object]) -> dict[str, Strategy]:
    """The strategies that `sources` names, each made with the options that it has."""
    names = _names(sources)
    known = {name: options_of(name) for name in names}
    unknown = set(options).difference(*known.values())
    if unknown:
        raise TypeError(f"none of the sources {', '.join(names)} has an option {min(unknown)!r}")
    return {name: create(name, **{k: v for k, v in options.items() if k in known[name]}) for name in names}


def _checked_table(name: str, part: Strategy) -> Successors:
    """The successor table of a part; compiled code relies on its layout."""
    if part.top_k < WIDTH:
        raise ValueError(f"sources: {name!r} has a successor table, so its top_k must be at least {WIDTH}")
    table = cast(SuccessorSource, part).successors
    if not has_layout(table.rows):
        found = f"{table.rows.dtype}{list(table.rows.shape)}"
        raise ValueError(f"sources: the rows of {name!r} must be int32[2^k, {COLUMNS}], k at least 2, not {found}")
    return table


class HybridDrafter:
    """Drafts for one sequence; a `Composite`."""

    def __init__(self, strategy: HybridStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self._sequence = SequenceMixer(strategy.mixer, prompt, learns)
        self._names = [*strategy.parts]
        self._vocab_size: int | None = None
        self._drafters: dict[str, Drafter] = {}
        self._seconds = dict.fromkeys(self._names, 0.0)
        for name, part in strategy.parts.items():
            try:
                if learns:
                    self._drafters[name] = part.start(prompt)
                elif isinstance(part, Readable):
                    self._drafters[name] = part.start_reading(prompt)
            except Exception as error:
                self._drop(name, "start", error)

    @property
    def by_source(self) -> dict[str, SourceCounts]:
        """By the name of each node's dominant source; parts without nodes are left out."""
        columns = self._sequence.counts.T.tolist()
        numbers = [*enumerate(self._names), (TABLE, self._strategy.table_name)]
        return {name: SourceCounts(*columns[number]) for number, name in numbers if columns[number][0]}

    def limit_tokens(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def drop_slowest(self) -> str:
        if not self._drafters:
            return ""
        name = max(self._drafters, key=self._seconds.__getitem__)
        self._strategy.failures[name] += 1
        _log.error("source %r is dropped for one sequence: it took %.3f s", name, self._seconds[name])
        self._close(name)
        return name

    def propose(self, budget: int) -> DraftTree:
        *takes_part, with_table = self._strategy.sources_to_ask()
        trees = [self._tree(n, budget) if part else None for n, part in zip(self._names, takes_part, strict=True)]
        return self._sequence.draft(trees, with_table, budget)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._sequence.observe(accepted, feedback)
        for name, drafter in [*self._drafters.items()]:
            started = time.perf_counter()
            try:
                drafter.observe(accepted, _feedback_for(self._strategy.parts[name], feedback))
            except Exception as error:
                self._drop(name, "observe", error)
            self._seconds[name] += time.perf_counter() - started

    def close(self) -> None:
        for name in [*self._drafters]:
            self._close(name)

    def _tree(self, name: str, budget: int) -> DraftTree | None:
        """A part's checked tree; None from a part that was dropped."""
        if name not in self._drafters:
            return None
        started = time.perf_counter()
        try:
            tree = checked(self._drafters[name].propose(budget), budget, self._vocab_size)
        except Exception as error:
            self._drop(name, "propose", error)
            return None
        self._seconds[name] += time.perf_counter() - started
        return tree

    def _drop(self, name: str, call: str, error: Exception) -> None:
        self._strategy.failures[name] += 1
        _log.error("source %r is dropped for one sequence: %s raised %r", name, call, error, exc_info=error)
        if call != "close":
            self._close(name)

    def _close(self, name: str) -> None:
        drafter = self._drafters.pop(name, None)
        if drafter is not None:
            try:
                drafter.close()
            except Exception as error:
                self._drop(name, "close", error)


def _feedback_for(part: Strategy, feedback: Feedback | None) -> Feedback | None:
    """The feedback with `part.top_k` of the model's most probable tokens."""
    if feedback is None or feedback.top_tokens is None or feedback.top_tokens.shape[1] == part.top_k:
        return feedback
    top_tokens = feedback.top_tokens[:, : part.top_k] if part.top_k else None
    return Feedback(feedback.tokens, feedback.parents, feedback.predictions, top_tokens)
