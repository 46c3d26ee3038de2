"""Values at rest: plain, or sealed with AES-256-GCM, for token ids are users' text.

A sealed value names its key, so that keys can be exchanged: the first key of the ring seals, all of them open, and
folding seals anew. What a value belongs to is authenticated with it: moved to another key, it does not open.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from model_runner.errors import InvalidValueError
from service.memory.errors import CorruptValueError, UnknownKeyError

_PLAIN, _AES_GCM = b"\x00", b"\x01"
_NONCE_BYTES = 12
_KEY_BYTES = 32
_MAX_ID_BYTES = 32
NAMES = "names"
"""The id of the key that hides tenants' names; it stays when others are exchanged."""


class Sealer(Protocol):
    """Seals and opens values; `place` is what the value belongs to."""

    def seal(self, value: bytes, place: str) -> bytes: ...

    def open(self, sealed: bytes, place: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""


class PlainSealer:
    """Leaves values as they are."""

    def seal(self, value: bytes, place: str) -> bytes:
        return _PLAIN + value

    def open(self, sealed: bytes, place: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""
        if sealed[:1] == _AES_GCM:
            raise UnknownKeyError("the value is encrypted, and no key is set")
        if sealed[:1] != _PLAIN:
            raise CorruptValueError("the value has no known form")
        return sealed[1:]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """AES-256-GCM with several keys.

    Attributes:
        keys: 32 bytes by id, the one that seals first.
        names: 32 bytes that hide tenants' names.
    """

    keys: dict[str, bytes] = field(repr=False)
    names: bytes = field(repr=False)

    def seal(self, value: bytes, place: str) -> bytes:
        key_id = next(iter(self.keys))
        nonce = os.urandom(_NONCE_BYTES)
        head = _AES_GCM + bytes([len(key_id)]) + key_id.encode()
        return head + nonce + AESGCM(self.keys[key_id]).encrypt(nonce, value, head + place.encode())

    def open(self, sealed: bytes, place: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""
        if sealed[:1] != _AES_GCM or len(sealed) < 2 + sealed[1] + _NONCE_BYTES:
            raise CorruptValueError("the value is not encrypted as it should be")
        end = 2 + sealed[1]
        head, nonce, rest = sealed[:end], sealed[end : end + _NONCE_BYTES], sealed[end + _NONCE_BYTES :]
        key_id = head[2:].decode(errors="replace")
        if key_id not in self.keys:
            raise UnknownKeyError(f"the value is encrypted with the key {key_id!r}, which is not given")
        try:
            return AESGCM(self.keys[key_id]).decrypt(nonce, rest, head + place.encode())
        except InvalidTag:
            raise CorruptValueError("the value was changed, or belongs elsewhere") from None


def read_keys(text: str, setting: str) -> KeyRing:
    """A ring of "ID=BASE64" separated by commas or lines; one id is "names", the first other one seals.

    Args:
        setting: where the text comes from; errors name it and never the text.

    Raises:
        InvalidValueError: the text is not of that form.
    """
    form = "it must be lines of ID=BASE64 with 32 bytes each, one of them named names"
    keys: dict[str, bytes] = {}
    for line in text.replace(",", "\n").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key_id, _, encoded = line.strip().partition("=")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise InvalidValueError(setting, f"the key {key_id!r}", form) from None
        if len(key) != _KEY_BYTES or not 1 <= len(key_id.encode()) <= _MAX_ID_BYTES or key_id in keys:
            raise InvalidValueError(setting, f"the key {key_id!r}", form)
        keys[key_id] = key
    names = keys.pop(NAMES, None)
    if names is None or not keys:
        raise InvalidValueError(setting, f"{len(keys)} keys", form)
    return KeyRing(keys, names)


def read_key_file(path: Path, setting: str) -> KeyRing:
    """As `read_keys`. Raises InvalidValueError also where the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValueError(setting, str(path), f"it must be a file that can be read: {error}") from None
    return read_keys(text, setting)
