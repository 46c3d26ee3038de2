"""JSON web tokens, and the public keys of their issuer (JWKS, RFC 7517) from a file or an https URL."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import socket
import ssl
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jwt
import structlog

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth.principal import IssuerUnavailableError, Principal, Role, UnauthenticatedError
from draftwood_service.settings.groups import AuthSettings
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
_MAX_CHARACTERS = 8192
"""Maximum length of a token: gRPC's default limit of headers."""
_MAX_VERIFIED = 10_000
_MAX_SUBJECT = 128


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


class _Verified(NamedTuple):
    """A valid token, until it expires or the keys are others."""

    principal: Principal
    keys: KeySet
    expires: float


class TokenVerifier:
    """Verifies tokens, and remembers valid ones until they expire or the issuer's keys change: 3 us instead of 100.

    Args:
        settings: what a token must be. A role claim may be a list, of which the highest role counts; without a known
            role it is `caller`.
    """

    def __init__(self, source: JwksFile | JwksUrl, settings: AuthSettings) -> None:
        self._source = source
        self._settings = settings
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    async def follow(self) -> None:
        """Keeps the issuer's keys current, for ever."""
        await self._source.follow()

    async def principal(self, token: str, now: float) -> Principal:
        """The caller of a token.

        Args:
            now: seconds since 1970.

        Raises:
            UnauthenticatedError: it is not a valid token.
            IssuerUnavailableError: the issuer's keys are not known.
        """
        if len(token) > _MAX_CHARACTERS:
            raise UnauthenticatedError("token too long")
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._verified.get(digest)
        if known is not None:
            if known.keys is self._source.keys and now < known.expires:
                self._verified.move_to_end(digest)
                return known.principal
            del self._verified[digest]
        verified = await self._verify(token)
        self._verified[digest] = verified
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.popitem(last=False)
        return verified.principal

    async def _verify(self, token: str) -> _Verified:
        settings = self._settings
        try:
            header = jwt.get_unverified_header(token)
            if header.get("alg") not in settings.jwt_algorithms:
                raise UnauthenticatedError(f"token with algorithm {str(header.get('alg'))[:16]!r}")
            key, keys = await self._key(header)
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[header["alg"]],
                audience=settings.jwt_audience,
                issuer=settings.jwt_issuer,
                leeway=settings.jwt_leeway,
                options={"require": ["exp", "iss", "aud"]},
            )
            return _Verified(self._principal(claims), keys, float(claims["exp"]) + settings.jwt_leeway)
        except (jwt.PyJWTError, InvalidInputError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise UnauthenticatedError(f"token: {error}") from None

    async def _key(self, header: dict[str, Any]) -> tuple[jwt.PyJWK, KeySet]:
        for attempt in range(2):
            keys = self._source.keys
            if keys is not None and (key := keys.find(header.get("kid"), header["alg"])) is not None:
                return key, keys
            if attempt == 0:
                await self._source.refresh()
        if keys is None:
            raise IssuerUnavailableError()
        raise UnauthenticatedError("token with an unknown key id")

    def _principal(self, claims: dict[str, Any]) -> Principal:
        """Raises InvalidInputError without a tenant, unless the role is operator."""
        given = claims.get(self._settings.jwt_role_claim)
        labels = given if isinstance(given, list) else [given]
        roles = [role for label in labels if isinstance(label, str) and (role := Role.of(label)) is not None]
        tenant = claims.get(self._settings.jwt_tenant_claim)
        if tenant is not None and not isinstance(tenant, str):
            raise InvalidInputError(self._settings.jwt_tenant_claim, None, "must be a string")
        subject = str(claims.get("sub", "?"))[:_MAX_SUBJECT]
        return Principal(f"token:{subject}", max(roles, default=Role.CALLER), tenant)
