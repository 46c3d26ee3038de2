"""The hybrid strategy: several strategies under one budget, as one tree.

Each part drafts on its own; their trees, and the successor table of `recycling`, are mixed node by node with learned
weights (see `candidates`). A part that costs more than drafts gain is suspended for some of them, and one that fails
is left out for the rest of its sequence.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_strategies.base import (
    BacksOff,
    Drafter,
    Feedback,
    PromptIndexer,
    SourceCounts,
    StepFeedback,
    SuccessorSource,
    SupportsReadOnly,
    SupportsRebuild,
)
from draftwood_strategies.dispatch import OnFailure, TimedCall, observe_all, propose_all
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.mixing.mixer import Mixer, SequenceMixer
from draftwood_strategies.mixing.sources.parts import names_in, parts_of, table_of
from draftwood_strategies.mixing.sources.schedule import SourceSchedule
from draftwood_strategies.mixing.weights import SOURCES, TABLE
from draftwood_strategies.native import Int32Array, segment_indices
from draftwood_strategies.options import Option, OptionValue, read_options
from draftwood_strategies.registry import options_of, register

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
        schedule: which parts are asked.

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
        return {**own, **{name: option for source in names_in(sources) for name, option in options_of(source).items()}}

    def __init__(self, *, sources: str = _SOURCES, **options: object) -> None:
        made = parts_of(sources, options)
        tables = {name: part for name, part in made.items() if isinstance(part, SuccessorSource)}
        self.parts = {name: part for name, part in made.items() if name not in tables}
        if len(tables) > 1:
            raise ValueError(f"sources: {' and '.join(tables)} have a successor table each; one can be mixed")
        if len(self.parts) > SOURCES:
            raise ValueError(f"sources: {sources!r} names more than {SOURCES} strategies that draft trees")
        self.table_name = next(iter(tables), "")
        for part in self.parts.values():
            if tables and isinstance(part, BacksOff):
                part.backs_off = False
        self.mixer = Mixer(table_of(self.table_name, tables[self.table_name]) if tables else None)
        self.top_k = max(int(part.top_k) for part in made.values())
        self.failures: Counter[str] = Counter()
        self.schedule = SourceSchedule()

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

    def keep_learned(self, earlier: HybridStrategy) -> None:
        self.mixer, self.schedule, self.failures = earlier.mixer, earlier.schedule, earlier.failures
        for name, part in self.parts.items():
            if isinstance(part, SupportsRebuild):
                part.keep_learned(earlier.parts[name])

    def set_model_table(self, rows: Int32Array) -> None:
        if self.table_name:
            self.mixer.model_table = rows

    def start(self, prompt: Int32Array) -> HybridDrafter:
        return HybridDrafter(self, prompt)

    def start_read_only(self, prompt: Int32Array) -> HybridDrafter:
        """As `start`, without learning; a part that cannot draft so takes no part."""
        return HybridDrafter(self, prompt, learns=False)

    def propose_all(self, drafters: SequenceOf[HybridDrafter], budgets: Int32Array) -> DraftTrees:
        names, trees = self.schedule.next(self.parts, len(drafters)), []
        for name in self.parts:
            asked = [i for i, drafter in enumerate(drafters) if name in drafter.parts] if name in names else []
            trees.append(self._trees(name, drafters, asked, budgets))
        return self.mixer.draft_all([drafter.sequence for drafter in drafters], trees, budgets)

    def observe_all(
        self,
        drafters: SequenceOf[HybridDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        self.mixer.observe_all([drafter.sequence for drafter in drafters], accepted, offsets, feedback)
        for name, part in self.parts.items():
            having = [i for i, drafter in enumerate(drafters) if name in drafter.parts]
            if not having:
                continue
            step = accepted, offsets, feedback
            if len(having) < len(drafters):
                entries, of_having = segment_indices(offsets, having)
                step = accepted[entries], of_having, None if feedback is None else feedback.part(having)
            taking = [drafters[i] for i in having]
            observe_all(part, [one.parts[name] for one in taking], *step, *self._calls(name, taking))

    def _trees(
        self, name: str, drafters: SequenceOf[HybridDrafter], asked: list[int], budgets: Int32Array
    ) -> DraftTrees:
        """A part's checked trees, one for each drafter, empty for those that are not `asked`."""
        if not asked:
            return DraftTrees.empty(len(drafters))
        having = [drafters[i] for i in asked]
        vocab_size, calls = having[0].vocab_size, self._calls(name, having)
        found = propose_all(self.parts[name], [one.parts[name] for one in having], budgets[asked], vocab_size, *calls)
        return DraftTrees.scattered([(asked, found)], len(drafters))

    def _calls(self, name: str, drafters: SequenceOf[HybridDrafter]) -> tuple[OnFailure, TimedCall]:
        """What becomes of the faults and the time of a part's calls for these drafters."""

        def failed(i: int, method: str, error: Exception) -> None:
            drafters[i].drop(name, method, error)

        def timed(sequences: SequenceOf[int], owner: object, function: Callable[..., Any], *args: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.schedule.charge(name, (time.perf_counter() - started) / len(sequences))

        return failed, timed


class HybridDrafter:
    """Drafts for one sequence; a `Composite`.

    Attributes:
        sequence: its state in the mixture.
        parts: the drafters of the parts that were not dropped, by name.
        vocab_size: tokens that the parts draft are below it; None for any.
    """

    def __init__(self, strategy: HybridStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self.sequence = SequenceMixer(strategy.mixer, prompt, learns)
        self.vocab_size: int | None = None
        self.parts: dict[str, Drafter] = {}
        self._suspensions = strategy.schedule.suspensions.total()
        for name, part in strategy.parts.items():
            try:
                if learns:
                    self.parts[name] = part.start(prompt)
                elif isinstance(part, SupportsReadOnly):
                    self.parts[name] = part.start_read_only(prompt)
            except Exception as error:
                self.drop(name, "start", error)

    @property
    def by_source(self) -> dict[str, SourceCounts]:
        """By the name of each node's dominant source; parts without nodes are left out."""
        columns = self.sequence.counts.T.tolist()
        numbers = [*enumerate(self._strategy.parts), (TABLE, self._strategy.table_name)]
        return {name: SourceCounts(*columns[number]) for number, name in numbers if columns[number][0]}

    def limit_tokens(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def drop_slowest(self) -> str:
        if not self.parts:
            return ""
        name = self._strategy.schedule.slowest_of(self.parts)
        self._strategy.failures[name] += 1
        _log.error("source %r is dropped for one sequence: a call took too long", name)
        self._close(name)
        return name

    def suspend_slowest(self) -> bool:
        strategy, before = self._strategy, self._suspensions
        schedule, has_table = strategy.schedule, strategy.mixer.table is not None
        # What another sequence suspended meanwhile was too expensive for this one, too.
        found = schedule.suspensions.total() > before or schedule.suspend_slowest([*strategy.parts], has_table)
        self._suspensions = schedule.suspensions.total()
        return found

    def index_prompt(self, max_tokens: int) -> int:
        """See `PromptIndexer`: one part after the other."""
        done = 0
        for name, part in [*self.parts.items()]:
            if done < max_tokens and isinstance(part, PromptIndexer):
                try:
                    done += part.index_prompt(max_tokens - done)
                except Exception as error:
                    self.drop(name, "index_prompt", error)
        return done

    def propose(self, budget: int) -> DraftTree:
        return self._strategy.propose_all([self], np.array([budget], np.int32))[0]

    def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None:
        offsets = np.array([0, accepted.shape[0]], np.int32)
        step = None if feedback is None else StepFeedback.of(feedback)
        self._strategy.observe_all([self], accepted, offsets, step)

    def close(self) -> None:
        for name in [*self.parts]:
            self._close(name)

    def drop(self, name: str, call: str, error: Exception) -> None:
        """Goes on without a part that failed."""
        self._strategy.failures[name] += 1
        _log.error("source %r is dropped for one sequence: %s raised %r", name, call, error, exc_info=error)
        if call != "close":
            self._close(name)

    def _close(self, name: str) -> None:
        drafter = self.parts.pop(name, None)
        if drafter is not None:
            try:
                drafter.close()
            except Exception as error:
                self.drop(name, "close", error)
