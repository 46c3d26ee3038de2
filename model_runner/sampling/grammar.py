"""Structured output: which tokens a JSON schema, a regular expression or a Lark grammar allows next.

llguidance does the work: it compiles in microseconds, needs no table over the vocabulary for each grammar, computes
forced tokens, and is one small wheel (MIT). xgrammar needs triton and the runtime of a tensor compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import llguidance
import llguidance.hf
import numpy as np
import torch

from model_runner.errors import InvalidValueError
from model_runner.request import GrammarKind

_JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as `json.dumps` writes it: free to, a small model fills pages with blanks, and blanks cannot be foretold.
A schema's own "x-guidance" has the last word."""


class GrammarCompiler:
    """Grammars over one tokenizer's vocabulary. Compiling is safe from several threads.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: columns of the model's logits; may exceed the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> Any:
        """Made at its first use, for it takes a second with a large vocabulary."""
        return llguidance.hf.from_tokenizer(self._source, n_vocab=self._vocab_size)

    def compile(self, kind: GrammarKind, text: str) -> GrammarState:
        """A grammar at its beginning.

        Raises:
            InvalidValueError: the text is not a grammar of that kind, or too large a one; gives the reason.
        """
        with self._lock:
            tokenizer = self._tokenizer
        try:
            matcher = llguidance.LLMatcher(tokenizer, _to_grammar(kind, text), log_level=0)
        except ValueError as error:
            raise _invalid(kind, text, str(error)) from error
        if matcher.is_error():
            raise _invalid(kind, text, matcher.get_error())
        return GrammarState(matcher, self._vocab_size)


class GrammarState:
    """How far one sequence's output has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def mask(self, scores: torch.Tensor) -> None:
        """Sets the scores, float32[vocab], of tokens that are not allowed next to -inf."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        scores[torch.from_numpy(bits[: self._vocab_size] == 0)] = -torch.inf

    def copy(self) -> GrammarState:
        """Another state at the same place, which goes its own way."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)

    def accept(self, token: int) -> None:
        """The output goes on with `token`, which the mask allowed."""
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"token {token} is outside the grammar: {self._matcher.get_error()}")

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as only one is allowed each time."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens


def _invalid(kind: GrammarKind, text: str, reason: str) -> InvalidValueError:
    return InvalidValueError(f"format.{kind.value}", text, f"it is not a valid one: {' '.join(reason.split())}")


def _to_grammar(kind: GrammarKind, text: str) -> str:
    matcher = llguidance.LLMatcher

    def json_schema(schema: str) -> str:
        return str(matcher.grammar_from_json_schema(schema, _JSON_LAYOUT))  # type: ignore[arg-type]

    makers: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: json_schema,
        GrammarKind.REGEX: matcher.grammar_from_regex,
        GrammarKind.LARK: matcher.grammar_from_lark,
    }
    return makers[kind](text)
