"""What drafting reads and reports of a sequence of any engine."""

from __future__ import annotations

from typing import Protocol

from draftwood_strategies.base import SourceCounts, Strategy
from draftwood_strategies.native import Int32Array


class DraftStatistics(Protocol):
    """What drafting reports of a sequence, see `draftwood_model_runner.statistics.SequenceStats`."""

    proposed_tokens: int
    draft_seconds: float
    suspensions: int
    drafting_disabled_reason: str
    by_source: dict[str, SourceCounts]


class DraftedRequest(Protocol):
    """What drafting reads of a request, see `draftwood_model_runner.request.Request`."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt(self) -> Int32Array: ...
    @property
    def strategy_name(self) -> str: ...
    @property
    def max_draft_nodes(self) -> int: ...
    @property
    def learns(self) -> bool: ...


class DraftedSequence(Protocol):
    """A sequence of any engine that drafts are made for, see `draftwood_model_runner.sequence.Sequence`."""

    @property
    def request(self) -> DraftedRequest: ...
    @property
    def stats(self) -> DraftStatistics: ...
    @property
    def strategy(self) -> Strategy | None: ...
