"""Headers that say who calls, as gRPC's calls and the gateway's requests have them."""

from __future__ import annotations

import re
from collections.abc import Sequence

GATEWAY_HOST = "x-draftwood-gateway-host"
"""The address on which a gateway listens that passes a call on, if other machines reach it."""
TENANT = "x-draftwood-tenant"
"""The tenant of a call whose message cannot name one, as in VllmEngine. Only operators may name another than theirs."""
_HOW = "send an API key or a token as 'authorization: Bearer ...'"
_SCHEME = re.compile(r"([A-Za-z-]{1,20}) +\S")
"""A scheme and the beginning of its credentials. Anything else may be a key itself, which no error shows."""


def bearer_of(headers: Sequence[str]) -> str | None:
    """The API key or token in the authorization headers of a call; None without one, "" for one without a credential.

    Raises:
        ValueError: there are several, or one of another scheme than Bearer. The text shows no credential.
    """
    if not headers:
        return None
    if len(headers) > 1:
        raise ValueError(f"the call has {len(headers)} authorization headers, and one is allowed: {_HOW}")
    scheme, _, bearer = headers[0].strip().partition(" ")
    if scheme.lower() == "bearer":
        return bearer.strip()
    known = _SCHEME.match(headers[0].strip())
    named = f"has the scheme {known[1]!r}" if known else "has no scheme"
    raise ValueError(f"the authorization header {named}, and Bearer is allowed: {_HOW}")
