"""From a credential to its principal."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from draftwood_service.auth import auth_file
from draftwood_service.auth.auth_file import PREFIX, ApiKeys
from draftwood_service.auth.principal import ANYONE, NoCredentialError, Principal, UnauthenticatedError
from draftwood_service.settings.groups import AuthSettings
from draftwood_tenants.followed_file import FollowedFile

if TYPE_CHECKING:
    from draftwood_service.auth.tokens import TokenVerifier


class CertificateNames(NamedTuple):
    """Of a client certificate that TLS has verified.

    Attributes:
        alternative: its subject alternative names.
        common: common names of its subject.
    """

    alternative: tuple[str, ...]
    common: tuple[str, ...]


class _FromFile:
    """The credentials of the file, indexed for calls."""

    def __init__(self, data: bytes) -> None:
        content = auth_file.parse(data)
        self.keys = ApiKeys(content.keys)
        self.by_name = {entry.name: entry.principal for entry in content.certificates if entry.name}
        self.by_common_name = {
            certificate.common_name: certificate.principal
            for certificate in content.certificates
            if certificate.common_name
        }

    def of_certificate(self, names: CertificateNames) -> Principal | None:
        """The caller of a certificate, None if it is not known; alternative names count before common ones."""
        for known, given in ((self.by_name, names.alternative), (self.by_common_name, names.common)):
            for name in given:
                if name in known:
                    return known[name]
        return None


class Authenticator:
    """Knows the credentials of a server. Used from one event loop.

    Attributes:
        is_open: there are none; every call is `ANYONE`'s.
        is_for_this_machine: there are none, for only this machine reaches the server.

    Raises:
        InvalidInputError: a file of the settings cannot be read.
    """

    def __init__(self, settings: AuthSettings) -> None:
        self.is_open = not settings.has_credentials
        self.is_for_this_machine = self.is_open and settings.auth != "open"
        path = settings.auth_file
        self._file = None if path is None else FollowedFile(auth_file.SETTING, path, _FromFile)
        self._tokens = _token_verifier(settings)
        self._following: list[asyncio.Task[None]] = []

    @property
    def uses_certificates(self) -> bool:
        """Whether client certificates are credentials."""
        return self._file is not None and bool(self._file.value.by_name or self._file.value.by_common_name)

    async def principal(self, bearer: str | None, certificate: CertificateNames | None) -> Principal:
        """The caller.

        Args:
            bearer: API key or token of the call. If there is one, it alone counts.
            certificate: names of the client's.

        Raises:
            UnauthenticatedError: the call has no valid credential.
            IssuerUnavailableError: it has a token, and the issuer's keys are not known.
        """
        if self.is_open:
            return ANYONE
        if bearer is not None:
            if self._file is not None and (self._tokens is None or bearer.startswith(PREFIX)):
                return self._file.value.keys.principal(bearer, time.time())
            if self._tokens is not None:
                return await self._tokens.principal(bearer, time.time())
        elif self._file is not None and certificate is not None:
            principal = self._file.value.of_certificate(certificate)
            if principal is None:
                raise UnauthenticatedError("unknown certificate")
            return principal
        raise NoCredentialError

    def start(self) -> None:
        """Follows changes of files and keys from now on."""
        followed = [source.follow() for source in (self._file, self._tokens) if source is not None]
        self._following = [asyncio.create_task(following) for following in followed]

    async def close(self) -> None:
        """Ends what `start` began."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)


def _token_verifier(settings: AuthSettings) -> TokenVerifier | None:
    """None without a source of keys."""
    source, algorithms = settings.jwt_jwks, settings.jwt_algorithms
    if source is None:
        return None
    # Imported here: cryptography takes a while to import.
    from draftwood_service.auth.tokens import JwksFile, JwksUrl, TokenVerifier

    is_url = source.startswith("https://")
    return TokenVerifier(JwksUrl(source, algorithms) if is_url else JwksFile(Path(source), algorithms), settings)
