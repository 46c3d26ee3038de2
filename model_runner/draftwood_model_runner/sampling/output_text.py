"""Output text: detokenization with stop conditions, token by token. No torch."""

from __future__ import annotations

from typing import Protocol

from draftwood_model_runner.output import Finish, FinishReason
from draftwood_model_runner.request import StopParams


class TextDecoder(Protocol):
    """Tokens in, whole characters out; `loading.token_text.TokenDecoder`."""

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
            found = [(at, s) for s in self._stop.strings if (at := text.find(s)) >= 0]
            if found:
                at, matched = min(found)
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
