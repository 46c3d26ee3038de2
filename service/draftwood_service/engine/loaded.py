"""What the host of an engine needs: the engine's interface, and the engine with its memory, grammars and info."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from draftwood_memory.memory import Memory
from draftwood_model_runner.answer import Answer, Difference
from draftwood_model_runner.output import StepOutput
from draftwood_model_runner.scheduling.kv_pool import KVUse
from draftwood_model_runner.sequence import Sequence
from draftwood_model_runner.statistics import EngineCounts
from draftwood_service.serving import Grammars


class Redecoding(Protocol):
    """`draftwood_model_runner.redecoding.Redecoding`, as far as audits use it."""

    @property
    def done(self) -> bool: ...
    @property
    def difference(self) -> Difference | None: ...
    def step(self) -> None: ...
    def close(self) -> None: ...


class StepEngine(Protocol):
    """`draftwood_model_runner.engine.Engine`, as far as its host uses it. All calls come from one thread."""

    @property
    def has_work(self) -> bool: ...
    @property
    def counts(self) -> EngineCounts: ...
    @property
    def kv_use(self) -> KVUse: ...
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
        grammars: compiles the formats of answers.
        info: sent to the service in `Ready`.
        preload: number of memories, the latest written, that are loaded at the start, for the strategy `strategy`.
        audit_share: of requests whose answers are audited.
        weights: of tenants, as the engine reads them at each step; 1 for those not named.
    """

    engine: StepEngine
    memory: Memory
    grammars: Grammars
    info: Any = None
    preload: int = 0
    strategy: str = ""
    audit_share: float = 0.0
    weights: dict[str, float] = field(default_factory=dict)
