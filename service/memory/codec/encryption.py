"""Encryption of stored values with AES-256-GCM, since token ids are users' text.

An encrypted value names its key, so that keys can be rotated: the first key of a ring encrypts, all of them decrypt,
and folding re-encrypts. The value's context (memory and purpose) is authenticated with it: moved elsewhere, it
does not decrypt.
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

from model_runner.errors import InvalidInputError
from service.memory.errors import CorruptValueError, UnknownKeyError

_PLAIN, _AES_GCM = b"\x00", b"\x01"
_NONCE_BYTES = 12
_KEY_BYTES = 32
_MAX_ID_BYTES = 32
_NAMING_ID = "names"
"""The id of the key that hides tenants' names. It stays when the others are rotated."""


class Cipher(Protocol):
    """Encrypts and decrypts values; `context` is what the value belongs to."""

    def encrypt(self, value: bytes, context: str) -> bytes: ...

    def decrypt(self, data: bytes, context: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""


class Plain:
    """Stores values as they are, marked as plain."""

    def encrypt(self, value: bytes, context: str) -> bytes:
        return _PLAIN + value

    def decrypt(self, data: bytes, context: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""
        if data[:1] == _AES_GCM:
            raise UnknownKeyError("the value is encrypted, and no key is set")
        if data[:1] != _PLAIN:
            raise CorruptValueError("the value has no known format")
        return data[1:]


@dataclass(frozen=True, slots=True)
class KeyRing:
    """AES-256-GCM with several keys.

    Attributes:
        keys: 32 bytes by id; the first one encrypts.
        naming_key: 32 bytes that hide tenants' names.
    """

    keys: dict[str, bytes] = field(repr=False)
    naming_key: bytes = field(repr=False)

    def encrypt(self, value: bytes, context: str) -> bytes:
        key_id = next(iter(self.keys))
        nonce = os.urandom(_NONCE_BYTES)
        head = _AES_GCM + bytes([len(key_id)]) + key_id.encode()
        return head + nonce + AESGCM(self.keys[key_id]).encrypt(nonce, value, head + context.encode())

    def decrypt(self, data: bytes, context: str) -> bytes:
        """Raises CorruptValueError, UnknownKeyError."""
        if data[:1] != _AES_GCM or len(data) < 2 + data[1] + _NONCE_BYTES:
            raise CorruptValueError("the value is not encrypted, or is cut short")
        end = 2 + data[1]
        head, nonce, rest = data[:end], data[end : end + _NONCE_BYTES], data[end + _NONCE_BYTES :]
        key_id = head[2:].decode(errors="replace")
        if key_id not in self.keys:
            raise UnknownKeyError(f"the value is encrypted with the key {key_id!r}, which is not configured")
        try:
            return AESGCM(self.keys[key_id]).decrypt(nonce, rest, head + context.encode())
        except InvalidTag:
            raise CorruptValueError("the value was changed, or belongs elsewhere") from None


def read_keys(text: str, setting: str) -> KeyRing:
    """A ring from "ID=BASE64" items, separated by commas or lines. One id is "names"; the first other one encrypts.

    Args:
        setting: the setting that the text comes from. Errors name it and never contain the text.

    Raises:
        InvalidInputError: the text does not have this form.
    """
    form = "expected lines of ID=BASE64 with 32 bytes each, one of them with the id names"
    keys: dict[str, bytes] = {}
    for line in text.replace(",", "\n").splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key_id, _, encoded = line.strip().partition("=")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise InvalidInputError(setting, None, f"the key {key_id!r} is not valid base64; {form}") from None
        if len(key) != _KEY_BYTES or not 1 <= len(key_id.encode()) <= _MAX_ID_BYTES or key_id in keys:
            problem = f"the key {key_id!r} has {len(key)} bytes, a bad id or an id used before; {form}"
            raise InvalidInputError(setting, None, problem)
        keys[key_id] = key
    naming_key = keys.pop(_NAMING_ID, None)
    if naming_key is None or not keys:
        raise InvalidInputError(setting, None, f"a key is missing; {form}")
    return KeyRing(keys, naming_key)


def read_key_file(path: Path, setting: str) -> KeyRing:
    """As `read_keys`. Raises InvalidInputError also if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(setting, path, f"cannot be read: {error}") from None
    return read_keys(text, setting)
