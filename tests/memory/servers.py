"""Real Valkey servers for tests: alone, behind Sentinel, as a cluster; and a proxy that causes faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Self

import redis

from draftwood_memory.store.embedded import binary

_BUS = 10_000
"""Nodes of a cluster use a second port, so much above their own."""


def free_port() -> int:
    """A free port, and with it one for a cluster's bus.

    Both are below those that systems give to clients and to servers on any port. One of these could be taken before a
    server listens on it, or while it is down.
    """
    while True:
        port = 10_000 + secrets.randbelow(12_000)
        if _is_free(port) and _is_free(port + _BUS):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as taken:
        try:
            taken.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class Valkey:
    """A server on a port of 127.0.0.1, with a folder for its data. A context manager."""

    def __init__(self, *flags: str, persistent: bool = False, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="draftwood-valkey-"))
        self._flags = [*flags, *(["--appendonly", "yes", "--appendfsync", "always"] if persistent else [])]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, socket_timeout=5)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self) -> None:
        arguments = ["--port", str(self.port), "--dir", str(self.folder), "--save", "", "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(
            [str(binary()), *arguments, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_for(lambda: _answers(self.port), f"port {self.port}")

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


def _answers(port: int) -> bool:
    try:
        client = redis.Redis(port=port, socket_timeout=1)
        client.ping()
        client.close()
    except redis.AuthenticationError:
        return True
    except (redis.RedisError, OSError):
        return False
    return True


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        time.sleep(0.02)


@contextlib.contextmanager
def sentinel(master: Valkey) -> Iterator[int]:
    """A Sentinel that watches a master as the group "dw"; its port."""
    port = free_port()
    folder = Path(tempfile.mkdtemp(prefix="draftwood-sentinel-"))
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor dw 127.0.0.1 {master.port} 1\n"
        f"sentinel down-after-milliseconds dw 400\nsentinel failover-timeout dw 2000\n"
    )
    process = subprocess.Popen(
        [str(binary()), str(config), "--sentinel"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: _answers(port), "sentinel")
        yield port
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def cluster(*flags: str, persistent: bool = False, port: int | None = None) -> Iterator[list[Valkey]]:
    """Three masters with equal shares of the slots, once all of them report that the cluster is ok.

    Args:
        port: of the first; None for any.
    """
    flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", *flags)
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(Valkey(*flags, persistent=persistent, port=one)) for one in (port, None, None)]
        bounds = [16384 * i // 3 for i in range(4)]
        for node, start, end in zip(nodes, bounds[:-1], bounds[1:], strict=True):
            node.client.execute_command("CLUSTER", "ADDSLOTSRANGE", start, end - 1)
        for node in nodes[1:]:
            nodes[0].client.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        for node in nodes:
            wait_for(partial(_ok, node), "the cluster")
        yield nodes


def _ok(node: Valkey) -> bool:
    info: bytes = node.client.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_known_nodes:1\r" not in info


class Proxy:
    """Between clients and a server: blocks, resets, delays or encrypts connections. An async context manager.

    Args:
        certificate: it and its key; None for no TLS.
        port: to listen on; 0 for any.
        mutual: clients need a certificate, of this one as an authority.

    Attributes:
        to: port of the server that new connections lead to.
        delay: seconds that each piece waits, in both directions.
        open: cleared, nothing passes in either direction, and connections stay open.
        reset_after: bytes to the server after which each connection is reset; None for never.
    """

    def __init__(
        self, to: int, certificate: tuple[Path, Path] | None = None, port: int = 0, mutual: bool = False
    ) -> None:
        self.to = to
        self.port = port
        self._tls: ssl.SSLContext | None = None
        if certificate is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*certificate)
            self._tls.load_verify_locations(certificate[0])
            self._tls.verify_mode = ssl.CERT_REQUIRED if mutual else ssl.CERT_NONE
        self.delay = 0.0
        self.open = asyncio.Event()
        self.open.set()
        self.reset_after: int | None = None
        self.resets = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        # What was accepted is a task of `_serve`, which has begun, after three rounds of the loop. A server that closes
        # before would leave it open.
        for listening in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        for _ in range(5):
            await asyncio.sleep(0)
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
            both = [self._pass(reader, back, True, writer), self._pass(there, writer, False, writer)]
            await asyncio.gather(*both)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            ends = [writer, *([back] if "back" in locals() else [])]
            for one in ends:
                one.transport.abort()
            for one in ends:
                with contextlib.suppress(OSError):
                    await one.wait_closed()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, up: bool, client: asyncio.StreamWriter
    ) -> None:
        passed = 0
        while data := await reader.read(4096):
            if self.delay:
                await asyncio.sleep(self.delay)
            await self.open.wait()
            passed += len(data)
            if up and self.reset_after is not None and passed > self.reset_after:
                data = data[: max(0, len(data) - (passed - self.reset_after))]
                writer.write(data)
                self.resets += 1
                client.transport.abort()
                raise ConnectionResetError
            writer.write(data)
            await writer.drain()
        writer.close()


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return False
