"""API keys: `dw_ID_SECRET`. The id finds the key's entry, the whole key is compared by its SHA-256.

A fast hash is enough: the secret is 256 random bits, so nobody finds it from its hash by trying, however fast a try is.
Slow hashes (argon2, bcrypt) protect passwords that people choose, and would cost each call 100 ms.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Iterable
from typing import NamedTuple

from draftwood_service.auth.auth_file import KeyEntry
from draftwood_service.auth.errors import UnauthenticatedError
from draftwood_service.auth.principal import Principal

PREFIX = "dw_"
"""Tells keys from other tokens, also to programs that look for leaked secrets."""
_ID_LENGTH = 12
_ID_LETTERS = string.ascii_lowercase + string.digits
_SECRET_BYTES = 32
_NOBODYS = "0" * 64
_FORM = re.compile(rf"{PREFIX}([a-z0-9]{{{_ID_LENGTH}}})_[A-Za-z0-9_-]{{43}}")


class NewKey(NamedTuple):
    """A key, which is shown once and not stored, and the two parts of its entry."""

    key: str
    id: str
    sha256: str


def new_key() -> NewKey:
    """A random key."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    key = f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(key, key_id, _hash(key))


class ApiKeys:
    """The keys of a server."""

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._entries = {entry.id: entry for entry in entries}

    def principal(self, key: str, now: float) -> Principal:
        """The caller of a key.

        Args:
            now: seconds since 1970.

        Raises:
            UnauthenticatedError: it is not a valid key.
        """
        form = _FORM.fullmatch(key)
        if form is None:
            raise UnauthenticatedError("not an API key")
        entry = self._entries.get(form[1])
        # Compared with nobody's where no key has the id, so that a refusal takes the same time with a known and an
        # unknown one.
        if not hmac.compare_digest(_hash(key), _NOBODYS if entry is None else entry.sha256) or entry is None:
            raise UnauthenticatedError("unknown API key" if entry is None else f"wrong secret of key {form[1]}")
        if entry.expires is not None and entry.expires.timestamp() <= now:
            raise UnauthenticatedError(f"key {form[1]} has expired")
        return entry.principal


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
