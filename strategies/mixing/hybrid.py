"""The hybrid strategy: several strategies under one budget, as one tree.

Each part drafts on its own; their trees, and the successor table of `recycling`, are mixed node by node with learned
weights (see `calibration`). So a part's nodes are drafted as far as they come true, a part that brings nothing is not
asked any more, but for a probe now and then, and a part that fails is left out for the rest of its sequence.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from strategies.base import Drafter, Feedback, SourceCounts, Strategy
from strategies.draft import DraftTree, Int32Array, checked
from strategies.mixing.calibration import SOURCES, TABLE
from strategies.mixing.mixer import Mixer, SequenceMixer
from strategies.mixing.recycling import RecyclingStrategy
from strategies.registry import create, options_of, register

_LEAST_GAIN = 0.005
_PROBE_EVERY, _PROBE_FOR = 256, 8

_log = logging.getLogger(__name__)


@register("hybrid")
class HybridStrategy:
    """One tenant's instances of the parts, and what their words proved to be worth.

    Args:
        sources: names of registered strategies, separated by commas; at most four besides "recycling".
        options: the parts' own options, each given to every part that knows it.

    Attributes:
        parts: the parts that draft trees, by name; their order is their numbers as sources.
        recycling: the part whose successor table is mixed in at every node; None where it is no source.
        failures: how many sequences each part was dropped for.

    Raises:
        UnknownStrategyError: a source is not registered.
        TypeError: no part knows an option.
        ValueError: the sources, or an option's value, are not allowed.
    """

    def __init__(self, *, sources: str = "trie,recycling", **options: object) -> None:
        names = [name.strip() for name in sources.split(",")]
        if len(set(names)) < len(names) or "hybrid" in names or len({*names} - {"recycling"}) > SOURCES:
            raise ValueError(
                f"sources: {sources!r} is not allowed; it must be names of strategies other than hybrid, each once, at"
                f" most {SOURCES} besides recycling"
            )
        known = {name: options_of(name) for name in names}
        unknown = set(options).difference(*known.values())
        if unknown:
            raise TypeError(f"none of the sources {', '.join(names)} has an option {min(unknown)!r}")
        made = {name: create(name, **{k: v for k, v in options.items() if k in known[name]}) for name in names}
        self.parts = {name: part for name, part in made.items() if not isinstance(part, RecyclingStrategy)}
        self.recycling = next((part for part in made.values() if isinstance(part, RecyclingStrategy)), None)
        self.mixer = Mixer(self.recycling.table if self.recycling else None)
        self.top_k = max(int(part.top_k) for part in made.values())
        self.failures: Counter[str] = Counter()
        self._turn = 0

    @property
    def tokens(self) -> int:
        """How many tokens the parts' memories hold."""
        return sum(int(getattr(part, "tokens", 0)) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the parts' memories, and of the weights."""
        return self.mixer.nbytes + sum(int(getattr(part, "nbytes", 0)) for part in self.parts.values())

    def sequences(self) -> Iterator[Int32Array]:
        """What the parts' memories hold, sequence by sequence, int32[n], the oldest first; `learn` takes them again."""
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

    def awake(self) -> list[bool]:
        """For each part whether it takes part in this draft, last whether the table does. Asked once for each draft.

        The one that gains most always does: of two that say the same, neither gains anything over the other.
        """
        self._turn += 1
        gains: list[float] = self.mixer.weights.gains.tolist()
        gains = [*gains[: len(self.parts)], gains[TABLE] if self.recycling else -math.inf]
        if self._turn % _PROBE_EVERY < _PROBE_FOR:
            return [*[True] * len(self.parts), self.recycling is not None]
        least = min(_LEAST_GAIN, max(gains))
        return [gain >= least and gain > -math.inf for gain in gains]


class HybridDrafter:
    """Drafts for one sequence; a `Composite`."""

    def __init__(self, strategy: HybridStrategy, prompt: Int32Array) -> None:
        self._strategy = strategy
        self._sequence = SequenceMixer(strategy.mixer, prompt)
        self._names = [*strategy.parts]
        self._vocab_size: int | None = None
        self._drafters: dict[str, Drafter] = {}
        self._seconds = dict.fromkeys(self._names, 0.0)
        for name, part in strategy.parts.items():
            try:
                self._drafters[name] = part.start(prompt)
            except Exception as error:
                self._drop(name, "start", error)

    @property
    def by_source(self) -> dict[str, SourceCounts]:
        """By the name of the part that spoke most for the node; parts without nodes are left out."""
        columns = self._sequence.counts.T.tolist()
        numbers = [*enumerate(self._names), (TABLE, "recycling")]
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
        awake = self._strategy.awake()
        trees = [self._tree(name, budget) if asked else None for name, asked in zip(self._names, awake, strict=False)]
        return self._sequence.draft(trees, awake[-1], budget)

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        self._sequence.observe(accepted, feedback)
        for name, drafter in [*self._drafters.items()]:
            started = time.perf_counter()
            try:
                drafter.observe(accepted, _seen_by(self._strategy.parts[name], feedback))
            except Exception as error:
                self._drop(name, "observe", error)
            self._seconds[name] += time.perf_counter() - started

    def close(self) -> None:
        for name in [*self._drafters]:
            self._close(name)

    def _tree(self, name: str, budget: int) -> DraftTree | None:
        """What a part proposes; None from one that was dropped."""
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


def _seen_by(part: Strategy, feedback: Feedback | None) -> Feedback | None:
    """The feedback with as many of the model's most probable tokens as the part asks for."""
    if feedback is None or feedback.top_tokens is None or feedback.top_tokens.shape[1] == part.top_k:
        return feedback
    return replace(feedback, top_tokens=feedback.top_tokens[:, : part.top_k] if part.top_k else None)
