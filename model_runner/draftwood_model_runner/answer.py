"""A finished answer, and where it differs from plain decoding. Picklable, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood_model_runner.output import Finish
from draftwood_model_runner.request import Request
from draftwood_model_runner.sequence import Grammar

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
