"""What callers without a valid credential can hold: messages that do not end, watches, and compressed ones."""

from __future__ import annotations

import asyncio
import gc
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import requires
from pathlib import Path
from types import FrameType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from packaging.requirements import Requirement

from draftwood.v1 import generation_pb2 as pb
from draftwood_service.rpc import bound, health
from draftwood_service.rpc.bound import OTHER_STREAMS
from draftwood_service.rpc.health import V1
from tests.process_memory import resident_mib
from tests.service.fakes import Served, refusal, serving, until
from tests.service.gateway.listening import get, listening

CODE = grpc.StatusCode
MESSAGE = round(3.9 * 2**20)
"""Bytes that come of a message that has some more."""
_SENT = (b"\x00" + struct.pack(">I", MESSAGE)).ljust(MESSAGE, b"x")
CHECK, GENERATE = "/grpc.health.v1.Health/Check", "/draftwood.v1.GenerationService/GenerateStream"
_HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 1, 3, 4, 6, 8
_ACK = _END_STREAM = 1
_WINDOW_BYTES, _STREAMS = 4, 3  # settings


class Attacker:
    """A connection of HTTP/2 that sends messages without their ends, as far as the server takes them.

    Attributes:
        ended: streams that the server has ended.
        sent: bytes of each stream's message.
        settings: of the server.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.ended: set[int] = set()
        self.sent: dict[int, int] = {}
        self.settings = {_WINDOW_BYTES: 65_535}
        self._windows = {0: 65_535}
        self._reader, self._writer = reader, writer
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))

    def open(self, path: str, authorization: str = "Bearer wrong") -> None:
        """Begins a call."""
        stream = 2 * len(self.sent) + 1
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
        fields |= {"content-type": "application/grpc", "authorization": authorization}
        self._writer.write(_frame(_HEADERS, 4, stream, b"".join(_literal(*field) for field in fields.items())))
        self.sent[stream], self._windows[stream] = 0, self.settings[_WINDOW_BYTES]
        self._send(stream, 5)

    @property
    def live(self) -> list[int]:
        return [stream for stream in self.sent if stream not in self.ended]

    async def run(self) -> None:
        """Sends and receives until it is cancelled."""
        while True:
            for stream in self.live:
                while self._send(stream, 16_384):
                    await self._writer.drain()
            kind, flags, stream, data = await self._frame()
            if kind == _SETTINGS and not flags & _ACK:
                self._take_settings(data)
                self._writer.write(_frame(_SETTINGS, _ACK, 0))
            elif kind == _PING and not flags & _ACK:
                self._writer.write(_frame(_PING, _ACK, 0, data))
            elif kind == _WINDOW:
                self._windows[stream] += int.from_bytes(data)
            elif kind == _RESET or (kind == _HEADERS and flags & _END_STREAM):
                self.ended.add(stream)

    def _send(self, stream: int, most: int) -> bool:
        """Sends more of a message, as far as the windows allow it: a server closes a connection that sends more."""
        sent, room = self.sent[stream], min(self._windows[0], self._windows[stream], most)
        data = _SENT[sent : sent + max(room, 0)]
        self.sent[stream] += len(data)
        self._windows[0] -= len(data)
        self._windows[stream] -= len(data)
        self._writer.write(_frame(0, 0, stream, data) if data else b"")
        return bool(data)

    def _take_settings(self, data: bytes) -> None:
        before = self.settings[_WINDOW_BYTES]
        self.settings |= dict(struct.iter_unpack(">HI", data))
        for stream in self.sent:
            self._windows[stream] += self.settings[_WINDOW_BYTES] - before

    async def _frame(self) -> tuple[int, int, int, bytes]:
        head = await self._reader.readexactly(9)
        data = await self._reader.readexactly(int.from_bytes(head[:3]))
        return head[3], head[4], int.from_bytes(head[5:]), data


def _frame(kind: int, flags: int, stream: int, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + data


def _literal(name: str, value: str) -> bytes:
    """A header of fewer than 127 bytes, which no table keeps."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@asynccontextmanager
async def attacker(port: int) -> AsyncIterator[Attacker]:
    """A connection that knows the server's settings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    made = Attacker(reader, writer)
    running = asyncio.create_task(made.run())
    await until(lambda: _STREAMS in made.settings or running.done())
    try:
        yield made
    finally:
        running.cancel()
        writer.transport.abort()


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Served]:
    """A server that knows no key."""
    (tmp_path / "auth.yaml").write_text("{}")
    async with serving(auth_file=tmp_path / "auth.yaml") as served:
        yield served


@pytest.mark.parametrize(
    "path",
    [
        GENERATE,
        "/draftwood.v1.MemoryService/ImportMemory",
        f"/{V1}/ServerReflectionInfo",
    ],
)
async def test_a_caller_who_is_not_known_is_refused_before_its_message_has_come(guarded: Served, path: str) -> None:
    async with attacker(guarded.server.port) as attacking:
        for _ in range(10):
            attacking.open(path)
        await until(lambda: not attacking.live)
        assert max(attacking.sent.values()) < 200_000  # windows, and not the messages
        settings = guarded.server._settings
        assert attacking.settings[_STREAMS] == settings.max_running + settings.max_waiting + OTHER_STREAMS
    assert guarded.server.gate.unauthenticated.total == 10


async def test_calls_of_all_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "FULL_CONNECTIONS", 1)
    monkeypatch.setattr(bound, "OTHER_STREAMS", 0)
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        serving(max_running=1, max_waiting=2) as served,
        grpc.aio.insecure_channel(served.server.address, options=options) as other,
        listening(served.server.address) as gateway,
    ):
        asked = health_pb2.HealthCheckRequest()
        watches = [health_pb2_grpc.HealthStub(one).Watch(asked) for one in (served.channel, other, other)]
        for watch in watches:
            await watch.read()
        refused = health_pb2_grpc.HealthStub(served.channel).Watch(asked)
        await assert_refused(refused, CODE.RESOURCE_EXHAUSTED, "Concurrent")
        status, answer = await gateway.answered(get("/v1/models"))
        assert (status, answer["error"]["type"]) == (429, "rate_limit_error")
        assert answer["error"]["message"] == "the service answers too many calls; try again later"
        for watch in watches:
            watch.cancel()


async def test_health_that_is_asked_without_an_end_answers_others(
    guarded: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = guarded.server._bound.health._reader
    monkeypatch.setattr(reader, "_seconds", 60.0)
    async with attacker(guarded.server.port) as attacking:
        for _ in range(20):
            attacking.open(CHECK)
        await until(lambda: sum(sent == MESSAGE for sent in attacking.sent.values()) == 4)
        others = [stream for stream, sent in attacking.sent.items() if sent < MESSAGE]
        assert all(attacking.sent[stream] < 200_000 for stream in others)
        stub = health_pb2_grpc.HealthStub(guarded.channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=20.0)).status
        assert len(attacking.live) == 20
        monkeypatch.setattr(reader, "_seconds", 0.1)
        async with attacker(guarded.server.port) as late:
            late.open(CHECK)
            await until(lambda: not late.live)


LARGE = 1_000_000


def holders_of_large_texts() -> list[str]:
    """What is alive and holds a text or bytes of `LARGE` characters or more, frames by their functions."""
    found = []
    for holder in gc.get_objects():
        if any(isinstance(held, str | bytes) and len(held) >= LARGE for held in gc.get_referents(holder)):
            found.append(holder.f_code.co_qualname if isinstance(holder, FrameType) else type(holder).__name__)
    return found


@pytest.mark.parametrize("field", ["role", "content"])
async def test_a_refused_message_is_forgotten(served: Served, field: str) -> None:
    """Also without the collector of cycles, which runs too seldom for messages of megabytes."""
    request = pb.GenerateRequest(stop=pb.StopOptions(max_tokens=2))
    large: Any = {"role": "a" * LARGE} if field == "role" else {"content": [pb.ContentPart(text="a" * LARGE)]}
    request.chat.messages.add(**{"role": "user", **large})
    gc.disable()
    try:
        before = Counter(holders_of_large_texts())
        assert (await served.answer(request)).status.code() is CODE.INVALID_ARGUMENT
        del request
        await until(lambda: not Counter(holders_of_large_texts()) - before)
    finally:
        gc.enable()


async def test_watches_of_health_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_WATCHES_OF_CONNECTION", 2)
    monkeypatch.setattr(health, "MAX_WATCHES", 3)
    asked = health_pb2.HealthCheckRequest()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(served.server.address, options=options) as other:
        first, second = (health_pb2_grpc.HealthStub(channel) for channel in (served.channel, other))
        watches = [first.Watch(asked) for _ in range(2)]
        for watch in watches:
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await assert_refused(first.Watch(asked), CODE.RESOURCE_EXHAUSTED, "this connection has 2 watches")
        watches.append(second.Watch(asked))
        assert (await watches[2].read()).status
        await assert_refused(second.Watch(asked), CODE.UNIMPLEMENTED, "3 watches are open")
        for watch in watches:
            watch.cancel()
        await until(lambda: not served.server._bound.health._watches)
        again = second.Watch(asked)
        assert (await again.read()).status
        again.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_health_keeps_no_long_name(served: Served, method: str) -> None:
    call: Any = served.channel.unary_stream(f"/grpc.health.v1.Health/{method}")
    name = health_pb2.HealthCheckRequest(service="x" * 257).SerializeToString()
    for request, said in ((name, "service: has more than 256 bytes"), (b"\xff", "request: not a serialized")):
        await assert_refused(call(request), CODE.INVALID_ARGUMENT, said)


async def assert_refused(call: Any, code: grpc.StatusCode, said: str) -> None:
    error = await refusal(call)
    assert error.code() is code
    assert str(error.details()).startswith(said)


SERVE = """
import asyncio, sys
from draftwood_service.logging_config import configure_logging
from tests.service.fakes import serving

async def main():
    configure_logging("error", "console", sys.stderr)
    async with serving(auth_file=sys.argv[1]) as served:
        print(served.server.port, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""


@contextmanager
def guarded_process(folder: Path) -> Iterator[tuple[int, int]]:
    """The process id and the port of a server that knows no key."""
    (folder / "auth.yaml").write_text("{}")
    command = [sys.executable, "-c", SERVE, str(folder / "auth.yaml")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.system
@pytest.mark.parametrize("path", [GENERATE, CHECK])
async def test_a_thousand_messages_without_an_end_hold_little(tmp_path: Path, path: str) -> None:
    with guarded_process(tmp_path) as (pid, port):
        before = peak = resident_mib(pid)
        async with attacker(port) as attacking:
            streams = attacking.settings[_STREAMS]
            most = streams if path == CHECK else 1000  # nobody is refused health
            while len(attacking.sent) < most or (path == GENERATE and attacking.live):
                while len(attacking.live) < streams and len(attacking.sent) < most:
                    attacking.open(path)
                await asyncio.sleep(0.01)
                peak = max(peak, resident_mib(pid))
    assert peak - before < 80  # of 3,900 MiB


@pytest.mark.system
async def test_a_message_is_decompressed_up_to_the_limit(tmp_path: Path) -> None:
    """gRPC 1.83.0 decompresses all of it, and refuses it then."""
    [required] = [require for require in map(Requirement, requires("draftwood") or ()) if require.name == "grpcio"]
    assert not required.specifier.contains("1.83.0")
    with guarded_process(tmp_path) as (pid, port):
        peak = before = resident_mib(pid)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask: Any = channel.unary_unary(CHECK)
            asking = asyncio.ensure_future(ask(bytes(200 << 20), compression=grpc.Compression.Gzip))
            while not asking.done():
                await asyncio.sleep(0.001)
                peak = max(peak, resident_mib(pid))
            assert (await refusal(asking)).code() is CODE.RESOURCE_EXHAUSTED
    assert peak - before < 40
