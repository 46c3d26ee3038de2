"""Compiles grammars with llguidance, within limits. Without torch, for a process that does nothing else.

llguidance needs no table over the vocabulary for each grammar, computes forced tokens, and is one small wheel (MIT).
xgrammar needs triton and the runtime of a tensor compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

import llguidance

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import GrammarKind

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as `json.dumps` writes it. A small model fills pages with blanks if it may, and blanks cannot be drafted.
A schema's own "x-guidance" overrides this."""

_LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 5_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""For a token: about 7 ms in the lexer by llguidance's own figures, and 10 ms for the mask and 6 ms to accept it in the
parser, measured with `e: e e | /[a-z]/`; 20,000 items allowed 750 and 600 ms. A schema with 460 optional properties
needs fewer than 2,000. For a grammar: 100 MB."""

_NOT_VALID = {
    GrammarKind.JSON_SCHEMA: "not a valid JSON schema",
    GrammarKind.REGEX: "not a valid regular expression",
    GrammarKind.LARK: "not a valid grammar",
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, as grammars need it; can be pickled.

    Attributes:
        definition: the tokenizer as JSON.
        size: columns of the model's logits; may exceed the tokenizer's own.
        eos: the tokens that end an answer; empty for llguidance's guess.
        text_tokens: added tokens that are in the text of an answer, such as <tool_call>. llguidance takes all added
            tokens in angle brackets for special ones, which no text of a grammar can be.
    """

    definition: str
    size: int
    eos: tuple[int, ...]
    text_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Any, size: int, eos_token_ids: Collection[int]) -> Vocabulary:
        """That of a fast transformers tokenizer.

        Args:
            eos_token_ids: of the model. If it has none, only the tokenizer's may end a text, and it ends no answer.
        """
        backend = tokenizer.backend_tokenizer
        if (backend.padding, backend.truncation) != (None, None):
            backend = copy(backend)  # takes half a second and 0.1 GB if the vocabulary is large
            backend.no_padding()
            backend.no_truncation()
        own: int | None = tokenizer.eos_token_id
        ids = eos_token_ids or ([] if own is None else [own])
        eos = tuple(sorted(ids, key=lambda token: (token != own, token)))
        added = backend.get_added_tokens_decoder()
        text_tokens = tuple(token for token, one in added.items() if not one.special and token not in eos)
        return cls(backend.to_str(), size, eos, text_tokens)

    def load(self) -> llguidance.LLTokenizer:
        """Takes a second if the vocabulary is large."""

        tokenizer = self._load(self.definition)
        if not any(tokenizer.is_special_token(token) for token in self.text_tokens):
            return tokenizer
        return self._load(llguidance.TokenizerWrapper(_Retyped(tokenizer, self.text_tokens)))

    def _load(self, source: str | llguidance.TokenizerWrapper) -> llguidance.LLTokenizer:
        def with_ends(ends: int | list[int] | None) -> llguidance.LLTokenizer:
            return llguidance.LLTokenizer(source, n_vocab=self.size, eos_token=ends)

        if len(self.eos) > 1:
            with suppress(TypeError):  # llguidance before 1.7 takes one
                return with_ends([*self.eos])
        return with_ends(self.eos[0] if self.eos else None)


class _Retyped:
    """A tokenizer whose `text_tokens` are text, in the form that llguidance reads tokenizers of others in."""

    bos_token_id = None

    def __init__(self, tokenizer: llguidance.LLTokenizer, text_tokens: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokenizer.is_special_token(token) and token not in text_tokens
        ]

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.tokenize_bytes(text)


def compiled(tokenizer: llguidance.LLTokenizer, kind: GrammarKind, text: str) -> llguidance.LLMatcher:
    """A grammar at its beginning, with the mask of its first token. The limits do not bound the time of this.

    Raises:
        InvalidValueError: the text is not a grammar of that kind, or too large a one; gives the reason.
    """
    limits = llguidance.LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    try:
        matcher = llguidance.LLMatcher(tokenizer, _to_grammar(kind, text), log_level=0, limits=limits)
    except ValueError as error:
        raise _invalid(kind, str(error)) from error
    matcher.compute_bitmask()
    if matcher.is_error():
        raise _invalid(kind, matcher.get_error())
    return matcher


def too_complex(matcher: llguidance.LLMatcher) -> InvalidValueError:
    """The error of a grammar that has met a limit in the middle of an answer."""
    return InvalidInputError("format", None, f"is too complex: {_one_line(matcher.get_error())}")


def _invalid(kind: GrammarKind, reason: str) -> InvalidValueError:
    return InvalidInputError(f"format.{kind.value}", None, f"{_NOT_VALID[kind]}: {_one_line(reason)}")


def _one_line(reason: str) -> str:
    return " ".join(reason.removesuffix("<non-verbose/>").split())


def _to_grammar(kind: GrammarKind, text: str) -> str:
    matcher = llguidance.LLMatcher

    def json_schema(schema: str) -> str:
        return str(matcher.grammar_from_json_schema(schema, JSON_LAYOUT))  # type: ignore[arg-type]

    makers: dict[GrammarKind, Callable[[str], str]] = {
        GrammarKind.JSON_SCHEMA: json_schema,
        GrammarKind.REGEX: matcher.grammar_from_regex,
        GrammarKind.LARK: matcher.grammar_from_lark,
    }
    return makers[kind](text)
