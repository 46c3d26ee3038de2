"""The address of a store, from its URL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import parse_qs, unquote, unquote_to_bytes, urlsplit

from draftwood_memory.errors import InvalidSettingError

_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel", "unix")
_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A server, a group behind Sentinel, or a cluster.

    The library's own reader of URLs takes one host, so it knows neither clusters nor Sentinels.

    Attributes:
        kind: "server", "sentinel" or "cluster".
        hosts: none for a socket.
        path: of a socket; "" for a host.
        group: of servers that Sentinels watch.
    """

    kind: str
    tls: bool
    hosts: list[tuple[str, int]]
    path: str
    user: str | None
    password: str | None
    database: int
    group: str
    sentinel_user: str | None
    sentinel_password: str | None

    @property
    def description(self) -> str:
        """Without passwords."""
        path = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        where = path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.kind} {where}{f' ({self.group})' if self.group else ''}{' with TLS' if self.tls else ''}"

    @classmethod
    def of(cls, url: str) -> StoreAddress:
        """Reads a URL, see `RedisClient`. Raises InvalidSettingError, without its password."""
        scheme, separator, rest = url.partition("://")
        credentials, _, location = ("", "", rest) if rest.startswith("/") else rest.rpartition("@")
        address, question, options = location.partition("?")  # options may have the password of Sentinels
        hidden = f"{scheme}{separator}{'...@' if credentials else ''}{address}{question and '?...'}"
        if scheme not in _SCHEMES or not location:
            schemes = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
            form = f"must be memory, embedded, or a URL with a host that begins with one of {schemes}"
            raise InvalidSettingError("store", hidden, form)
        base, _, kind = scheme.partition("+")
        user, _, password = credentials.partition(":")
        netloc, slash, path = address.partition("/")
        query = parse_qs(options)
        parts = [part for part in path.split("/") if part] if base != "unix" else []
        if kind == "sentinel" and not parts:
            raise InvalidSettingError("store", hidden, f"names no group; must be {scheme}://HOST[:PORT],.../GROUP[/DB]")
        group = parts.pop(0) if kind == "sentinel" else ""
        try:
            default_port = _SENTINEL_PORT if kind == "sentinel" else _PORT
            hosts = [] if base == "unix" else [_host(one, default_port) for one in netloc.split(",")]
        except ValueError:
            problem = "each host must be HOST or HOST:PORT, with a port from 1 to 65535"
            raise InvalidSettingError("store", hidden, problem) from None
        if not (parts[0] if parts else "0").isdecimal():
            raise InvalidSettingError("store", hidden, f"the database {parts[0]} must be a whole number of at least 0")
        database = int(parts[0]) if parts else 0
        if (not kind and len(hosts) > 1) or (kind == "cluster" and database):
            problem = "several hosts need +cluster or +sentinel, and a cluster has no db"
            raise InvalidSettingError("store", hidden, problem)
        return cls(
            kind=kind or "server",
            tls=base == "rediss",
            hosts=hosts,
            path=os.fsdecode(unquote_to_bytes(slash + path)) if base == "unix" else "",
            user=unquote(user) or None,
            password=unquote(password) or None,
            database=database,
            group=unquote(group),
            sentinel_user=query.get("sentinel_user", [None])[0],
            sentinel_password=query.get("sentinel_password", [None])[0],
        )


def _host(text: str, default_port: int) -> tuple[str, int]:
    parts = urlsplit("//" + text)
    if not parts.hostname or parts.port == 0:
        raise ValueError(text)
    return parts.hostname, parts.port or default_port
