"""What a step writes for a sequence, and how a sequence ends. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from draftwood_model_runner.sequence import Sequence
from draftwood_strategies.base import StepFeedback


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a sequence ended.

    Attributes:
        reason: why.
        stop_string: the stop string that ended it.
        stop_token_id: the end-of-sequence or stop token that ended it.
        error: what went wrong, if `reason` is ERROR.
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
class VerifiedTree:
    """The draft of one step.

    Attributes:
        token_ids: one for each node.
        parents: index of each node's parent; -1 for the last token before the step.
        accepted: indexes of the accepted nodes, from the root down.
    """

    token_ids: list[int]
    parents: list[int]
    accepted: list[int]

    @classmethod
    def of(cls, feedback: StepFeedback, row: int, accepted: list[int]) -> VerifiedTree:
        """That of a batch row of a step."""
        nodes = feedback.of_row(row)
        tokens, parents = feedback.tokens[nodes][1:], feedback.parents[nodes][1:] - 1  # without the root
        return cls(tokens.tolist(), parents.tolist(), accepted)


@dataclass(slots=True)
class StepOutput:
    """What one step wrote for one sequence. Not frozen: each step makes one for each sequence, in a third of the time.

    Attributes:
        token_ids: the tokens, in order; empty only with `finish`.
        texts: for each token the characters that it completed; "" while a character, or a possible start of a stop
            string, is incomplete. Text that was held back comes with the last token of the sequence.
        drafted: for each token, whether it came from a draft.
        finish: how the sequence ended, with its last output.
        logprobs: one for each token, if the request asks for them.
        tree: what was verified, if the request asks for it.
    """

    sequence: Sequence
    token_ids: list[int]
    texts: list[str]
    drafted: list[bool]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tree: VerifiedTree | None = None

    @classmethod
    def failed(cls, sequence: Sequence, error: Exception) -> StepOutput:
        """The end of a sequence by an error."""
        return cls(sequence, [], [], [], Finish(FinishReason.ERROR, error=error))
