"""What a sequence writes: the outputs of steps, the text in them with its stop conditions, and finished answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from draftwood_model_runner.request import Request, StopParams
from draftwood_model_runner.sequence import Grammar, Sequence
from draftwood_strategies.base import StepFeedback

ENDING_DIFFERS = float("inf")
"""The margin if all tokens are the same but the answer ended at another one, or for another reason."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One sample of a request that has ended by itself.

    Attributes:
        output: its tokens.
        grammar: of its format, at the beginning; used up by a `Redecoding`.
    """

    request: Request
    output: tuple[int, ...]
    finish: Finish
    grammar: Grammar | None = None

    @property
    def tokens(self) -> int:
        """Of prompt and output."""
        return int(self.request.prompt.size) + len(self.output)


@dataclass(frozen=True, slots=True)
class Difference:
    """Where an answer first differs from plain decoding.

    Attributes:
        position: of the token in the output, from 0.
        margin: by how much the logits of plain decoding would have to be off for the other token, over the largest of
            them; infinite for a token that may not be written there, and for another end.
    """

    position: int
    margin: float


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


class TextDecoder(Protocol):
    """Tokens in, whole characters out: `loading.tokenizer.TokenDecoder`."""

    def push(self, token: int) -> str: ...
    def close(self) -> str: ...


class OutputText:
    """The output of a sequence as text: decides token by token what may be sent, and when the sequence ends.

    Text that may be the start of a stop string is held back until it cannot be.
    """

    def __init__(self, decoder: TextDecoder, stop: StopParams, eos_token_ids: frozenset[int]) -> None:
        self._decoder = decoder
        self._stop = stop
        self._ends = stop.token_ids if stop.ignore_eos else stop.token_ids | eos_token_ids
        self._count = 0
        self._held = ""

    def write(self, tokens: list[int]) -> tuple[list[str], Finish | None]:
        """The text of each token up to one that ends the output, and how the sequence ends if one does."""
        count = self._count + len(tokens)
        if not self._stop.strings and count < self._stop.max_tokens and self._ends.isdisjoint(tokens):
            self._count = count  # none of them can end the output, and no text is held back
            return [*map(self._decoder.push, tokens)], None
        texts = []
        for token in tokens:
            text, finish = self.push(token)
            texts.append(text)
            if finish is not None:
                return texts, finish
        return texts, None

    def push(self, token: int) -> tuple[str, Finish | None]:
        """The text that may be sent now, and how the sequence ends if this token ends it."""
        self._count += 1
        if token in self._ends and self._count > self._stop.min_tokens:
            return self._ended(self._decoder.push(token)), Finish(FinishReason.STOP, stop_token_id=token)
        text = self._held + self._decoder.push(token)
        if self._stop.strings and self._count > self._stop.min_tokens:
            matches = [(at, s) for s in self._stop.strings if (at := text.find(s)) >= 0]
            if matches:
                at, matched = min(matches)
                self._held = ""
                return text[:at], Finish(FinishReason.STOP, stop_string=matched)
        if self._count >= self._stop.max_tokens:
            self._held = ""
            return text + self._decoder.close(), Finish(FinishReason.LENGTH)
        if not self._stop.strings:
            return text, None
        keep = max(_overlap(text, s) for s in self._stop.strings)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def end(self) -> tuple[str, Finish]:
        """The text that is held back, if the output is complete without a token or a stop string that says so."""
        return self.rest(), Finish(FinishReason.STOP)

    def rest(self) -> str:
        """The text that is held back, if the output ends otherwise."""
        return self._ended("")

    def _ended(self, text: str) -> str:
        text, self._held = self._held + text + self._decoder.close(), ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
