"""Metrics of a sequence, and of an engine. They are reported, and nothing is decided by them."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from operator import add
from typing import Any, NamedTuple

from draftwood_strategies.base import SourceCounts

FORMAT_SOURCE = "format"
"""The source of draft tokens that the grammar of the output forces."""


class EngineCounts(NamedTuple):
    """Steps of an engine, and the seconds that they and their forward passes took.

    Attributes:
        microbatches: steps of half of the sequences, in flight while the host worked on the others, see
            `drafting.microbatches`.
    """

    steps: int = 0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    microbatches: int = 0

    def plus(self, other: EngineCounts) -> EngineCounts:
        """Both together."""
        return EngineCounts(*map(add, self, other))


@dataclass(slots=True)
class SequenceStats:
    """What a sequence cost and what drafting gained. Times in seconds, on the clock of `time.perf_counter`.

    Attributes:
        pauses: how often it gave up its slot because the client did not read.
        decode_steps: steps that wrote tokens.
        proposed_tokens: draft tokens that the strategy proposed.
        drafts: steps with draft tokens.
        draft_tokens: draft tokens that were verified, those that a grammar forces included.
        accepted_by_depth: for each depth of the draft tree, in how many steps a node of it was accepted.
        draft_seconds: time in the drafter.
        step_seconds, model_seconds: time of the steps that the sequence took part in, and of their forward passes.
        suspensions: how often drafting, or a part of it, was suspended since it took longer than it saved.
        drafting_disabled_reason: why drafting was switched off; "" while it is on.
        by_source: verified and accepted draft tokens by source, for a strategy that combines several.
    """

    arrived_at: float = 0.0
    first_scheduled_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    pauses: int = 0
    decode_steps: int = 0
    proposed_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    step_seconds: float = 0.0
    model_seconds: float = 0.0
    suspensions: int = 0
    drafting_disabled_reason: str = ""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)

    def record_step(self, drafted: int, accepted: int) -> None:
        """Counts a step that verified `drafted` draft tokens and accepted some of them."""
        if self.decode_steps == 0:
            self.first_token_at = time.perf_counter()
        self.decode_steps += 1
        self.drafts += drafted > 0
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.accepted_by_depth.extend([0] * (accepted - len(self.accepted_by_depth)))
        for depth in range(accepted):
            self.accepted_by_depth[depth] += 1

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
        of_all = {one.name: [getattr(part, one.name) for part in parts] for one in fields(cls)}
        return cls(**{name: _OVER_SAMPLES.get(name, sum)(values) for name, values in of_all.items()})


_OVER_SAMPLES: dict[str, Callable[[list[Any]], Any]] = {
    **dict.fromkeys(("arrived_at", "first_scheduled_at", "first_token_at"), min),
    **dict.fromkeys(("finished_at", "pauses", "step_seconds", "model_seconds"), max),
    "accepted_by_depth": lambda parts: [sum(steps) for steps in zip_longest(*parts, fillvalue=0)],
    "drafting_disabled_reason": lambda reasons: next(filter(None, reasons), ""),
    "by_source": SourceCounts.summed,
}
"""How the values of several samples make one; those of other fields are summed."""
