"""Text to token ids and back."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence as SequenceOf
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.checkpoint import cannot_be_loaded, require_folder
from draftwood_model_runner.loading.token_text import TokenBytes, TokenDecoder
from draftwood_model_runner.sampling.grammar_compilation import Vocabulary
from draftwood_strategies.draft import Int32Array

if TYPE_CHECKING:
    from draftwood_model_runner.sampling.grammar import GrammarCompiler

_log = logging.getLogger(__name__)
_SYSTEM_TEXT = "zq system"
"""A text that no chat template has."""
_ROLES = re.compile("system|user|assistant|tool|developer")


class Tokenizer:
    """A transformers tokenizer behind the few calls that serving needs. Safe to use from several threads.

    Attributes:
        class_path: module and name of transformers' class for it, with which another process loads the same tokenizer.
        token_bytes: the bytes of each token.

    Raises:
        UnsupportedModelError: the tokenizer has no fast (Rust) backend, which streaming text needs.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedModelError(
                f"tokenizer {type(tokenizer).__name__} has no fast backend; streaming text needs a tokenizer.json"
            )
        self._tokenizer = tokenizer
        self.class_path = f"{type(tokenizer).__module__}:{type(tokenizer).__qualname__}"
        self.token_bytes = TokenBytes(tokenizer.backend_tokenizer)
        self.has_chat_template: bool = tokenizer.chat_template is not None

    def encode(self, text: str) -> Int32Array:
        """int32[n], with the special tokens that the tokenizer puts around a text (such as BOS)."""
        return np.array(self._tokenizer(text, verbose=False).input_ids, np.int32)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template shows system messages, rather than refuse them or leave them out."""
        if not self.has_chat_template:
            return False
        turns = [{"role": "system", "content": _SYSTEM_TEXT}, {"role": "user", "content": "question"}]
        try:
            return _SYSTEM_TEXT in self.render(turns, None)
        except Exception:  # of the template, which may do anything
            return False

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Messages and tools through the model's chat template, which there must be, as they are before an answer.

        Raises:
            Exception: the template refuses them, or fails in any way.
        """
        text: str = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        return text

    def without_special_tokens(self, text: str) -> str:
        """Text of tokens as it is in an answer."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def encode_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Int32Array:
        """int32[n]: the messages through the model's chat template, ready for the assistant's answer.

        Args:
            messages, tools: as transformers' chat templates take them.

        Raises:
            InvalidValueError: the model has no chat template, or its template refuses the messages or fails; never has
                anything of their content.
        """
        if not self.has_chat_template:
            raise InvalidInputError("chat", None, "this model has no chat template; send text or token ids")
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:
            problem = f"the chat template of the model does not take them: {self._reason(error)}"
            raise InvalidInputError("chat.messages", None, problem) from None
        return np.array(ids, np.int32)

    def _reason(self, error: Exception) -> str:
        """Why a template failed: in its own words if it has them all, but for usual roles. Others may be users'."""
        words, template = str(error).strip(), str(self._tokenizer.chat_template)
        is_constant = words and all(part in template for part in _ROLES.split(words))
        return words if is_constant else type(error).__name__

    def decode(self, ids: SequenceOf[int] | Int32Array, include_special_tokens: bool = False) -> str:
        """A text of its own of token ids, as transformers decodes it: a space that many tokenizers put before a text is
        none of it. Bytes that form no character become U+FFFD."""
        text: str = self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=not include_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_ids(self) -> dict[str, int]:
        """All tokens with their ids, added ones included."""
        tokens: dict[str, int] = self._tokenizer.get_vocab()
        return tokens

    def check_ends(self, eos_token_ids: frozenset[int]) -> None:
        """Logs a warning if the end-of-sequence token that the tokenizer names is not one of the model's."""
        own = self._tokenizer.eos_token_id
        if own is not None and own not in eos_token_ids:
            _log.warning(
                "answers do not end at the tokenizer's end-of-sequence token, %d: the model's generation config names"
                " %s",
                own,
                ", ".join(map(str, sorted(eos_token_ids))) or "none",
            )

    def grammars(self, vocab_size: int, eos_token_ids: frozenset[int]) -> GrammarCompiler:
        """Grammars over this vocabulary, for logits of `vocab_size` columns and a model with these ends of answers."""
        from draftwood_model_runner.sampling.grammar import (
            GrammarCompiler,
        )  # imports torch, which the service does without

        return GrammarCompiler(self._tokenizer, vocab_size, eos_token_ids)

    def vocabulary(self, size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
        """As `grammars`, for another process."""
        return Vocabulary.of(self._tokenizer, size, eos_token_ids)

    def stream(self, include_special_tokens: bool = False) -> TokenDecoder:
        """A decoder for the tokens of an answer."""
        return TokenDecoder(self.token_bytes, include_special_tokens)


def load_tokenizer(path_or_id: str, class_path: str | None = None) -> Tokenizer:
    """The tokenizer of a model in a folder or on the hub, without the model.

    Args:
        class_path: `Tokenizer.class_path` as another process found it. It spares this one torch, which is imported to
            find it.

    Raises:
        ModelNotFoundError: there is no such model, or no tokenizer with it.
        UnsupportedModelError: the tokenizer has no fast backend.
    """
    require_folder(path_or_id)
    try:
        return Tokenizer(_tokenizer_class(class_path).from_pretrained(path_or_id))
    except (OSError, ValueError) as error:
        if Path(path_or_id).is_dir() and not any(Path(path_or_id).glob("tokenizer*")):
            raise ModelNotFoundError(
                f"model {path_or_id!r}: the folder has no tokenizer (tokenizer.json, tokenizer_config.json)"
            ) from error
        raise cannot_be_loaded(path_or_id, error, "tokenizer") from error


def import_transformers() -> None:
    """Imports what a tokenizer of a known class needs, half a second before it is loaded. Not torch."""
    from transformers import PreTrainedTokenizerFast  # noqa: F401


def _tokenizer_class(class_path: str | None) -> Any:
    if class_path is None:
        from transformers import AutoTokenizer

        return AutoTokenizer
    module, _, name = class_path.partition(":")
    return getattr(importlib.import_module(module), name)
