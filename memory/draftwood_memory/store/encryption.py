"""Encryption of stored values with AES-256-GCM, since token ids are users' text.

An encrypted value names its key, so that keys can be rotated: the first key of a ring encrypts, all of them decrypt.
Entries with an old key leave a memory as new ones come. Each memory has keys of its own, derived with HKDF-SHA256 from
those of the ring, so that no key comes near the 2^32 values that random nonces of 96 bits allow. Tag, purpose and
epoch are authenticated with a value: moved elsewhere, or brought back after a purge, it does not decrypt.
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from draftwood_memory.errors import CorruptValueError, InvalidSettingError, NewerFormatError, UnknownKeyError

_PLAIN, _AES_GCM = b"\x00", b"\x01"
_NONCE_BYTES = 12
_KEY_BYTES = 32
_MAX_ID_BYTES = 32
_NAMING_ID = "names"
"""The id of the key that hides tenants' names. It stays when the others are rotated."""


class Cipher(Protocol):
    """Encrypts and decrypts values; `tag` is their memory's, `context` what they are in it."""

    def encrypt(self, value: bytes, tag: str, context: str) -> bytes: ...

    def decrypt(self, data: bytes, tag: str, context: str) -> bytes:
        """Raises CorruptValueError, NewerFormatError, UnknownKeyError."""


class Plain:
    """Stores values as they are, marked as plain."""

    def encrypt(self, value: bytes, tag: str, context: str) -> bytes:
        return _PLAIN + value

    def decrypt(self, data: bytes, tag: str, context: str) -> bytes:
        """Raises CorruptValueError, NewerFormatError, UnknownKeyError."""
        _require_known(data)
        if data[:1] == _AES_GCM:
            raise UnknownKeyError("the value is encrypted, and no key is set")
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

    def encrypt(self, value: bytes, tag: str, context: str) -> bytes:
        key_id = next(iter(self.keys))
        nonce = os.urandom(_NONCE_BYTES)
        named = key_id.encode()
        head = _AES_GCM + bytes([len(named)]) + named
        return head + nonce + _cipher(self.keys[key_id], tag).encrypt(nonce, value, _bound(head, tag, context))

    def decrypt(self, data: bytes, tag: str, context: str) -> bytes:
        """Raises CorruptValueError, NewerFormatError, UnknownKeyError."""
        _require_known(data)
        if data[:1] != _AES_GCM or len(data) < 2 or len(data) < 2 + data[1] + _NONCE_BYTES:
            raise CorruptValueError("the value is not encrypted, or is cut short")
        end = 2 + data[1]
        head, nonce, rest = data[:end], data[end : end + _NONCE_BYTES], data[end + _NONCE_BYTES :]
        key_id = head[2:].decode(errors="replace")
        if key_id not in self.keys:
            raise UnknownKeyError(f"the value is encrypted with the key {key_id!r}, which is not configured")
        try:
            return _cipher(self.keys[key_id], tag).decrypt(nonce, rest, _bound(head, tag, context))
        except InvalidTag:
            raise CorruptValueError("the value was changed, or belongs elsewhere") from None


@lru_cache(maxsize=4096)
def _cipher(key: bytes, tag: str) -> AESGCM:
    """With the key of one memory. The cache spares every record a derivation."""
    derived = HKDF(hashes.SHA256(), _KEY_BYTES, salt=None, info=b"draftwood memory\x00" + tag.encode()).derive(key)
    return AESGCM(derived)


def _bound(head: bytes, tag: str, context: str) -> bytes:
    """What is authenticated with a value. Tags contain no zero byte, so no two triples are the same."""
    return b"\x00".join([head, tag.encode(), context.encode()])


def _require_known(data: bytes) -> None:
    """Raises CorruptValueError, NewerFormatError."""
    if not data:
        raise CorruptValueError("the value is empty")
    if data[:1] > _AES_GCM:
        raise NewerFormatError(f"the value has format {data[0]}; this program reads up to {_AES_GCM[0]}")


def read_keys(text: str, setting: str) -> KeyRing:
    """A ring from "ID=BASE64" items, separated by commas or lines. One id is "names"; the first other one encrypts.

    Args:
        setting: the setting that the text comes from. Errors name it and never contain the text.

    Raises:
        InvalidSettingError: the text does not have this form.
    """
    form = "give lines of ID=BASE64, each key 32 bytes (openssl rand -base64 32), one of them with the id names"
    keys: dict[str, bytes] = {}

    def refused(problem: str) -> InvalidSettingError:
        return InvalidSettingError(setting, None, f"{problem}; {form}")

    for number, line in enumerate(text.replace(",", "\n").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key_id, _, encoded = line.strip().partition("=")
        if not encoded.strip("=") or not 1 <= len(key_id.encode()) <= _MAX_ID_BYTES:
            # What is before the sign may be a key without an id.
            raise refused(f"key {number} has no id of 1 to {_MAX_ID_BYTES} bytes, or no value")
        try:
            key = base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise refused(f"the key {key_id!r} is not valid base64") from None
        if key_id in keys:
            raise refused(f"the id {key_id!r} occurs twice")
        if len(key) != _KEY_BYTES:
            raise refused(f"the key {key_id!r} has {len(key)} bytes")
        keys[key_id] = key
    naming_key = keys.pop(_NAMING_ID, None)
    if naming_key is None or not keys:
        raise refused("a key is missing")
    return KeyRing(keys, naming_key)


def read_key_file(path: Path, setting: str) -> KeyRing:
    """As `read_keys`. Raises InvalidSettingError also if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidSettingError(setting, path, f"cannot be read: {problem}") from None
    return read_keys(text, setting)
