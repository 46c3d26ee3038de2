"""The public keys of an issuer of tokens (JWKS, RFC 7517), from a file or an https URL."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

    Keys of other kinds are left out, symmetric ones and those for encryption (`use`, `key_ops`) among them.

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
        self._signing = sum(any(_usable(key, algorithm) for algorithm in algorithms) for key in keys)

    def find(self, key_id: str | None, algorithm: str) -> jwt.PyJWK | None:
        """The key of this id; for a token without an id the only one of the set that signs."""
        if key_id is None and self._signing == 1:
            return next((key for (_, its), key in self._keys.items() if its == algorithm), None)
        return self._keys.get((key_id, algorithm))


def _usable(key: Any, algorithm: str) -> jwt.PyJWK | None:
    if not isinstance(key, dict) or key.get("kty") == "oct" or key.get("use", "sig") != "sig":
        return None
    operations = key.get("key_ops", ["verify"])
    if not isinstance(operations, list) or "verify" not in operations:
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


class _Connection(http.client.HTTPSConnection):
    """Ends after `_TIMEOUT_SECONDS`, whatever has come until then: the timeout of a socket begins again with each
    byte."""

    def connect(self) -> None:
        super().connect()
        ending = threading.Timer(_TIMEOUT_SECONDS, _end, [self.sock])
        ending.daemon = True
        ending.start()


def _end(connected: socket.socket) -> None:
    """Lets the thread that reads from a socket read its end."""
    with suppress(OSError):  # it is closed
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # TLS is left to that thread


class _Https(urllib.request.HTTPSHandler):
    def __init__(self) -> None:
        super().__init__()
        self._tls = ssl.create_default_context()

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, request, context=self._tls)


class JwksUrl:
    """Keys from an https URL; its certificate is verified with the system's authorities, or those of SSL_CERT_FILE.

    Attributes:
        keys: as those of a file; None if there are none, or if they are too old.
    """

    def __init__(self, url: str, algorithms: Sequence[str]) -> None:
        self._url = url
        self._algorithms = algorithms
        self._opener = urllib.request.build_opener(_Https(), _NoRedirect)
        self._thread = ThreadPoolExecutor(1, "jwks")  # those of asyncio tokenize, and may all be busy
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
            data = await asyncio.get_running_loop().run_in_executor(self._thread, self._read)
            if data != self._bytes:
                self._keys = KeySet(data, self._algorithms)
                self._bytes = data
                _log.info("keys of the issuer read", url=self._url)
            self._fetched_at = time.monotonic()
            self._problem = ""
        except (OSError, http.client.HTTPException, ValueError, InvalidInputError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.error("keys of the issuer cannot be read", url=self._url, problem=self._problem)
        finally:
            self._fetching = None

    def _read(self) -> bytes:
        began = time.monotonic()
        try:
            with self._opener.open(self._url, timeout=_TIMEOUT_SECONDS) as response:
                data: bytes = response.read(_MAX_BYTES + 1)
        finally:  # also if what came until then looks whole
            if time.monotonic() - began >= _TIMEOUT_SECONDS:
                raise TimeoutError(f"timed out: no complete answer within {_TIMEOUT_SECONDS:g} s")
        if len(data) > _MAX_BYTES:
            raise InvalidInputError(SETTING, self._url, f"sends more than {_MAX_BYTES} bytes")
        return data
