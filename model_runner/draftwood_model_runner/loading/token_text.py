"""The text of an answer from the bytes of its tokens, for each kind of tokenizer.

A token's bytes are the same wherever it stands, so that what is streamed is what the tokens say together, a grammar's
text included. Decoders of the tokenizers library make exceptions: they drop the space that begins a text, and where a
byte-fallback tokenizer's bytes form no character, they replace the neighbours that do.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of a byte-fallback tokenizer."""
_BEFORE, _AFTER = "a", "b"
"""Tokens that no decoder changes."""
_KEPT = 1 << 16
"""Tokens whose bytes are kept."""


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
        self.special_ids: dict[str, int] = {one.content: token for token, one in added.items() if one.special}
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
            found = [self._bytes_of_characters.get(character) for character in text]
            return text.encode() if None in found else bytes(one for one in found if one is not None)
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
    return {decoder["type"]}.union(*(_kinds(one) for one in decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: those that can be shown stand for themselves, the others for U+0100 and on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(others)}
