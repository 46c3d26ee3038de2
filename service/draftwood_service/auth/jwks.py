"""The public keys of an issuer of tokens (JWKS, RFC 7517), from a file or an https URL."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import jwt
import structlog

from draftwood_model_runner.errors import InvalidInputError
from draftwood_tenants.followed_file import FollowedFile

_log = structlog.get_logger(__name__)

SETTING = "jwt_jwks"
_MAX_BYTES = 2**20
_MAX_KEYS = 100
_REFRESH_SECONDS = 300.0
_RETRY_SECONDS = 10.0
"""After a failure; also the least time between two requests that unknown key ids cause, which anybody can send."""
_TIMEOUT_SECONDS = 5.0
_STALE_SECONDS = 24 * 3600.0
"""How long keys stay in use when their URL does not answer."""


class KeySet:
    """Keys by their ids, each for the allowed algorithms that it fits.

    Keys of other kinds are left out, symmetric ones among them.

    Raises:
        InvalidInputError: the data is no JWKS, or none of its keys can be used.
    """

    def __init__(self, data: bytes, algorithms: Sequence[str]) -> None:
        try:
            content = json.loads(data)
            keys = content["keys"] if isinstance(content, dict) else None
        except (ValueError, KeyError, RecursionError):
            keys = None
        if not isinstance(keys, list) or len(keys) > _MAX_KEYS:
            raise InvalidInputError(SETTING, None, f'must be a JSON object with "keys", a list of at most {_MAX_KEYS}')
        self._keys: dict[tuple[str | None, str], jwt.PyJWK] = {}
        for key in keys:
            for algorithm in algorithms:
                if usable := _usable(key, algorithm):
                    self._keys[key.get("kid"), algorithm] = usable
        if not self._keys:
            raise InvalidInputError(SETTING, None, f"has no key for signatures by {', '.join(algorithms)}")
        self._has_one = len(keys) == 1

    def find(self, key_id: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key of this id; the only key for a token without an id."""
        if key_id is None and self._has_one:
            return next((key for (_, its), key in self._keys.items() if its == algorithm), None)
        return self._keys.get((key_id, algorithm))


def _usable(key: Any, algorithm: str) -> jwt.PyJWK | None:
    if not isinstance(key, dict) or key.get("kty") == "oct" or key.get("use", "sig") != "sig":
        return None
    if not isinstance(key.get("kid", ""), str) or key.get("alg", algorithm) != algorithm:
        return None
    try:
        return jwt.PyJWK(key, algorithm)
    except jwt.PyJWTError:
        return None


class JwksFile(FollowedFile[KeySet]):
    """Keys from a file. Raises InvalidInputError if it cannot be read.

    Attributes:
        keys: the current ones, the same object as long as they do not change.
    """

    def __init__(self, path: Path, algorithms: Sequence[str]) -> None:
        super().__init__(SETTING, path, lambda data: KeySet(data, algorithms))

    @property
    def keys(self) -> KeySet:
        return self.value

    async def refresh(self) -> None:
        """Does nothing: the file is looked at every second."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """None makes a redirect an error: it could leave https."""


class JwksUrl:
    """Keys from an https URL; its certificate is verified with the system's authorities, or those of SSL_CERT_FILE.

    Attributes:
        keys: as those of a file; None if there are none, or if they are too old.
    """

    def __init__(self, url: str, algorithms: Sequence[str]) -> None:
        self._url = url
        self._algorithms = algorithms
        https = urllib.request.HTTPSHandler(context=ssl.create_default_context())
        self._opener = urllib.request.build_opener(https, _NoRedirect)
        self._fetching: asyncio.Task[None] | None = None
        self._asked_at = self._fetched_at = float("-inf")
        self._bytes: bytes | None = None
        self._keys: KeySet | None = None
        self._problem = ""

    @property
    def keys(self) -> KeySet | None:
        return self._keys if time.monotonic() - self._fetched_at < _STALE_SECONDS else None

    async def refresh(self) -> None:
        """Looks for a key that is not among the current ones, unless it did so a moment ago.

        Waits `_TIMEOUT_SECONDS` at most. Calls at one time share one request.
        """
        if self._fetching is None:
            if time.monotonic() - self._asked_at < _RETRY_SECONDS:
                return
            self._asked_at = time.monotonic()
            self._fetching = asyncio.create_task(self._fetch())
        await asyncio.wait([self._fetching], timeout=_TIMEOUT_SECONDS)

    async def follow(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(_RETRY_SECONDS if self._problem or self._keys is None else _REFRESH_SECONDS)

    async def _fetch(self) -> None:
        try:
            data = await asyncio.to_thread(self._read)
            if data != self._bytes:
                self._keys = KeySet(data, self._algorithms)
                self._bytes = data
                _log.info("keys of the issuer read", url=self._url)
            self._fetched_at = time.monotonic()
            self._problem = ""
        except (OSError, HTTPException, ValueError, InvalidInputError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("keys of the issuer cannot be read", url=self._url, problem=self._problem)
        finally:
            self._fetching = None

    def _read(self) -> bytes:
        with self._opener.open(self._url, timeout=_TIMEOUT_SECONDS) as response:
            data: bytes = response.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise InvalidInputError(SETTING, self._url, f"sends more than {_MAX_BYTES} bytes")
        return data
