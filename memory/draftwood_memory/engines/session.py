"""One live request of an engine, from its first token to its end, and its row in a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from draftwood_memory.engines.options import RequestOptions
from draftwood_memory.memory import Learning
from draftwood_memory.records import Int32Array
from draftwood_strategies.draft_engine.engine import DraftSession
from draftwood_strategies.draft_engine.step_times import StepSize
from draftwood_strategies.drafting import Drafting

_NOTHING = np.empty(0, np.int32)


class Row(NamedTuple):
    """A request in the engine's step.

    Attributes:
        tokens: int32[n] or another type of whole numbers: its prompt and all that it wrote, this step's tokens too.
        prompt: tokens of its prompt; 0 if they are not known, as of embeddings.
        max_draft_tokens: how many tokens of a chain, or levels of a tree, may be drafted; 0 or less for none.
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
    drafting: Drafting
    learns: bool


class Step(NamedTuple):
    """A step of the engine that was drafted for.

    Attributes:
        number: counts the steps of the engine.
        began: on the clock of `time.perf_counter`.
    """

    number: int
    size: StepSize
    began: float


@dataclass(eq=False, slots=True)
class Session(DraftSession):
    """A request that is drafted for. Its drafter is None until its memory is there, and for a request without drafts.

    Attributes:
        options: what the request says of its drafts.
        learning: its use of the memory; None if nothing is learned of it.
        output: what it wrote, in pieces.
        seen: tokens of prompt and output that were taken.
        step: that it was drafted for last.
        ended: it was closed.
        stop_token_ids: tokens that end it.
        disabled_reported: the listener of drafts knows that drafting was switched off for it.
    """

    request: SessionRequest
    options: RequestOptions = field(kw_only=True)
    learning: Learning | None = None
    output: list[Int32Array] = field(default_factory=list)
    seen: int = 0
    step: Step | None = None
    ended: bool = False
    stop_token_ids: Collection[int] = ()
    disabled_reported: bool = False

    def advance(self, written: Int32Array, now: float) -> int:
        """Adds the tokens of the step that ends now: those that it accepted of its draft, and one more. Returns how
        many were accepted; the engine may have verified less than was drafted."""
        self.output.append(written)
        self.seen += written.shape[0]
        accepted = min(written.shape[0] - 1, self.drafted)
        self.stats.record_step(self.drafted, accepted, now)
        return accepted

    def finish(self, output: Int32Array) -> None:
        """It ended, having written `output`: less than what was taken, if it was cut, or more."""
        taken = self.seen - self.request.prompt.shape[0]
        rest = output[taken:]
        if taken > output.shape[0]:
            self.output = [output]
        elif rest.shape[0]:
            self.output.append(rest)
            if self.drafter is not None:
                self.drafter.defer(rest.tolist())
        self.seen = self.request.prompt.shape[0] + output.shape[0]

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
