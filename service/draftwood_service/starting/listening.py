"""Whether the server can listen on its address, asked before anything large is imported."""

from __future__ import annotations

import errno
import os
import socket

from draftwood_model_runner.errors import InvalidInputError
from draftwood_service.settings.network import ListenSettings


def require_free(settings: ListenSettings) -> None:
    """Raises InvalidInputError, with the reason, if the server cannot listen on the address: gRPC reports no
    reason."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        socket.getaddrinfo(settings.host, settings.port, family)  # `create_server` hides why a name is not resolved
        socket.create_server((settings.host, settings.port), family=family).close()
    except socket.gaierror as error:
        raise InvalidInputError("host", settings.host, str(error.strerror).lower()) from None
    except OSError as error:
        reason = (os.strerror(error.errno) if error.errno else str(error)).lower()
        field, value = ("host", settings.host) if error.errno == errno.EADDRNOTAVAIL else ("port", settings.port)
        raise InvalidInputError(field, value, reason) from None
