"""Structured output: which tokens a JSON schema, a regular expression or a Lark grammar allows next."""

from __future__ import annotations

import threading
from functools import cached_property
from typing import Any

import llguidance
import numpy as np
import torch

from model_runner.request import GrammarKind
from model_runner.sampling.grammar_compilation import Vocabulary, compiled, too_complex


class GrammarCompiler:
    """Grammars over one tokenizer's vocabulary. Compiling is safe from several threads, and leaves others the
    interpreter's lock.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: columns of the model's logits; may exceed the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return Vocabulary.of(self._source, self._vocab_size).load()

    def compile(self, kind: GrammarKind, text: str) -> GrammarState:
        """A grammar at its beginning. Takes as long and as much memory as the grammar needs, without a limit.

        Raises:
            InvalidValueError: the text is not a grammar of that kind, or too large a one; gives the reason.
        """
        with self._lock:
            tokenizer = self._tokenizer
        return GrammarState(compiled(tokenizer, kind, text), self._vocab_size)

    def check(self, kind: GrammarKind, text: str) -> None:
        """Raises what `compile` does."""
        self.compile(kind, text)


class GrammarState:
    """How far one sequence's output has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self, scores: torch.Tensor) -> None:
        """Sets the scores, float32[vocab], of tokens that are not allowed next to -inf.

        Raises:
            InvalidValueError: the mask takes too much work.
        """
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        if self._matcher.is_error():
            raise too_complex(self._matcher)
        scores[torch.from_numpy(bits[: self._vocab_size] == 0)] = -torch.inf

    def copy(self) -> GrammarState:
        """Another state at the same place, which goes its own way, its next mask computed."""
        copy = self._matcher.deep_copy()
        copy.compute_bitmask()
        return GrammarState(copy, self._vocab_size)

    def accept(self, token: int) -> None:
        """The output goes on with `token`, which the mask allowed.

        Raises:
            InvalidValueError: what may come then takes too much work to find out.
        """
        if not self._matcher.consume_token(token):
            raise too_complex(self._matcher)

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as only one is allowed each time."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens
