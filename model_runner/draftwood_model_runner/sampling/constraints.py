"""Applies a model's `Constraints` to logits, by the processors of transformers' `generate` and in their order."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from draftwood_model_runner.sampling.generation_defaults import Constraints
from draftwood_strategies.draft import Int32Array


class ConstrainedLogits:
    """The constraints of one answer; remembers its tokens.

    Args:
        prompt: int32[p].
        max_tokens: new tokens at most.
        eos_token_ids: the model's end-of-sequence tokens.
    """

    def __init__(self, of: Constraints, prompt: Int32Array, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._ids = torch.empty(1, prompt.size + max_tokens, dtype=torch.long)
        self._ids[0, : prompt.size] = torch.from_numpy(prompt)
        self._length = int(prompt.size)
        self._processors = LogitsProcessorList()
        if of.no_repeat_ngram_size:
            self._processors.append(NoRepeatNGramLogitsProcessor(of.no_repeat_ngram_size))
        if of.bad_words:
            eos = torch.tensor(sorted(eos_token_ids)) if eos_token_ids else None
            self._processors.append(NoBadWordsLogitsProcessor([list(words) for words in of.bad_words], eos))
        if of.forced_last:
            self._processors.append(ForcedEOSTokenLogitsProcessor(self._ids.shape[1], list(of.forced_last)))
        if of.suppressed:
            self._processors.append(SuppressTokensLogitsProcessor(list(of.suppressed)))
        if of.suppressed_first:
            first = list(of.suppressed_first)
            self._processors.append(SuppressTokensAtBeginLogitsProcessor(first, self._length))

    def process(self, scores: torch.Tensor) -> torch.Tensor:
        """float32[vocab], -inf for what may not be written next."""
        ids: Any = self._ids[:, : self._length]
        processed: torch.Tensor = self._processors(ids, scores[None])
        return processed[0]

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        self._ids[0, self._length] = token
        self._length += 1
