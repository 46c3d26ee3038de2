"""Settings of clients that the environment has if no argument names them. An empty variable is as good as none.

The command line has an option for each; `draftwood serve` leaves these variables alone.
"""

from __future__ import annotations

import os

from draftwood_client.errors import ArgumentValueError

TARGET = "DRAFTWOOD_TARGET"
TENANT = "DRAFTWOOD_TENANT"
API_KEY = "DRAFTWOOD_API_KEY"
TOKEN = "DRAFTWOOD_TOKEN"
TIMEOUT = "DRAFTWOOD_TIMEOUT"
TLS = "DRAFTWOOD_TLS"
TLS_CA = "DRAFTWOOD_TLS_CA"
TLS_SERVER_NAME = "DRAFTWOOD_TLS_SERVER_NAME"
CLIENT_CERT = "DRAFTWOOD_CLIENT_CERT"
CLIENT_KEY = "DRAFTWOOD_CLIENT_KEY"

ALL = frozenset({TARGET, TENANT, API_KEY, TOKEN, TIMEOUT, TLS, TLS_CA, TLS_SERVER_NAME, CLIENT_CERT, CLIENT_KEY})

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def read(name: str) -> str | None:
    """The value of a variable; None if it is empty or not set."""
    return os.environ.get(name) or None


def seconds(name: str) -> float | None:
    """Raises `ArgumentValueError` if the variable is not a number of seconds above 0; "inf" is one."""
    text = read(name)
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = 0.0
    if value is not None and not value > 0:
        raise ArgumentValueError(name, f"{text!r} is not allowed; it must be a number of seconds above 0, or inf")
    return value


def switch(name: str) -> bool:
    """Raises `ArgumentValueError` if the variable is neither 1 nor 0."""
    text = read(name)
    value = False if text is None else _SWITCH.get(text.lower())
    if value is None:
        raise ArgumentValueError(name, f"{text!r} is not allowed; it must be 1 or 0")
    return value
