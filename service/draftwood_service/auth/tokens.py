"""JSON web tokens (RFC 7519) of an issuer: verified by PyJWT, then read for tenant and role."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any, NamedTuple

import jwt

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.auth.errors import IssuerUnavailableError, UnauthenticatedError
from draftwood_service.auth.jwks import JwksFile, JwksUrl, KeySet
from draftwood_service.auth.principal import Principal, Role
from draftwood_service.settings.network import AuthSettings

_MAX_CHARACTERS = 8192
"""Maximum length of a token: gRPC's default limit of headers."""
_MAX_VERIFIED = 10_000
_MAX_SUBJECT = 128


class _Verified(NamedTuple):
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
