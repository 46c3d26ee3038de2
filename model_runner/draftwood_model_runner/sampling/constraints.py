"""Applies a model's `Constraints` to logits, as transformers' `generate` does and in its order. No torch."""

from __future__ import annotations

import numpy as np

from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_strategies.draft import Float32Array, Int32Array


class ConstrainedLogits:
    """The constraints of one answer; remembers its tokens.

    Args:
        prompt: int32[p].
        max_tokens: new tokens at most.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, of: Constraints, prompt: Int32Array, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._of = of
        self._begin, self._last = prompt.size, prompt.size + max_tokens - 1
        self._bad_words = [words for words in of.bad_words if len(words) > 1 or words[0] not in eos_token_ids]
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], list[int]] = {}
        """The tokens that came after each run of one token less than `no_repeat_ngram_size`."""
        for token in prompt.tolist():
            self.accept(token)

    def process(self, scores: Float32Array) -> None:
        """Sets the scores, float32[vocab], of tokens that may not be written next to -inf."""
        of, tokens = self._of, self._tokens
        if of.no_repeat_ngram_size:
            scores[self._after.get(self._tail(of.no_repeat_ngram_size - 1), [])] = -np.inf
        for words in self._bad_words:
            if self._tail(len(words) - 1) == words[:-1]:
                scores[words[-1]] = -np.inf
        if of.forced_last and len(tokens) == self._last:
            scores[:] = -np.inf
            scores[list(of.forced_last)] = 0.0
        scores[list(of.suppressed)] = -np.inf
        if len(tokens) == self._begin:
            scores[list(of.suppressed_first)] = -np.inf

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        if size := self._of.no_repeat_ngram_size:
            before = self._tail(size - 1)
            if len(before) == size - 1:
                self._after.setdefault(before, []).append(token)
        self._tokens.append(token)

    def _tail(self, count: int) -> tuple[int, ...]:
        """The last tokens, so many or all."""
        return tuple(self._tokens[max(0, len(self._tokens) - count) :])
