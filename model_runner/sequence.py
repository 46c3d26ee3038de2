"""One request in the engine: its prompt, what it asked for, what it has written, where it stands. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np

from model_runner.errors import InvalidValueError
from strategies import Strategy
from strategies.base import SourceCounts
from strategies.draft import Int32Array

MAX_LOGPROBS = 20
MAX_PRIORITY = 10
FORMAT = "format"
"""The source of draft tokens that the output's format forces."""


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from the model's logits. The defaults are greedy decoding.

    Attributes:
        logit_bias: (token, value) pairs; the value is added to the token's logit.
        logprobs: report log-probabilities, and those of this many most probable tokens; None reports none.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.0, 100.0),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise InvalidValueError(f"sampling.{name}", value, f"it must lie in [{low:g}, {high:g}]")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0.0:
                raise InvalidValueError(f"sampling.{name}", 0.0, "it must be above 0")
        if self.top_k < 0:
            raise InvalidValueError("sampling.top_k", self.top_k, "it must be at least 0 (0 keeps every token)")
        if not 0 <= self.seed < 2**64:
            raise InvalidValueError("sampling.seed", self.seed, "it must lie in [0, 2^64)")
        for token, bias in self.logit_bias:
            if not -100.0 <= bias <= 100.0:
                raise InvalidValueError(f"sampling.logit_bias[{token}]", bias, "it must lie in [-100, 100]")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidValueError("output.top_logprobs", self.logprobs, f"it must lie in [0, {MAX_LOGPROBS}]")


@dataclass(frozen=True, slots=True)
class StopParams:
    """When a sequence ends.

    Attributes:
        max_tokens: at most this many new tokens (>= 1).
        min_tokens: no end-of-sequence or stop token before this many new tokens.
        strings: the text ends before the first of these.
        token_ids: end the sequence, besides the model's end-of-sequence tokens.
        ignore_eos: the model's end-of-sequence tokens are tokens like any other.

    Raises:
        InvalidValueError: a value is outside its range.
    """

    max_tokens: int
    min_tokens: int = 0
    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidValueError("stop.max_tokens", self.max_tokens, "it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidValueError(
                "stop.min_tokens", self.min_tokens, f"it must lie in [0, max_tokens = {self.max_tokens}]"
            )
        if "" in self.strings:
            raise InvalidValueError("stop.strings", "", "a stop string must not be empty")


@dataclass(slots=True)
class SequenceStats:
    """What a sequence cost and what drafting brought it. Times in seconds, on the clock of `time.perf_counter`."""

    arrived_at: float = 0.0
    first_scheduled_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    decode_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    drafting_disabled_reason: str = ""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    def sources(self, strategy_name: str) -> dict[str, SourceCounts]:
        """Draft tokens by who proposed them; what no part of a hybrid did, a format forced."""
        if not self.draft_tokens:
            return {}
        if not self.by_source:
            return {strategy_name: SourceCounts(self.draft_tokens, self.accepted_tokens)}
        verified, accepted = (sum(counts) for counts in zip(*self.by_source.values(), strict=True))
        rest = SourceCounts(self.draft_tokens - verified, self.accepted_tokens - accepted)
        return {**self.by_source, **({FORMAT: rest} if rest.verified > 0 else {})}

    @classmethod
    def over(cls, parts: SequenceOf[SequenceStats]) -> SequenceStats:
        """Of several sequences that run together: counts add up, times run from the first to the last."""
        depths = zip_longest(*(part.accepted_by_depth for part in parts), fillvalue=0)
        return cls(
            arrived_at=parts[0].arrived_at,
            first_scheduled_at=min(part.first_scheduled_at for part in parts),
            first_token_at=min(part.first_token_at for part in parts),
            finished_at=max(part.finished_at for part in parts),
            cached_prompt_tokens=sum(part.cached_prompt_tokens for part in parts),
            preemptions=sum(part.preemptions for part in parts),
            decode_steps=sum(part.decode_steps for part in parts),
            draft_tokens=sum(part.draft_tokens for part in parts),
            accepted_tokens=sum(part.accepted_tokens for part in parts),
            accepted_by_depth=[sum(steps) for steps in depths],
            draft_seconds=sum(part.draft_seconds for part in parts),
            step_seconds=max(part.step_seconds for part in parts),
            model_seconds=max(part.model_seconds for part in parts),
            by_source=_added([part.by_source for part in parts]),
            drafting_disabled_reason=next((reason for p in parts if (reason := p.drafting_disabled_reason)), ""),
        )


def _added(parts: SequenceOf[dict[str, SourceCounts]]) -> dict[str, SourceCounts]:
    """The counts of each source, summed."""
    total: dict[str, SourceCounts] = {}
    for name, counts in (pair for part in parts for pair in part.items()):
        before = total.get(name, SourceCounts(0, 0))
        total[name] = SourceCounts(before.verified + counts.verified, before.accepted + counts.accepted)
    return total


class GrammarKind(Enum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Format:
    """What an output must follow, as its author wrote it."""

    kind: GrammarKind
    text: str


class Grammar(Protocol):
    """How far an output has come in what it must follow; `grammar.GrammarState`."""

    def copy(self) -> Grammar: ...
    def mask(self, scores: Any) -> None: ...
    def accept(self, token: int) -> None: ...
    def forced(self) -> list[int]: ...


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine. The scheduler alone changes `state`; the engine alone appends to `output`.

    Attributes:
        prompt: int32[p], p >= 1.
        strategy_name: the strategy's registered name, for statistics and logs.
        strategy: drafts for it; None verifies no drafts.
        max_draft_nodes: its own cap on draft nodes a step.
        grammar: what the output must follow, at its beginning; None for anything.
        format: what `grammar` is compiled from, by whoever hands the sequence to the engine.
        include_special_tokens: special tokens' text is part of the output text.
        tenant: whose it is: tenants share the engine by weight, and never see each other's prefixes.
        priority: orders a tenant's sequences, and says who gives way when memory is short; in [-10, 10], higher first.
        deadline: when it is of no use any more, on the clock of `time.perf_counter`; None for never.
        output: the tokens written so far.
        committed: how many tokens of prompt + output have their keys and values in the KV cache.
    """

    request_id: str
    prompt: Int32Array
    stop: StopParams
    sampling: SamplingParams = SamplingParams()
    strategy_name: str = "none"
    strategy: Strategy | None = None
    max_draft_nodes: int = 0
    grammar: Grammar | None = None
    format: Format | None = None
    include_special_tokens: bool = False
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    state: SequenceState = SequenceState.WAITING
    output: list[int] = field(default_factory=list)
    committed: int = 0
    stats: SequenceStats = field(default_factory=SequenceStats)

    def __post_init__(self) -> None:
        if self.prompt.dtype != np.int32 or self.prompt.ndim != 1 or self.prompt.size == 0:
            raise InvalidValueError("prompt", self.prompt, "it must be a non-empty int32[p] array")
        if abs(self.priority) > MAX_PRIORITY:
            raise InvalidValueError("priority", self.priority, f"it must lie in [{-MAX_PRIORITY}, {MAX_PRIORITY}]")
        if self.deadline is not None and math.isnan(self.deadline):
            raise InvalidValueError("deadline", self.deadline, "it must be a time")

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, {self.state.value}, prompt={self.prompt.size}, output={len(self.output)},"
            f" strategy={self.strategy_name!r})"
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a step that wrote any: 1.0 in plain decoding."""
        return len(self.output) / self.stats.decode_steps if self.stats.decode_steps else 1.0

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return int(self.prompt.size) + len(self.output)

    def tokens(self, start: int, count: int) -> Int32Array:
        """int32[count]: prompt and output from position `start` on."""
        written = start - int(self.prompt.size)
        if written >= 0:
            return np.array(self.output[written : written + count], np.int32)
        tail = np.array(self.output[: max(written + count, 0)], np.int32)
        return np.concatenate([self.prompt[start : start + count], tail])


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        reason: why.
        stop_string: the stop string that ended it.
        stop_token_id: the end-of-sequence or stop token that ended it.
        error: what went wrong, where `reason` is ERROR.
    """

    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A written token's log-probability, and the most probable tokens, best first, with theirs."""

    logprob: float
    top_token_ids: list[int]
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step wrote for one sequence.

    Attributes:
        sequence: whose.
        token_ids: the tokens, in order; empty only with `finish`.
        texts: for each token the characters that it completed; "" while a character, or what may become a stop
            string, is not whole. What was held back at the end of the sequence comes with the last token.
        drafted: for each token, whether it came from a draft.
        finish: how the sequence ended, with its last output.
        logprobs: one for each token, where the sequence asks for them.
    """

    sequence: Sequence
    token_ids: list[int]
    texts: list[str]
    drafted: list[bool]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
