"""A request that runs: its tokens so far, its state, its part of the KV cache. Without torch."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

from draftwood_model_runner.request import Request
from draftwood_model_runner.statistics import SequenceStats
from draftwood_strategies import Strategy
from draftwood_strategies.draft import Float32Array, Int32Array


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
    """

    request: Request
    strategy: Strategy | None = None
    grammar: Grammar | None = None
    state: SequenceState = SequenceState.WAITING
    output: list[int] = field(default_factory=list)
    committed: int = 0
    slot_generation: int = 0
    stats: SequenceStats = field(default_factory=SequenceStats)
    _prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.stats.arrived_at = self.request.arrived_at
        self._prompt_tokens = int(self.request.prompt.size)

    def __repr__(self) -> str:
        request = self.request
        return (
            f"Sequence({request.request_id!r}, {self.state.value}, prompt={request.prompt.size},"
            f" output={len(self.output)}, strategy={request.strategy_name!r})"
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per decoding step: 1.0 in plain decoding."""
        return len(self.output) / self.stats.decode_steps if self.stats.decode_steps else 1.0

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
