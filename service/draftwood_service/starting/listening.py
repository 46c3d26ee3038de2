"""Whether the server can listen on its address, asked before anything large is imported."""

from __future__ import annotations

import errno
import os
import socket
from ipaddress import ip_address

from draftwood_model_runner.errors import InvalidInputError


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address to listen on."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_free(host: str, port: int) -> None:
    """Raises InvalidInputError, with the reason, if a server cannot listen on the address: gRPC reports no reason."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.getaddrinfo(host, port, family)  # `create_server` hides why a name is not resolved
        socket.create_server((host, port), family=family).close()
    except socket.gaierror as error:
        raise InvalidInputError("host", host, str(error.strerror).lower()) from None
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        field, value = ("host", host) if error.errno == errno.EADDRNOTAVAIL else ("port", port)
        raise InvalidInputError(field, value, reason) from None
