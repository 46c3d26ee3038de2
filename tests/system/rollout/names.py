"""A name server for names whose addresses change: as those of headless Services do in a rollout."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

NAME = "replicas.test"
_A, _IN, _TTL = 1, 1, 1
_KNOWN, _UNKNOWN = 0x8180, 0x8183
"""Flags of an answer without an error, and of one that there is no such name."""


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for A records of known names, and every other one with nothing.

    Attributes:
        hosts: IPv4 addresses, by their names in small letters.
        questions: for A records so far.
    """

    def __init__(self, hosts: dict[str, list[str]]) -> None:
        self.hosts = hosts
        self.questions = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # the name, its end, type and class
        kind = struct.unpack("!H", data[end - 4 : end - 2])[0]
        self.questions += kind == _A
        hosts = self.hosts.get(_name(data[12 : end - 5]))
        addresses = [socket.inet_aton(host) for host in hosts or ()] if kind == _A else []
        header = data[:2] + struct.pack("!5H", _UNKNOWN if hosts is None else _KNOWN, 1, len(addresses), 0, 0)
        # 0xC00C refers to the name in the question.
        records = b"".join(struct.pack("!3HIH", 0xC00C, _A, _IN, _TTL, 4) + address for address in addresses)
        self._transport.sendto(header + data[12:end] + records, addr)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts to answer; returns "host:port"."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(host, port))
        host, port = transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def close(self) -> None:
        self._transport.close()


def _name(labels: bytes) -> str:
    """Of labels with their lengths before them, without the last, empty one."""
    found = []
    while labels:
        size = labels[0] + 1
        found.append(labels[1:size].decode())
        labels = labels[size:]
    return ".".join(found).lower()
