"""A request that runs: its tokens so far, its state, its part of the KV cache, its metrics; and metrics of an engine.

Nothing is decided by metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, fields
from enum import Enum
from hashlib import sha256
from itertools import zip_longest
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from draftwood_model_runner.request import Request
from draftwood_strategies import Strategy
from draftwood_strategies.arrays import Float32Array, Int32Array
from draftwood_strategies.base import DraftStats, SourceCounts

if TYPE_CHECKING:  # it loads numba, which the service beside the engine does without
    from draftwood_strategies.draft_engine.engine import DraftSession


FORMAT_SOURCE = "format"
"""The source of draft tokens that the grammar of the output forces."""

Rank = tuple[float, int]
"""A total order of sequences: the least is served first."""


class KVUse(NamedTuple):
    """Pages of KV memory: all, those that live sequences hold, and those that only the prefix cache does."""

    total: int = 0
    held: int = 0
    cached: int = 0


class StateUse(NamedTuple):
    """Bytes of states of recurrent layers: those that live sequences hold, and those kept for later ones with
    the same prefix."""

    held: int = 0
    cached: int = 0


class EngineCounts(NamedTuple):
    """Steps of an engine, and the seconds that they and their forward passes took.

    Attributes:
        microbatches: steps of half of the sequences, in flight while the host worked on the others.
        steps_ahead: steps that began while the one before was in flight, and went on with what that one wrote.
    """

    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    microbatches: int = 0
    steps_ahead: int = 0

    def plus(self, other: EngineCounts) -> EngineCounts:
        """Both together."""
        return EngineCounts(*map(add, self, other))


@dataclass(slots=True)
class SequenceStats(DraftStats):
    """What a sequence cost and what drafting gained. Times in seconds, on the clock of `time.perf_counter`.

    Attributes:
        pauses: how often it gave up its slot because the client did not read.
        step_seconds, model_seconds: time of the steps that the sequence took part in, and of their forward passes.
    """

    arrived_at: float = 0.0
    first_scheduled_at: float = 0.0
    finished_at: float = 0.0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    pauses: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0

    def sources(self, strategy_name: str) -> dict[str, SourceCounts]:
        """Draft tokens by source. In a hybrid, what no part proposed was forced by the grammar."""
        if not self.draft_tokens:
            return {}
        if not self.proposed_tokens:
            return {FORMAT_SOURCE: SourceCounts(self.draft_tokens, self.accepted_tokens)}
        if not self.by_source:
            return {strategy_name: SourceCounts(self.draft_tokens, self.accepted_tokens)}
        verified, accepted = (sum(counts) for counts in zip(*self.by_source.values(), strict=True))
        rest = SourceCounts(self.draft_tokens - verified, self.accepted_tokens - accepted)
        return {**self.by_source, **({FORMAT_SOURCE: rest} if rest.verified > 0 else {})}

    @classmethod
    def over(cls, parts: SequenceOf[SequenceStats]) -> SequenceStats:
        """Of several samples of one request: counts are summed, times run from the first to the last."""
        of_all = {entry.name: [getattr(part, entry.name) for part in parts] for entry in fields(cls)}
        return cls(**{name: _OVER_SAMPLES.get(name, sum)(values) for name, values in of_all.items()})


_OVER_SAMPLES: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("arrived_at", "first_scheduled_at", "first_token_at"), min),
    **dict.fromkeys(("last_token_at", "finished_at", "pauses", "step_seconds", "model_seconds"), max),
    "accepted_by_depth": lambda parts: [sum(steps) for steps in zip_longest(*parts, fillvalue=0)],
    **dict.fromkeys(("drafting_disabled_reason", "no_draft"), lambda reasons: next(filter(None, reasons), "")),
    "by_source": SourceCounts.summed,
}
"""How the values of several samples make one; those of other fields are summed."""


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"


class Grammar(Protocol):
    """State of an output within its grammar; `sampling.grammar.GrammarState`."""

    pending: Future[bytes] | None

    @property
    def slow(self) -> bool: ...
    @property
    def complete(self) -> bool: ...
    def prepare(self, threads: Executor) -> None: ...
    def copy(self) -> Grammar: ...
    def allows(self, token: int) -> bool: ...
    def mask(self, scores: Float32Array) -> None: ...
    def masks(self, tokens: Int32Array, parents: Int32Array) -> Any: ...
    def accept(self, token: int) -> None: ...
    def forced(self) -> list[int]: ...


@dataclass(eq=False, slots=True)
class CachedPrefix:
    """The blocks that a sequence begins with.

    Attributes:
        hashes: of its blocks, as far as they were looked for.
        pages: int32[p], which hold the first ones of them, as far as these were known at the last look.
        forgotten: how often the cache had forgotten pages then.
    """

    tenant: str
    hashes: list[bytes] = field(default_factory=list)
    pages: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    forgotten: int = 0

    def append(self, tokens: Int32Array, page_size: int) -> None:
        """Adds the blocks of `tokens`, int32[n * page_size], which follow those that it has."""
        before = self.hashes[-1] if self.hashes else sha256(self.tenant.encode("utf-8", "surrogatepass")).digest()
        data, size = tokens.tobytes(), page_size * tokens.itemsize
        for begin in range(0, len(data), size):
            before = sha256(before + data[begin : begin + size]).digest()
            self.hashes.append(before)


@dataclass(eq=False, slots=True)
class PageTable:
    """The pages of a live sequence.

    Attributes:
        pages: int32[p]; token i of the sequence is in row i % page_size of page i // page_size.
        prefix: its blocks, as far as they were hashed.
        shared: how many of its first pages it began with.
        recorded: how many of its first pages the prefix cache knows.
        freed: how many of the first pages it gave up; they are `NULL_PAGE`.
        longest: tokens of the sequence up to which its next step fits, with its draft.
    """

    pages: Int32Array
    prefix: CachedPrefix
    recorded: int
    freed: int = 0
    longest: int = 0
    shared: int = 0

    @property
    def held(self) -> Int32Array:
        """int32[h], the pages that it has not given up."""
        return self.pages[self.freed :]


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine. The scheduler alone changes `state`; the engine alone appends to `output`.

    Attributes:
        request: what was asked.
        strategy: the tenant's instance of the drafting strategy; None disables drafting. It may be exchanged between
            two steps, as when the tenant's memory was loaded late.
        grammar: the compiled `request.format`, at its beginning; None for any output.
        output: the tokens written so far.
        committed: how many tokens of prompt + output have their keys and values in the KV cache.
        slot_generation: how often it got a slot. A step that began with an earlier slot has no keys and values for this
            one.
        stats: metrics.
        drafting: its session of the draft engine, from its first step to its end.
        skipped: steps that it skipped since it last wrote.
        in_flight: tokens that a step in flight may write, at most.
        rank: orders the sequences of an engine; it never changes once the scheduler has set it.
        page_table: its part of the KV cache while it runs; None else.
        cached_prefix: what is known of its cached prefix while it waits.
        common_prefixes: tokens that its prompt begins with as that of another sequence does, while it waits.
        writer: what chooses its tokens and turns them into text, from its first step to its end: the engine's `Writer`.
    """

    request: Request
    strategy: Strategy | None = None
    grammar: Grammar | None = None
    state: SequenceState = SequenceState.WAITING
    output: list[int] = field(default_factory=list)
    committed: int = 0
    slot_generation: int = 0
    stats: SequenceStats = field(default_factory=SequenceStats)
    drafting: DraftSession | None = None
    skipped: int = 0
    in_flight: int = 0
    rank: Rank = (0.0, 0)
    page_table: PageTable | None = None
    cached_prefix: CachedPrefix | None = None
    common_prefixes: dict[Sequence, int] = field(default_factory=dict)
    writer: Any = None
    _prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.stats.arrived_at = self.request.arrived_at
        self._prompt_tokens = int(self.request.prompt.size)

    def __repr__(self) -> str:
        request = self.request
        return (
            f"Sequence({request.request_id!r}, {self.state.value}, prompt={request.prompt.size},"
            f" output={len(self.output)}, strategy={request.drafting.strategy!r})"
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decoding step: 1.0 in plain decoding."""
        return len(self.output) / self.stats.decode_steps if self.stats.decode_steps else 1.0

    @property
    def kv(self) -> PageTable:
        """The page table of a sequence that runs."""
        assert self.page_table is not None
        return self.page_table

    @property
    def ready(self) -> bool:
        """Its next token can be chosen after a step: no mask of its grammar is being computed."""
        return self.grammar is None or self.grammar.pending is None or self.grammar.pending.done()

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return self._prompt_tokens + len(self.output)

    @property
    def last_token(self) -> int:
        """Of prompt and output."""
        return self.output[-1] if self.output else int(self.request.prompt[-1])

    @property
    def longest_now(self) -> int:
        """`length` once the step in flight has ended, at most."""
        return min(self.length + self.in_flight, self.longest)

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest output that the request allows."""
        return self._prompt_tokens + self.request.stop.max_tokens

    def tokens(self, start: int, count: int) -> Int32Array:
        """int32[count]: prompt and output from position `start` on."""
        prompt = self.request.prompt
        written = start - self._prompt_tokens
        if written >= 0:
            return np.array(self.output[written : written + count], np.int32)
        tail = np.array(self.output[: max(written + count, 0)], np.int32)
        return np.concatenate([prompt[start : start + count], tail])
