"""What the server answers, as plain immutable values. No protobuf here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the end of the context."""
    UNKNOWN = "unknown"
    """One that this client is too old to know."""


@dataclass(frozen=True, slots=True)
class TokenDetail:
    """One token: the characters that it completed, and whether a draft had guessed it.

    Attributes:
        logprob: its log-probability by the model's own logits; None unless `top_logprobs` was asked for.
        top_logprobs: the most probable tokens, best first, as (token id, log-probability).
    """

    text: str
    drafted: bool
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """All tokens of one step, or of several where the reader is slower than the model.

    Attributes:
        text: whole characters; what an unfinished one lacks comes with a later delta.
        token_ids: the tokens.
        details: one for each token, where `token_details` was asked for.
        sample: which of several samples they belong to, from 0.
    """

    text: str
    token_ids: tuple[int, ...]
    details: tuple[TokenDetail, ...] = ()
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Started:
    """The server admitted the request.

    Attributes:
        strategy: the one that drafts; "none" when drafting is off.
        max_tokens: the most tokens that the answer can have.
        seed: the one that was used; sending it again writes the same answer.
    """

    request_id: str
    model: str
    tenant: str
    strategy: str
    prompt_tokens: int
    max_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, of the answer, and how many of the prompt's were cached."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds: from arrival to the first step, from there to the first token, from there to the last token."""

    queue: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        return self.queue + self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """Draft tokens that one strategy proposed, and how many of them were accepted."""

    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """What drafting did for one answer.

    Attributes:
        strategy: the one that drafted; "none" when drafting was off.
        mean_acceptance_length: tokens a decoding step, the model's own included: 1.0 without drafts.
        steps: decoding steps; prefill is not counted.
        draft_tokens: draft nodes that were verified.
        accepted_tokens: those of them that were accepted.
        accepted_by_depth: at d, the steps that accepted at least d + 1 draft tokens.
        by_source: by the strategy that proposed the node.
        draft_time: seconds spent drafting for this answer, learning included.
        step_time: seconds of the steps that this answer took part in.
        model_time: seconds of the model's forward passes among them.
        disabled_reason: why drafting was switched off in mid-stream; empty when it was not.
    """

    strategy: str
    mean_acceptance_length: float
    steps: int
    draft_tokens: int
    accepted_tokens: int
    accepted_by_depth: tuple[int, ...]
    by_source: Mapping[str, SourceStatistics]
    draft_time: float
    step_time: float
    model_time: float
    disabled_reason: str

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over verified ones; 0.0 without drafts."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """How one of several samples ended, and the seed that writes it again alone."""

    reason: FinishReason
    matched_stop: str | int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Finished:
    """How an answer ended; over all samples, where there are several.

    Attributes:
        reason: why; the first sample's.
        matched_stop: the stop string or the id of the stop token that ended it, if one did.
        samples: how each ended, where there are several.
    """

    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    samples: tuple[SampleFinished, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One of several answers to the same prompt, as in `Completion`."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    seed: int
    details: tuple[TokenDetail, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A whole answer: all deltas joined, with what `Started` and `Finished` said.

    Where several samples were asked for, text, tokens, finish reason and details are the first one's; `samples` has
    all of them, and usage, timings and drafting are over all.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    timings: Timings
    drafting: DraftStatistics
    request_id: str
    model: str
    tenant: str
    seed: int
    details: tuple[TokenDetail, ...] = ()
    samples: tuple[Sample, ...] = ()

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return (
            f"Completion({text!r}, {len(self.token_ids)} tokens, finish_reason={self.finish_reason.value!r}"
            + (f", matched_stop={self.matched_stop!r}" if self.matched_stop is not None else "")
            + (f", {len(self.samples)} samples" if self.samples else "")
            + f", mean_acceptance_length={self.drafting.mean_acceptance_length:.2f}, {self.timings.total:.3f} s"
            + f", request_id={self.request_id!r})"
        )


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids with the text of each; a token that is part of a character has U+FFFD."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server serves.

    Attributes:
        max_context_tokens: prompt and answer together.
        max_draft_nodes: the server's own cap on draft nodes a step.
        exact: answers are the same to the last bit with and without drafts, in any batch.
    """

    model: str
    architecture: str
    parameters: int
    dtype: str
    device: str
    vocab_size: int
    max_context_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    max_draft_nodes: int
    has_chat_template: bool
    strategies: tuple[str, ...]
    default_strategy: str
    eos_token_ids: tuple[int, ...]
    server_version: str
    exact: bool
