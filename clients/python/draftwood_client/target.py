"""Addresses of servers, in gRPC's syntax: "host:port", "dns:///host:port", "ipv4:…", "unix:…"."""

from __future__ import annotations

import re
import socket
import ssl
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
        named = _HOST_AND_PORT.fullmatch(address)
        if named is None or not 0 < int(named[1]) < 2**16:
            example = "such as 'localhost:50051' or '[::1]:50051'"
            raise ArgumentValueError("target", f"{target!r} has no valid port; write it as host:port, {example}")


def is_local(target: str) -> bool:
    """Whether a target is on this machine for certain."""
    if target.startswith(("unix:", "unix-abstract:")):
        return True
    if re.match("dns://[^/]", target):  # the name server on another machine says where it is
        return False
    hosts = addresses(target)
    return bool(hosts) and all(_is_loopback(address) for address in hosts)


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


_REFUSED = "Connection refused"
_PLAINTEXT = "what listens there does not use TLS; leave out TLS, or check the port"
_CAUSES = {
    _REFUSED: "nothing listens there; check host and port, and that the server runs",
    "address lookup failed": "the host's name cannot be resolved; check it",
    "Failed parsing HTTP/2": "what listens there does not speak gRPC; check the port",
    "WRONG_VERSION_NUMBER": _PLAINTEXT,
    "has expired": "the server's certificate has expired",
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is of an authority that this client does not trust; name the"
    " authority's PEM file with --tls-ca (`TlsConfig.root_certificates`)",
    "Hostname Verification Check failed": "the server's certificate is for another host; connect to that host, or name"
    " it with --tls-server-name (`TlsConfig.server_name`)",
    "Failed to create security handshaker": "a PEM file is invalid, or the private key is of another certificate",
}
"""By a part of gRPC 1.85's text; the first that fits."""
_CLOSED = "the server closed the connection; if it requires TLS, use --tls or --tls-ca (`tls`)"
_CLOSED_TLS = (
    "the server closed the connection; if it requires a client certificate, name one that it trusts with --tls-cert and"
    " --tls-key (`TlsConfig`)"
)
_PROBE_SECONDS = 0.5
"""For a connection to an address of this machine, and for its answer. It takes some milliseconds."""


def unreachable(target: str, tls: bool, text: str) -> str:
    """What happened, what to try, and gRPC's own words.

    Args:
        tls: whether the client uses TLS.
        text: details of gRPC's error, whose status is UNAVAILABLE.
    """
    _, connecting, reason = text.rpartition("last error: ")
    reason = reason.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ")
    causes = [cause for part, cause in _CAUSES.items() if part in reason]
    if connecting and reason.endswith("Socket closed"):
        causes.append(_CLOSED_TLS if tls else _CLOSED)
    if _REFUSED in reason and is_local(target):
        causes.insert(0, _why_refused(target, tls))
    if causes:
        return f"cannot connect to {target}: {causes[0]} (gRPC: {reason})"
    return f"cannot connect to {target} ({reason})" if connecting else f"{target}: {text or 'UNAVAILABLE'}"


def _why_refused(target: str, tls: bool) -> str:
    """gRPC names the error of one address only: `localhost` is ::1 too, where nothing may listen."""
    for address in addresses(target):
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), _PROBE_SECONDS)
        except OSError:
            continue
        with connection:
            reached, *_ = connection.getpeername()
            if _speaks_tls(connection) != tls:
                return _PLAINTEXT if tls else _CLOSED
            return f"nothing listens at one of its addresses; connect to {reached}, which answers"
    return _CAUSES[_REFUSED]


def _speaks_tls(connection: socket.socket) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        context.wrap_socket(connection).close()
    except OSError as error:
        return "ALERT" in (getattr(error, "reason", None) or "")
    return True
