"""The only file that imports the Redis library: addresses, connections of every kind, and the mapping of errors."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import parse_qs, unquote, unquote_to_bytes, urlsplit

import redis.asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from draftwood_memory.errors import (
    InvalidSettingError,
    MemoryStoreError,
    StoreFullError,
    StoreRefusedError,
    StoreUnavailableError,
    WrongTypeError,
)

_TIMEOUT = 2.0
_CONNECTIONS = 8
"""Per server. One thread uses them, mostly one connection at a time."""
_DEMOTED = frozenset(("READONLY", "UNBLOCKED"))
"""Codes of a server that has become a replica: whoever keeps the connection never reaches the new primary."""
_LATER = _DEMOTED | frozenset(
    ("LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "MOVED", "ASK")
)
"""Codes of answers of a server that cannot serve now."""
_REFUSED = frozenset(("NOPERM", "NOAUTH", "WRONGPASS"))
_UNANSWERED = exceptions.ConnectionError, exceptions.TimeoutError
_WITHIN_SCRIPT = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")
Command: TypeAlias = SequenceOf[str | int | bytes]
"""Its name and its arguments."""
_WRITE_WHEN_FULL = "redis.call('DEL', KEYS[2]) return redis.call(unpack(ARGV))"
"""A full server lets a script go on once a command that needs no memory has written."""
_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel", "unix")
_PORT, _SENTINEL_PORT = 6379, 26379


@dataclass(frozen=True, slots=True)
class Script:
    """One run of a script."""

    text: str
    keys: SequenceOf[str]
    arguments: SequenceOf[str | int | bytes]


@dataclass(frozen=True, slots=True)
class RedisTls:
    """TLS beyond the system's public authorities: paths of PEM files."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


def eval_command(script: Script) -> Command:
    """The command that runs a script."""
    return "EVAL", script.text, len(script.keys), *script.keys, *script.arguments


def write_when_full(command: str, key: str, *words: str | int | bytes) -> tuple[str | int | bytes, ...]:
    """A small write to one key that a full server accepts too, such as a purge needs before it deletes."""
    return ("EVAL", _WRITE_WHEN_FULL, 2, key, f"{key}:none", command, key, *words)


class RedisClient:
    """A server, a group behind Sentinel, or a cluster, by URL.

    `redis://[user:password@]host[:port][/db]`, `rediss://` with TLS, `unix:///path`; for a cluster `redis+cluster://`
    with one node or several, separated by commas; for Sentinel `redis+sentinel://host[:port],.../GROUP[/db]`, with the
    Sentinels' own user and password as `?sentinel_user=...&sentinel_password=...`. With TLS `rediss+...`.

    Raises:
        InvalidSettingError: the URL has none of these forms.
    """

    def __init__(self, url: str, tls: RedisTls | None = None, timeout: float = _TIMEOUT) -> None:
        self._address = StoreAddress.of(url)
        self._tls = tls or RedisTls()
        self._timeout = timeout
        self._client: Any = None
        self._sentinel: Any = None

    @property
    def description(self) -> str:
        """The address, without passwords."""
        return self._address.description

    @property
    def identity(self) -> str:
        """Tells stores apart: the address with the number of the database, without passwords."""
        return f"{self.description}/{self._address.database}"

    @property
    def is_cluster(self) -> bool:
        """One call cannot span keys with different hash tags."""
        return self._address.kind == "cluster"

    def with_longer_timeout(self, seconds: float) -> RedisClient:
        """Another client of the same store, whose calls may take so many seconds longer."""
        other = copy(self)
        other._timeout, other._client, other._sentinel = self._timeout + seconds, None, None
        return other

    async def run(self, script: Script) -> Any:
        """The script's result; strings are bytes. Raises MemoryStoreError."""
        [answer] = await self.results([eval_command(script)])
        return answer

    async def run_all(self, scripts: SequenceOf[Script]) -> list[Any]:
        """Each script's result, or a MemoryStoreError in its place, in one round trip to each server.

        Raises:
            StoreUnavailableError, StoreRefusedError: any of the scripts may have run.
        """
        return await self.commands([*map(eval_command, scripts)])

    async def results(self, commands: SequenceOf[Command], of_keys: bool = False) -> list[Any]:
        """As `commands`. Raises the first MemoryStoreError of any.

        Args:
            of_keys: an error that concerns some keys alone is not raised, but in the place of its command's result:
                another program wrote to them, or the node of a cluster that has them does not answer.
        """
        kept = (WrongTypeError, StoreUnavailableError) if self.is_cluster else (WrongTypeError,)
        answers = await self.commands(commands)
        for answer in answers:
            if isinstance(answer, MemoryStoreError) and not (of_keys and isinstance(answer, kept)):
                raise answer
        return answers

    async def commands(self, commands: SequenceOf[Command]) -> list[Any]:
        """Each command's result, or a MemoryStoreError in its place, in one round trip to each server.

        Those on one hash tag run in their order.

        Raises:
            StoreUnavailableError, StoreRefusedError: any of the commands may have run.
        """
        if not commands:
            return []
        try:
            send = self._sent_by_node if self.is_cluster else self._sent
            answers = await send(commands)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise await self._failed(error) from error
        return [await self._failed(answer) if isinstance(answer, Exception) else answer for answer in answers]

    async def _sent(self, commands: SequenceOf[Command]) -> list[Any]:
        pipeline = self._connected().pipeline(transaction=False)
        for words in commands:
            pipeline.execute_command(*words)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def _sent_by_node(self, commands: SequenceOf[Command]) -> list[Any]:
        """As `_sent`. If a node of the cluster does not answer, that is the error of the commands on its keys alone."""
        client = await self._initialized()
        groups: dict[Any, list[int]] = {}
        anywhere, answers = list[int](), dict[int, Any]()
        for i, words in enumerate(commands):
            at = {"EVAL": 3, "MEMORY": 2}.get(str(words[0]), 1)
            try:
                group = groups.setdefault(client.get_node_from_key(words[at]), []) if len(words) > at else anywhere
                group.append(i)
            except exceptions.SlotNotCoveredError as error:
                answers[i] = error
        failed = len(answers) > 0
        for node in [*groups, *client.get_primaries()]:
            sent = [*anywhere, *groups.pop(node, ())]
            if not sent:
                continue
            pipeline = client.pipeline()
            for i in sent:
                pipeline.execute_command(*commands[i], **({"target_nodes": node} if i in anywhere else {}))
            try:
                received = await pipeline.execute(raise_on_error=False)
            except (exceptions.RedisError, OSError, TimeoutError) as error:
                received = [error] * len(sent)
            answers |= zip(sent, received, strict=True)
            anywhere = [i for i in anywhere if isinstance(answers[i], Exception)]
            failed |= any(isinstance(answer, _UNANSWERED) for answer in received)
        if failed:  # other nodes may have the slots now
            with suppress(exceptions.RedisError, OSError):
                await client.nodes_manager.initialize()
        return [answers[i] for i in range(len(commands))]

    async def _initialized(self) -> Any:
        """The client of a cluster, which knows its nodes. The library asks the first one for the server's commands and
        gives up if that one is down: then any other will do."""
        client = self._connected()
        try:
            await client.initialize()
        except (exceptions.RedisError, OSError):
            for node in client.get_primaries():
                with suppress(exceptions.RedisError, OSError):
                    await client.commands_parser.initialize(node)
                    client.set_default_node(node)
                    client._initialize = False
                    return client
            raise
        return client

    async def command(self, *words: str | int | bytes) -> Any:
        """One command's result. Raises MemoryStoreError."""
        if self.is_cluster:
            return (await self.results([words]))[0]
        try:
            return await self._connected().execute_command(*words)
        except (exceptions.RedisError, OSError, TimeoutError) as error:
            raise await self._failed(error) from error

    async def close(self) -> None:
        client, self._client = self._client, None
        for connected in (client, *(self._sentinel.sentinels if self._sentinel else ())):
            if connected is not None:
                with suppress(exceptions.RedisError, OSError):
                    await connected.aclose()
        self._sentinel = None

    async def _failed(self, error: BaseException) -> MemoryStoreError:
        """The error, mapped. Closes idle connections if it tells that their server has become a replica: the next call
        reconnects, to whatever the address resolves to then. (A cluster answers MOVED, which the library follows.)
        """
        if _code(error, str(error)) in _DEMOTED and self._client is not None and not self.is_cluster:
            with suppress(exceptions.RedisError, OSError):
                await self._client.connection_pool.disconnect(inuse_connections=False)
        return _mapped(error)

    def _connected(self) -> Any:
        """The library's client, which opens connections when they are needed, on the running loop."""
        if self._client is None:
            self._client = self._open()
        return self._client

    def _open(self) -> Any:
        address = self._address
        options: dict[str, Any] = {
            "socket_timeout": self._timeout,
            "socket_connect_timeout": self._timeout,
            "health_check_interval": 0,
            "protocol": 2,
            "client_name": "draftwood",
            "retry": Retry(NoBackoff(), 0),  # of a cluster's client each would ask a node that may be down first
            "driver_info": None,  # it would need a right that Redis 7.0 does not know
            "username": address.user,
            "password": address.password,
            **self._tls_options(),
        }
        if address.kind == "cluster":
            nodes = [aioredis.cluster.ClusterNode(host, port) for host, port in address.hosts]
            return aioredis.RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
        options |= {"max_connections": _CONNECTIONS, "db": address.database}
        if address.kind == "sentinel":
            self._sentinel = aioredis.Sentinel(
                address.hosts,
                sentinel_kwargs={
                    "socket_timeout": self._timeout,
                    "socket_connect_timeout": self._timeout,
                    "username": address.sentinel_user,
                    "password": address.sentinel_password,
                    **self._tls_options(),
                },
            )
            return self._sentinel.master_for(address.group, **options)
        if address.path:
            return aioredis.Redis(unix_socket_path=address.path, **options)
        [(host, port)] = address.hosts
        return aioredis.Redis(host=host, port=port, **options)

    def _tls_options(self) -> dict[str, Any]:
        if not self._address.tls:
            return {}
        paths = {"ssl_ca_certs": self._tls.ca, "ssl_certfile": self._tls.cert, "ssl_keyfile": self._tls.key}
        return {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
            **{name: str(path) for name, path in paths.items() if path is not None},
        }


def _mapped(error: BaseException) -> MemoryStoreError:
    """An error of the library as a `MemoryStoreError`."""
    text = " ".join(str(error).split()) or type(error).__name__
    code = _code(error, text)
    if code == "OOM":
        return StoreFullError(text)
    if code == "WRONGTYPE":
        return WrongTypeError(text)
    if code in _REFUSED or isinstance(error, (exceptions.AuthenticationError, exceptions.AuthorizationError)):
        return StoreRefusedError(text)
    if isinstance(error, exceptions.ResponseError) and code not in _LATER:
        return StoreRefusedError(text)
    return StoreUnavailableError(text)


def _code(error: object, text: str) -> str:
    """The server's code of an error, such as "READONLY"; "" if it is not the server's.

    The library takes the codes that it knows off the text, and keeps them beside it. Redis 6 puts the code of a command
    that failed within a script behind its place in the script.
    """
    if not isinstance(error, exceptions.RedisError):
        return ""
    within = _WITHIN_SCRIPT.search(text)
    return within[1] if within else error.status_code or text.partition(" ")[0]


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
            hosts = [] if base == "unix" else [_host(host, default_port) for host in netloc.split(",")]
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
