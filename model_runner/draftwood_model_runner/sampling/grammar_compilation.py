"""Compiles grammars with llguidance, within limits. Without torch, for a process that does nothing else.

llguidance needs no table over the vocabulary for each grammar, computes forced tokens, and is one small wheel (MIT).
xgrammar needs triton and the runtime of a tensor compiler.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import llguidance
import numpy as np
import numpy.typing as npt

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import GrammarKind

UInt8Array: TypeAlias = npt.NDArray[np.uint8]

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as `json.dumps` writes it. A small model fills pages with blanks if it may, and blanks cannot be drafted.
A schema's own "x-guidance" overrides this."""

_LIMITS = {"step_lexer_fuel": 100_000, "step_max_items": 5_000, "max_lexer_states": 50_000, "verbose_errors": False}
"""For a token: about 7 ms in the lexer by llguidance's own figures, and 10 ms for the mask and 6 ms to accept it in the
parser, measured with `e: e e | /[a-z]/`; 20,000 items allowed 750 and 600 ms. A schema with 460 optional properties
needs fewer than 2,000. For a grammar: 100 MB."""

_ANSWERS, _ANSWER_TOKENS, _ANSWERS_SECONDS = 8, 60, 0.1
"""Answers that are written of each grammar, of so many tokens each at most, and CPU seconds after which no more tokens
are tried. Those of ordinary schemas take 5 ms together."""
_CLOSING = frozenset(b'"{}[]:, ')
"""Bytes of tokens that end a text in JSON, where nearly every token may follow: half of the time one of these does."""

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
        size: columns of the model's logits. The tokenizer may have more or fewer tokens; no grammar has what is beyond.
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
            eos_token_ids: of the model. If it has none, only the tokenizer's may end a text.
        """
        backend = tokenizer.backend_tokenizer
        if (backend.padding, backend.truncation) != (None, None):
            backend = copy(backend)  # takes half a second and 0.1 GB if the vocabulary is large
            backend.no_padding()
            backend.no_truncation()
        end: int | None = tokenizer.eos_token_id
        ids = eos_token_ids or ([] if end is None or end >= size else [end])
        eos = tuple(sorted(ids, key=lambda token: (token != end, token)))
        added = backend.get_added_tokens_decoder()
        text_tokens = tuple(
            token for token, entry in added.items() if not entry.special and token not in eos and token < size
        )
        return cls(backend.to_str(), size, eos, text_tokens)

    def load(self) -> llguidance.LLTokenizer:
        """Takes a second if the vocabulary is large."""
        tokenizer = self._load(self.definition)
        special = any(tokenizer.is_special_token(token) for token in self.text_tokens)
        if tokenizer.vocab_size <= self.size and not special:
            return tokenizer
        return self._load(llguidance.TokenizerWrapper(_Retyped(tokenizer, self)))

    def _load(self, source: str | llguidance.TokenizerWrapper) -> llguidance.LLTokenizer:
        """With more tokens than `size` if the source has more, counted with an end of text that it may lack."""

        def with_ends(ends: int | list[int] | None) -> llguidance.LLTokenizer:
            try:
                return llguidance.LLTokenizer(source, n_vocab=self.size, eos_token=ends)
            except ValueError:
                return llguidance.LLTokenizer(source, eos_token=ends)

        if len(self.eos) > 1:
            with suppress(TypeError):  # llguidance before 1.7 takes one
                return with_ends([*self.eos])
        return with_ends(self.eos[0] if self.eos else None)


class _Retyped:
    """A tokenizer with those of its tokens that a vocabulary has, of which `text_tokens` are text, in the form that
    llguidance reads tokenizers of others in."""

    bos_token_id = None

    def __init__(self, tokenizer: llguidance.LLTokenizer, of: Vocabulary) -> None:
        self._tokenizer, self._size = tokenizer, of.size
        end = tokenizer.eos_token
        self.eos_token_id = end if end < of.size else None
        ids = range(min(tokenizer.vocab_size, of.size))
        self.tokens = [tokenizer.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokenizer.is_special_token(token) and token not in of.text_tokens
        ]
        self._of_byte = {text[0]: token for token, text in enumerate(self.tokens) if len(text) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """In place of a token that the vocabulary lacks those of its bytes, as far as there are any."""
        ids: list[int] = []
        for token in self._tokenizer.tokenize_bytes(text):
            if token < self._size:
                ids.append(token)
            else:
                lacking = self._tokenizer.decode_bytes([token])
                ids += [self._of_byte[byte] for byte in lacking if byte in self._of_byte]
        return ids


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
        raise _invalid(kind, problem_of(matcher))
    return matcher


def problem_of(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a grammar that cannot be followed any further, in words."""
    reason = _one_line(matcher.get_error())
    return (
        "can lead an answer to where nothing is allowed, not even its end"
        if reason == "NoExtensionBias"
        else f"is too complex: {reason}"
    )


def too_complex(matcher: llguidance.LLMatcher) -> InvalidValueError:
    """The error of a grammar that cannot be followed any further in the middle of an answer."""
    return InvalidInputError("format", None, problem_of(matcher))


class AnswersAtRandom:
    """Some answers that a grammar allows, the same ones each time. They find where nothing is allowed, and where
    llguidance's limits end."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        tokens = map(tokenizer.decode_bytes, ([token] for token in range(tokenizer.vocab_size)))
        closing = [_CLOSING.issuperset(text or b"x") for text in tokens]
        self._closing: UInt8Array = np.packbits(closing, bitorder="little")

    def problem(self, matcher: llguidance.LLMatcher, kind: GrammarKind) -> InvalidValueError | None:
        """What they find of a grammar that is at its beginning, and stays there."""
        until = time.process_time() + _ANSWERS_SECONDS
        for seed in range(_ANSWERS):
            state, chance = matcher.deep_copy(), random.Random(seed)
            for _ in range(_ANSWER_TOKENS):
                allowed = np.frombuffer(state.compute_bitmask(), np.uint8, self._closing.size)
                if state.is_stopped() or time.process_time() > until:
                    break
                state.consume_token(self._token(allowed, chance))
            if state.is_error():
                return InvalidInputError(f"format.{kind.value}", None, problem_of(state))
        return None

    def _token(self, allowed: UInt8Array, chance: random.Random) -> int:
        """One of a mask."""
        if chance.random() < 0.5 and (closing := allowed & self._closing).any():
            allowed = closing
        at = int(chance.choice(np.flatnonzero(allowed)))
        return 8 * at + chance.choice([bit for bit in range(8) if allowed[at] >> bit & 1])


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
