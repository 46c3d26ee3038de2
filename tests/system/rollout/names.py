"""A name server for one name, whose addresses change: as the headless Service of a rollout does."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

NAME = "replicas.test"
_A, _IN, _TTL = 1, 1, 1


class NameServer(asyncio.DatagramProtocol):
    """Answers every question for an A record with `hosts`, and every other one with nothing.

    Attributes:
        hosts: IPv4 addresses.
        questions: for A records so far.
    """

    def __init__(self, hosts: list[str]) -> None:
        self.hosts = hosts
        self.questions = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # the name, its end, type and class
        kind = struct.unpack("!H", data[end - 4 : end - 2])[0]
        self.questions += kind == _A
        addresses = [socket.inet_aton(host) for host in self.hosts] if kind == _A else []
        header = data[:2] + struct.pack("!5H", 0x8180, 1, len(addresses), 0, 0)
        # 0xC00C refers to the name in the question.
        records = b"".join(struct.pack("!3HIH", 0xC00C, _A, _IN, _TTL, 4) + address for address in addresses)
        self._transport.sendto(header + data[12:end] + records, addr)

    async def start(self) -> str:
        """Starts to answer; returns "host:port"."""
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        host, port = transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def close(self) -> None:
        self._transport.close()
