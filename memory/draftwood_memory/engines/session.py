"""One live request of an engine, from its first token to its end, and its row in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.learning import Learning
from draftwood_memory.records import Int32Array
from draftwood_strategies.base import SourceCounts, Strategy
from draftwood_strategies.budgeting.guarded_drafter import GuardedDrafter

_NOTHING = np.empty(0, np.int32)


class Row(NamedTuple):
    """A request in the engine's step.

    Attributes:
        tokens: int32[n] or another type of whole numbers: its prompt and all that it wrote, this step's tokens too.
        prompt: tokens of its prompt; 0 if they are not known, as of embeddings.
        max_draft_tokens: how many tokens may be drafted; 0 or less for none.
        options: what the request carries, read when it is seen first.
        decodes: False during prefill: its prompt is not read to its end, but `tokens` has all of it.
        stop_token_ids: tokens that end it.
    """

    request_id: str
    tokens: np.ndarray[Any, np.dtype[Any]]
    prompt: int
    max_draft_tokens: int
    options: Mapping[str, Any] | None
    decodes: bool = True
    stop_token_ids: Collection[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class SessionRequest:
    """A `DraftedRequest`."""

    request_id: str
    prompt: Int32Array
    strategy_name: str
    max_draft_nodes: int
    learns: bool


@dataclass(slots=True)
class SessionStatistics:
    """What drafting did for a request, see `DraftStatistics`.

    Attributes:
        drafted, accepted: tokens of chains that were verified, and those of them that were written.
        decode_steps, drafts: steps that wrote tokens, and those of them that verified a chain.
        first_at, last_at: the ends of the first of them and of the last, on the clock of `time.perf_counter`.
    """

    proposed_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    decode_steps: int = 0
    drafts: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    draft_seconds: float = 0.0
    suspensions: int = 0
    drafting_disabled_reason: str = ""
    by_source: dict[str, SourceCounts] = field(default_factory=dict)


@dataclass(eq=False, slots=True, frozen=True)
class Step:
    """A step of the engine that was drafted for.

    Attributes:
        rows: how many requests it has.
        tokens: of it, drafts included.
        began: on the clock of `time.perf_counter`.
    """

    rows: int
    tokens: int
    began: float


@dataclass(eq=False, slots=True)
class Session:
    """A request that is drafted for; a `DraftedSequence`.

    Attributes:
        options: what the request says of its drafts.
        drafter: None until its memory is there, and for a request without drafts.
        learning: its use of the memory; None if nothing is learned of it.
        output: what it wrote, in pieces.
        seen: tokens of prompt and output that were taken.
        chain: the draft that the latest step verified.
        step: that it was drafted for last.
        ended: it was closed.
        stop_token_ids: tokens that end it.
        disabled_reported: the listener of drafts knows that drafting was switched off for it.
    """

    request: SessionRequest
    options: RequestOptions
    stats: SessionStatistics = field(default_factory=SessionStatistics)
    strategy: Strategy | None = None
    drafter: GuardedDrafter | None = None
    learning: Learning | None = None
    output: list[Int32Array] = field(default_factory=list)
    seen: int = 0
    chain: list[int] = field(default_factory=list)
    step: Step | None = None
    ended: bool = False
    stop_token_ids: Collection[int] = ()
    disabled_reported: bool = False

    def advance(self, written: Int32Array, now: float) -> int:
        """Adds the tokens of the step that ends now; returns how many tokens of its draft were accepted."""
        if not self.output:
            self.stats.first_at = now
        self.stats.last_at = now
        self.output.append(written)
        self.seen += written.shape[0]
        self.stats.decode_steps += 1
        self.stats.drafts += len(self.chain) > 0
        self.stats.drafted += len(self.chain)
        if not self.chain:
            return 0
        chain, self.chain = self.chain, []
        accepted = 0
        # The last token is the model's own, whether or not the draft goes on with it.
        for drafted, token in zip(chain, written[:-1].tolist(), strict=False):
            if drafted != token:
                break
            accepted += 1
        self.stats.accepted += accepted
        return accepted

    def close(self) -> None:
        """It ended, in whatever way: its memory learns what it wrote."""
        self.ended = True
        if self.drafter is not None:
            self.drafter.close()
        if self.learning is not None:
            learning, self.learning = self.learning, None
            with learning:
                if self.output:
                    prompt = self.request.prompt if self.options.with_prompt else _NOTHING
                    learning.learn(np.concatenate([prompt, *self.output]), self.options.sample)
