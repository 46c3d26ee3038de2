"""Addresses of servers, in gRPC's syntax: "host:port", "dns:///host:port", "ipv4:…", "unix:…"."""

from __future__ import annotations

import re
from ipaddress import ip_address

from draftwood_client.errors import ArgumentTypeError, ArgumentValueError

DEFAULT_TARGET = "127.0.0.1:50051"

_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]]+\]|[^\[\]:]+):(\d+)")
_WITHOUT_PORT = ("unix", "unix-abstract", "vsock", "xds", "google-c2p")
"""The schemes of gRPC that name no ports."""


def check_target(target: str) -> None:
    """Raises `ArgumentError` unless it names a server, with the port if the scheme has ports: gRPC itself would take
    443 without one, and another port for one beyond 65535.
    """
    if not isinstance(target, str):
        raise ArgumentTypeError("target", f"must be a str, not {type(target).__name__}")
    if not target:
        raise ArgumentValueError("target", f"is empty; it must name a server, such as {DEFAULT_TARGET!r}")
    for address in addresses(target):
        if "://" in address:
            raise ArgumentValueError("target", f"{target!r} is a URL; write it as host:port, and use TLS for https")
        found = _HOST_AND_PORT.fullmatch(address)
        if found is None or not 0 < int(found[1]) < 2**16:
            example = "such as 'localhost:50051' or '[::1]:50051'"
            raise ArgumentValueError("target", f"{target!r} has no valid port; write it as host:port, {example}")


def is_local(target: str) -> bool:
    """Whether a target is on this machine for certain."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    if re.match("dns://[^/]", target):  # the name server on another machine says where it is
        return False
    found = addresses(target)
    return bool(found) and all(_is_loopback(address) for address in found)


def addresses(target: str) -> list[str]:
    """Every "host:port" of a target; empty if its scheme has no ports."""
    scheme, _, rest = target.partition(":")
    if scheme in _WITHOUT_PORT:
        return []
    if scheme in ("ipv4", "ipv6"):
        return rest.replace("%5B", "[").replace("%5D", "]").split(",")
    return [re.sub("^//[^/]*/", "", rest) if scheme == "dns" else target]


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
