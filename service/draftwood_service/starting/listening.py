"""Whether the server can listen on its address, asked before anything large is imported."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from draftwood_model_runner.errors import InvalidInputError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_url(text: str) -> bool:
    """Whether a text is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises if it is no number
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def require_free(key: str, host: str, port: int) -> None:
    """Raises InvalidInputError, with the reason, if a server cannot listen on the address: gRPC reports no reason.

    Args:
        key: of the port in errors.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.getaddrinfo(host, port, family)  # `create_server` hides why a name is not resolved
        socket.create_server((host, port), family=family).close()
    except socket.gaierror as error:
        raise InvalidInputError("host", host, str(error.strerror).lower()) from None
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        field, value = ("host", host) if error.errno == errno.EADDRNOTAVAIL else (key, port)
        raise InvalidInputError(field, value, reason) from None
