"""Interfaces of an engine to its host, the loaded engine with its memory, and learning around a request."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from draftwood_memory import Learning, Memory, MemoryName, MemoryOverrides, StrategyKey, StrategyUse
from draftwood_memory.counters import MemoryCounters
from draftwood_model_runner.output import Answer, Difference, StepOutput
from draftwood_model_runner.request import MemoryOptions, Request
from draftwood_model_runner.sequence import EngineCounts, KVUse, Sequence, StateUse
from draftwood_service.serving import Grammars


class Redecoding(Protocol):
    """`draftwood_model_runner.plain_decoding.Redecoding`, as far as audits use it."""

    @property
    def done(self) -> bool: ...
    @property
    def waits(self) -> bool: ...
    @property
    def difference(self) -> Difference | None: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


class OwnText(Protocol):
    """`draftwood_model_runner.plain_decoding.OwnText`, as far as a host uses it."""

    @property
    def done(self) -> bool: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


class StepEngine(Protocol):
    """`draftwood_model_runner.engine.Engine`, as far as its host uses it. All calls come from one thread.

    `has_work`: there is a step to make now. `idle`: nothing runs or waits, here or elsewhere.
    """

    @property
    def has_work(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    @property
    def counts(self) -> EngineCounts: ...
    @property
    def kv_use(self) -> KVUse: ...
    @property
    def state_use(self) -> StateUse: ...
    def add(self, sequence: Sequence) -> None: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def pause(self, sequence: Sequence) -> None: ...
    def resume(self, sequence: Sequence) -> None: ...
    def step(self) -> list[StepOutput]: ...
    def redecode(self, answer: Answer) -> Redecoding: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, with what its sequences need from outside it.

    Attributes:
        memory: provides a sequence's strategy and learns its output; not started yet.
        grammars: compiles the formats of answers; None for an engine that drafts, learns and compiles by itself.
        info: sent to the service in `Ready`.
        preload: number of memories, the latest written, that are loaded at the start, for the strategy `strategy`.
        audit_share: share of requests whose answers are audited.
        weights: of tenants, as the engine reads them at each step; 1 for those not named.
        can_audit: whether an answer to a request can be compared with plain decoding.
        own_text: what the model writes for no tenant while the engine is idle; None for nothing.
        memory_report: counters of the memories that drafts come from, and whether their store answers; None for those
            of `memory`.
    """

    engine: StepEngine
    memory: Memory
    grammars: Grammars | None
    info: Any = None
    preload: int = 0
    strategy: str = ""
    audit_share: float = 0.0
    weights: dict[str, float] = field(default_factory=dict)
    can_audit: Callable[[Request], bool] = lambda request: True
    own_text: OwnText | None = None
    memory_report: Callable[[], tuple[MemoryCounters, bool]] | None = None


def memory_overrides(options: MemoryOptions) -> MemoryOverrides:
    """The memory's own type of the overrides in a request."""
    return MemoryOverrides(options.forked, options.max_tokens, options.max_bytes, options.idle_ttl, options.max_age)


def use_of(request: Request) -> StrategyUse:
    """Which memory and strategy a request drafts with."""
    key = StrategyKey(request.drafting.strategy, request.drafting.options)
    return StrategyUse(MemoryName(request.tenant, request.arm), key, memory_overrides(request.memory))


def repeat_key(request: Request) -> str:
    """The same for a request that is sent again: callers may give several requests of a conversation one id."""
    return f"{request.request_id} {hashlib.blake2b(request.prompt.tobytes(), digest_size=8).hexdigest()}"


@contextmanager
def learning(memory: Memory, sequences: SequenceOf[Sequence]) -> Iterator[Learning]:
    """Around a request's samples, which share a memory and a strategy: their outputs are learned on exit."""
    first = sequences[0].request
    prompt = first.prompt if first.memory.with_prompts else np.empty(0, np.int32)
    began = time.monotonic() - (time.perf_counter() - first.arrived_at)
    key = repeat_key(first)
    with memory.learning(use_of(first).memory, sequences[0].strategy, began=began, request=key) as scope:
        yield scope
        for number, sequence in enumerate(sequences):
            if sequence.output:
                scope.strategy = sequence.strategy
                scope.learn(np.concatenate([prompt, np.array(sequence.output, np.int32)]), number)
