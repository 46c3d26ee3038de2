"""The hybrid strategy: several strategies under one budget, as one tree.

Each part drafts on its own; their trees, and the successor table of `recycling`, are mixed node by node with learned
weights (see `candidates`). A part that costs more than drafts gain is suspended for some of them, and one that fails
is left out for the rest of its sequence.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

import numpy as np

from draftwood_strategies.arrays import Int32Array, segment_indices
from draftwood_strategies.base import (
    AsksModels,
    BacksOff,
    Drafter,
    DraftsBeside,
    DraftsForRow,
    Feedback,
    PromptIndexer,
    Proposing,
    SourceCounts,
    StepFeedback,
    Strategy,
    SuccessorSource,
    SupportsReadOnly,
    SupportsRebuild,
)
from draftwood_strategies.built_in import HybridOptions
from draftwood_strategies.dispatch import observe_all, proposing, run_together
from draftwood_strategies.draft import DraftTree, DraftTrees
from draftwood_strategies.mixing.candidates import SOURCES, TABLE
from draftwood_strategies.mixing.mixture import Mixture, MixtureDrafter
from draftwood_strategies.registry import create_source, default_sources, options_of
from draftwood_strategies.successors import WIDTH, SuccessorTable

_log = logging.getLogger(__name__)
_SUSPENDED, _LONGEST_SUSPENDED = 512, 1 << 16
"""For how many drafts a part is suspended at first, and at most: twice as many each time that it soon is again."""
_SMOOTHING = 1 / 8
"""Weight of the latest call in the mean time of a part."""


class HybridStrategy:
    """One tenant's instances of the parts, and the learned weights of their mixture.

    Args:
        sources: names of registered strategies, separated by commas; at most four besides the one with a successor
            table. By default those of `default_sources`.
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

    def __init__(self, *, sources: str | None = None, **options: object) -> None:
        made = _parts(HybridOptions(sources=default_sources() if sources is None else sources), options)
        tables = {name: part for name, part in made.items() if isinstance(part, SuccessorSource)}
        self.parts = {name: part for name, part in made.items() if name not in tables}
        if len(tables) > 1:
            raise ValueError(f"sources: {' and '.join(tables)} have a successor table each; one can be mixed")
        if len(self.parts) > SOURCES:
            raise ValueError(f"sources: {sources!r} names more than {SOURCES} strategies that draft trees")
        self._beside = {name for name, part in self.parts.items() if isinstance(part, DraftsBeside)}
        self.table_name = next(iter(tables), "")
        for part in self.parts.values():
            if tables and isinstance(part, BacksOff):
                part.backs_off = False
        self.mixture = Mixture(_table_of(self.table_name, tables[self.table_name]) if tables else None)
        self.top_k = max(int(part.top_k) for part in made.values())
        self.failures: Counter[str] = Counter()
        self.schedule = SourceSchedule()

    @property
    def models(self) -> list[Any]:
        """See `AsksModels`."""
        return [model for part in self.parts.values() if isinstance(part, AsksModels) for model in part.models]

    def models_for(self, rows: int) -> list[Any]:
        """See `AsksModels`."""
        asking = [part for part in self.parts.values() if isinstance(part, AsksModels)]
        return [model for part in asking for model in part.models_for(rows)]

    @property
    def tokens(self) -> int:
        """How many tokens the parts' memories hold."""
        return sum(int(getattr(part, "tokens", 0)) for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the parts' memories, and of the weights."""
        return self.mixture.nbytes + sum(int(getattr(part, "nbytes", 0)) for part in self.parts.values())

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
        self.mixture, self.schedule, self.failures = earlier.mixture, earlier.schedule, earlier.failures
        for name, part in self.parts.items():
            if isinstance(part, SupportsRebuild):
                part.keep_learned(earlier.parts[name])

    def set_model_table(self, rows: Int32Array) -> None:
        if self.table_name:
            self.mixture.model_table = rows

    def start(self, prompt: Int32Array) -> HybridDrafter:
        return HybridDrafter(self, prompt)

    def start_read_only(self, prompt: Int32Array) -> HybridDrafter:
        """As `start`, without learning; a part that cannot draft so takes no part."""
        return HybridDrafter(self, prompt, learns=False)

    def propose_all(self, drafters: SequenceOf[HybridDrafter], budgets: Int32Array) -> DraftTrees:
        return run_together([self.propose_asking(drafters, budgets)])[0]

    def propose_asking(self, drafters: SequenceOf[HybridDrafter], budgets: Int32Array) -> Proposing:
        """See `AsksModels`."""
        names, sequences = self.schedule.next(self.parts, len(drafters)), [drafter.sequence for drafter in drafters]
        trees = [DraftTrees.empty(len(drafters)) for _ in self.parts]
        mixed: DraftTrees | None = None
        # Those that depend on what the others draft come last.
        for beside in (False, True):
            for number, name in enumerate(self.parts):
                if (name in self._beside) is not beside or name not in names:
                    continue
                if beside and mixed is None:
                    mixed = self.mixture.draft_all(sequences, trees, budgets)
                asked = [i for i, drafter in enumerate(drafters) if name in drafter.parts]
                trees[number] = yield from self._trees(name, drafters, asked, budgets, mixed)
                mixed = None if trees[number].tokens.size else mixed
        return self.mixture.draft_all(sequences, trees, budgets) if mixed is None else mixed

    def observe_all(
        self,
        drafters: SequenceOf[HybridDrafter],
        accepted: Int32Array,
        offsets: Int32Array,
        feedback: StepFeedback | None,
    ) -> None:
        self.mixture.observe_all([drafter.sequence for drafter in drafters], accepted, offsets, feedback)
        for name, part in self.parts.items():
            having = [i for i, drafter in enumerate(drafters) if name in drafter.parts]
            if not having:
                continue
            step = accepted, offsets, feedback
            if len(having) < len(drafters):
                entries, of_having = segment_indices(offsets, having)
                step = accepted[entries], of_having, None if feedback is None else feedback.part(having)
            taking = [drafters[i] for i in having]
            calls = _PartCalls(name, taking)
            try:
                observe_all(part, [drafter.parts[name] for drafter in taking], *step, calls)
            finally:
                self.schedule.charge(name, calls.seconds)

    def _trees(
        self,
        name: str,
        drafters: SequenceOf[HybridDrafter],
        asked: list[int],
        budgets: Int32Array,
        others: DraftTrees | None,
    ) -> Proposing:
        """A part's checked trees, one for each drafter, empty for those that are not `asked`.

        Args:
            others: what other parts draft together, for a part that depends on it.
        """
        if not asked:
            return DraftTrees.empty(len(drafters))
        having = [drafters[i] for i in asked]
        vocab_size, calls = having[0].vocab_size, _PartCalls(name, having)
        if others is not None and len(asked) < len(drafters):
            others = DraftTrees.of([others[i] for i in asked])
        given = [drafter.parts[name] for drafter in having]
        try:
            proposed = yield from proposing(self.parts[name], given, budgets[asked], vocab_size, calls, others)
        finally:  # also if it is interrupted, since the slowest part is dropped then
            self.schedule.charge(name, calls.seconds)
        return DraftTrees.scattered([(asked, proposed)], len(drafters))


class _PartCalls:
    """What becomes of the faults and the time of a part's calls for these drafters; `dispatch.Calls`.

    Attributes:
        seconds: that they took, of each drafter.
    """

    def __init__(self, name: str, drafters: SequenceOf[HybridDrafter]) -> None:
        self._name, self._drafters = name, drafters
        self.seconds = 0.0

    def failed(self, i: int, method: str, error: Exception) -> None:
        self._drafters[i].drop(self._name, method, error)

    def timed(self, sequences: SequenceOf[int], owner: object, function: Callable[..., Any], *args: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self.charge((time.perf_counter() - started) / len(self._drafters))

    def charge(self, seconds: float) -> None:
        self.seconds += seconds


class HybridDrafter:
    """Drafts for one sequence; a `Composite`.

    Attributes:
        sequence: its state in the mixture.
        parts: the drafters of the parts that were not dropped, by name.
        vocab_size: tokens that the parts draft are below it; None for any.
    """

    def __init__(self, strategy: HybridStrategy, prompt: Int32Array, learns: bool = True) -> None:
        self._strategy = strategy
        self.sequence = MixtureDrafter(strategy.mixture, prompt, learns)
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
        schedule, has_table = strategy.schedule, strategy.mixture.table is not None
        # What another sequence suspended meanwhile was too expensive for this one, too.
        suspended = schedule.suspensions.total() > before or schedule.suspend_slowest([*strategy.parts], has_table)
        self._suspensions = schedule.suspensions.total()
        return suspended

    def follow_row(self, row: object) -> None:
        """See `DraftsForRow`."""
        for name, part in [*self.parts.items()]:
            if isinstance(part, DraftsForRow):
                try:
                    part.follow_row(row)
                except Exception as error:
                    self.drop(name, "follow_row", error)

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


def _parts(hybrid: HybridOptions, options: Mapping[str, object]) -> dict[str, Strategy]:
    """The sources of a hybrid, each made with those of the other options that it has.

    Raises:
        TypeError: no part has an option.
    """
    known = {name: options_of(name) for name in hybrid.names()}
    unknown = set(options).difference(*known.values())
    if unknown:
        raise TypeError(f"none of the sources {', '.join(known)} has an option {min(unknown)!r}")
    given = {name: {k: v for k, v in options.items() if k in of_part} for name, of_part in known.items()}
    return {name: create_source(name, of_part) for name, of_part in given.items()}


def _table_of(name: str, part: SuccessorSource) -> SuccessorTable:
    """The successor table of a part.

    Raises:
        ValueError: the part's `top_k` does not fit, or it is another kind of table.
    """
    if part.top_k < WIDTH:
        raise ValueError(f"sources: {name!r} has a successor table, so its top_k must be at least {WIDTH}")
    if not isinstance(part.successors, SuccessorTable):
        raise ValueError(f"sources: {name!r}: its successors must be a SuccessorTable")
    return part.successors


class SourceSchedule:
    """The sources of one tenant's hybrid.

    Attributes:
        suspensions: how often each was suspended.
    """

    def __init__(self) -> None:
        self.suspensions: Counter[str] = Counter()
        self._suspended: dict[str, range] = {}
        self._seconds = defaultdict[str, float](float)
        self._drafts = 0

    def next(self, names: Iterable[str], drafts: int) -> list[str]:
        """Those of the sources that are asked for the next drafts, one for each sequence of a step. The others go on
        learning."""
        self._drafts += drafts
        return self._active(names)

    def charge(self, name: str, seconds: float) -> None:
        """What a step asked of a source took so long for each sequence."""
        self._seconds[name] += _SMOOTHING * (seconds - self._seconds[name])

    def suspend_slowest(self, names: SequenceOf[str], has_table: bool) -> bool:
        """Suspends the source that takes longest, for the drafts of all sequences; false if it is the last one."""
        active = self._active(names)
        if not active or len(active) + has_table < 2:
            return False
        name, drafts = self.slowest_of(active), _SUSPENDED
        before = self._suspended.get(name)
        if before is not None and self._drafts - before.stop < len(before):
            drafts = min(2 * len(before), _LONGEST_SUSPENDED)
        self._suspended[name] = range(self._drafts, self._drafts + drafts)
        self.suspensions[name] += 1
        return True

    def slowest_of(self, names: Iterable[str]) -> str:
        """The one of these sources whose latest calls took longest."""
        return max(names, key=self._seconds.__getitem__)

    def _active(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if self._drafts not in self._suspended.get(name, ())]
