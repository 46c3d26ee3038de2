"""The text of an answer from the bytes of its tokens, for each kind of tokenizer.

A token's bytes are the same wherever it stands, so that what is streamed is what the tokens say together, a grammar's
text included. Decoders of the tokenizers library make exceptions: they drop the space that begins a text, and where a
byte-fallback tokenizer's bytes form no character, they replace the neighbours that do.
"""

from __future__ import annotations

import codecs
import importlib
import inspect
import json
import logging
import re
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, TemplateError, nodes
from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.meta import find_undeclared_variables

from draftwood_model_runner.errors import InvalidInputError, ModelNotFoundError, UnsupportedModelError
from draftwood_model_runner.loading.checkpoint import cannot_be_loaded, require_folder
from draftwood_model_runner.sampling.grammar_compilation import Vocabulary
from draftwood_strategies.arrays import Int32Array

if TYPE_CHECKING:
    from draftwood_model_runner.sampling.grammar import GrammarCompiler


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of a byte-fallback tokenizer."""
_BEFORE, _AFTER = "a", "b"
"""Tokens that no decoder changes."""
_KEPT = 1 << 16
"""Tokens whose bytes are kept."""

_GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""A tag of transformers' own, which says what of a chat the model wrote."""
_SET_BY_RENDERING = ("messages", "raise_exception", "strftime_now")
"""By transformers' `render_jinja_template`, besides its parameters."""
_log = logging.getLogger(__name__)
_SYSTEM_TEXT = "zq system"
"""A text that no chat template has."""
_ROLES = re.compile("system|user|assistant|tool|developer")


class TokenBytes:
    """The bytes of tokens.

    Args:
        backend: of the tokenizers library, a `Tokenizer`.

    Attributes:
        special_ids: ids of special tokens by their names.
        special: these ids. They are no text of an answer, unless they are asked for.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        kinds = _kinds(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        self._bytes_of_characters = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        self._of = lru_cache(_KEPT)(self._read)
        added = backend.get_added_tokens_decoder()
        self.special_ids: dict[str, int] = {entry.content: token for token, entry in added.items() if entry.special}
        self.special = frozenset(self.special_ids.values())

    def __call__(self, token: int) -> bytes:
        """Those of a token; empty for an id that the tokenizer does not have."""
        return self._of(token)

    def text(self, token: int) -> str:
        """Those of a token as text; U+FFFD for bytes that are no characters by themselves."""
        return self._of(token).decode(errors="replace")

    def _read(self, token: int) -> bytes:
        text: str | None = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._bytes_of_characters is not None:
            values = [self._bytes_of_characters.get(character) for character in text]
            return text.encode() if None in values else bytes(value for value in values if value is not None)
        if self._byte_fallback and (byte := _BYTE.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return self._between_others(text).encode()

    def _between_others(self, token: str) -> str:
        """The text of a token in the middle of a text."""
        if self._backend.decoder is None:
            return f" {token}"
        decode = self._backend.decoder.decode
        whole: str = decode([_BEFORE, token, _AFTER])
        end = decode([_BEFORE, _AFTER]).removeprefix(_BEFORE)
        return whole.removeprefix(_BEFORE).removesuffix(end)


class TokenDecoder:
    """Tokens in, whole characters out. Bytes that form no character become U+FFFD.

    Args:
        include_special_tokens: as text.
    """

    def __init__(self, token_bytes: TokenBytes, include_special_tokens: bool = False) -> None:
        self._bytes_of = token_bytes
        self._left_out = frozenset[int]() if include_special_tokens else token_bytes.special
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that `token` completed; "" while one is not whole."""
        return "" if token in self._left_out else self._characters.decode(self._bytes_of(token))

    def close(self) -> str:
        """What is left of a character that is not whole."""
        return self._characters.decode(b"", final=True)


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The kinds of a decoder and of those that it consists of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_kinds(part) for part in decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: those that can be shown stand for themselves, the others for U+0100 and on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _read_by(template: nodes.Template) -> set[str]:
    """Variables that a template has from outside. One that it sets itself is none of them, unless it asks whether it is
    there: "is not defined" before a default."""
    own = {name.name for name in template.find_all(nodes.Name) if name.ctx == "store"}
    tests = [test.node for test in template.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    asked = {node.name for node in tests if isinstance(node, nodes.Name)}
    return find_undeclared_variables(template) - (own - asked)


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

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads and a caller may set: none that transformers sets, such as the
        messages, its functions and special tokens; none of a template that cannot be parsed."""
        given = self._tokenizer.chat_template or ""
        environment = Environment(extensions=["jinja2.ext.loopcontrols"])
        texts = given.values() if isinstance(given, dict) else [given]
        try:
            read = {name for text in texts for name in _read_by(environment.parse(_GENERATION.sub("", text)))}
        except TemplateError:
            return frozenset()
        own = {
            *inspect.signature(self._tokenizer.apply_chat_template).parameters,
            *DEFAULT_NAMESPACE,
            *_SET_BY_RENDERING,
        }
        return frozenset(name for name in read - own if not name.endswith("_token"))

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Messages and tools through the model's chat template, which there must be.

        Args:
            add_generation_prompt: with what stands before the next answer of the assistant.
            variables: of the template, whose names are in `template_variables`.

        Raises:
            Exception: the template refuses them, or fails in any way.
        """
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **variables
        )
        return text

    def files(self) -> dict[str, bytes]:
        """The tokenizer's files as transformers writes them, by name: who loads them gets this tokenizer."""
        with tempfile.TemporaryDirectory(prefix="draftwood-tokenizer-") as folder:
            self._tokenizer.save_pretrained(folder)
            return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}

    def without_special_tokens(self, text: str) -> str:
        """Text of tokens as it is in an answer."""
        for token in self._tokenizer.all_special_tokens:
            text = text.replace(token, "")
        return text

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> Int32Array:
        """int32[n]: the messages through the model's chat template, ready for the assistant's answer.

        Args:
            messages, tools: as transformers' chat templates take them.
            variables: see `render`.

        Raises:
            InvalidValueError: the model has no chat template, or its template refuses the messages or fails; never has
                anything of their content.
        """
        if not self.has_chat_template:
            raise InvalidInputError("chat", None, "this model has no chat template; send text or token ids")
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=True, add_generation_prompt=True, return_dict=False, **variables
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
        end = self._tokenizer.eos_token_id
        if end is not None and end not in eos_token_ids:
            _log.warning(
                "answers do not end at the tokenizer's end-of-sequence token, %d: the model's generation config names"
                " %s",
                end,
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
