"""What an attack is, and how its calls ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from draftwood.v1 import generation_pb2 as pb

ATTACKER, FAIR = "attacker", "fair"
MAX_MESSAGE_BYTES = 17 << 20
"""The service is started with this limit: with its default of 4 MiB gRPC would refuse the largest requests unread."""
FAIR_STREAMS = 4
"""Streams of a well-behaved tenant: its share of the slots beside one other tenant."""
_LONG = 400
"""Tokens of a long answer."""
_UNTYPED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}


@dataclass(slots=True)
class Statuses:
    """How the calls of an attack ended.

    Attributes:
        counts: by status code of gRPC or HTTP; CANCELLED where the attack ended the call, CLOSED where the gateway
            closed a connection without an answer.
        untyped: the first status that does not tell a caller what to change, if there is one.
    """

    counts: Counter[str]
    untyped: str = ""

    def add(self, code: grpc.StatusCode, details: str | None) -> None:
        self.counts[code.name] += 1
        if code in _UNTYPED and not self.untyped:
            self.untyped = f"{code.name}: {details}"

    def add_http(self, answer: bytes) -> None:
        """Counts the first line of an answer; none is a connection that was closed."""
        status = answer.split(b" ", 2)[1].decode() if answer.startswith(b"HTTP/") else "CLOSED"
        self.counts[status] += 1
        if status == "500" and not self.untyped:
            self.untyped = answer[:200].decode(errors="replace")


Traffic = Callable[[str, float, Statuses], Awaitable[None]]
"""(target, seconds, statuses): attacks for so long."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Attributes:
    name: in reports; docs/limits.md has what each does.
    allowed: statuses that its calls may end with.
    prepare: makes its traffic, payloads included, before the time is taken.
    gateway: its target is the gateway, and it is what others see through the gateway that counts.
    """

    name: str
    allowed: frozenset[str]
    prepare: Callable[[], Traffic]
    gateway: bool = False


MOST_FILES = 1024
"""Open files of the gateway, as in many containers."""
_HALF_OPEN = 1500
"""Connections of the attack that keeps them half open: more than the gateway may have files."""
_PIECE = 64 * 1024
_BODY_BYTES = 4 * 2**20 - 100
_PAUSE = 0.25
_PATIENCE = 30.0
"""Seconds that the attacker waits for the answer to a request, at least: an error that says what is wrong with it."""
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"

Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""What an attack does with one connection."""


def _clients(count: int, client: Client, pause: float = 0.0) -> Traffic:
    """So many clients at once, each with one connection after the other."""

    async def attack(target: str, seconds: float, statuses: Statuses) -> None:
        end = time.monotonic() + seconds
        host, port = target.rsplit(":", 1)

        async def connections() -> None:
            while time.monotonic() < end:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    try:
                        with suppress(OSError):
                            await client(reader, writer)
                        await _count(reader, statuses)
                    finally:
                        writer.transport.abort()
                await asyncio.sleep(pause)

        await _at_once([connections() for _ in range(count)], seconds)

    return attack


async def _at_once(clients: Sequence[Coroutine[Any, Any, None]], seconds: float) -> None:
    """Runs clients, and ends them after so long."""
    tasks = [asyncio.create_task(client) for client in clients]
    _, late = await asyncio.wait(tasks, timeout=seconds)
    for task in late:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _count(reader: asyncio.StreamReader, statuses: Statuses) -> None:
    """Reads until the gateway closes the connection."""
    answer = b""
    with suppress(OSError):
        while part := await reader.read(_PIECE):
            answer = answer or part
    statuses.add_http(answer)


def _endless_header() -> Traffic:
    piece = b"a" * _PIECE

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(_HALF_HEADER)
        while not reader.at_eof() and not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return _clients(1, client)


def _half(begun: bytes) -> Traffic:
    """Connections on which a byte comes now and then, and never the last one."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(begun)
        while not reader.at_eof() and not writer.is_closing():
            await asyncio.sleep(0.5)
            writer.write(b" ")
            await writer.drain()

    return _clients(_HALF_OPEN, client)


def _many_values() -> Traffic:
    message = '{"role":"u"}'
    messages = ",".join([message] * (_BODY_BYTES // (len(message) + 1)))
    body = f'{{"messages":[{messages}]}}'.encode()
    return _sends(_HEAD.replace(b"/v1/", b"/v1/chat/") + b"content-length: %d\r\n\r\n" % len(body) + body)


def _sends(request: bytes) -> Traffic:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)
        await writer.drain()
        writer.write_eof()

    return _clients(1, client, _PAUSE)


def _fair() -> Traffic:
    fields = {"prompt": "A client asks.", "max_tokens": _LONG, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "draftwood": {"tenant": "fair"}}).encode()
    request = _HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(request)

    return _clients(FAIR_STREAMS, client)


_CUT = frozenset({"431", "CLOSED"})
"""CLOSED is a connection that the gateway ended while a client was still sending, or to make place for another."""
_HTTP_LATE = frozenset({"408", "CLOSED"})
_HALF_HEADER, _HALF_BODY = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: ", _HEAD + b"content-length: 100000\r\n\r\n{"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]


def _one_after_another(method: str, payload: bytes, patience: float = _PATIENCE) -> Traffic:
    assert len(payload) < MAX_MESSAGE_BYTES

    async def attack(target: str, seconds: float, statuses: Statuses) -> None:
        end = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            call: Any = channel.unary_stream(f"/draftwood.v1.GenerationService/{method}")
            if method != "GenerateStream":
                call = channel.unary_unary(f"/draftwood.v1.GenerationService/{method}")
            while time.monotonic() < end:
                await _finish(call(payload, timeout=max(seconds, patience)), statuses)
                await asyncio.sleep(_PAUSE)

    return attack


async def _finish(call: Any, statuses: Statuses) -> None:
    """Reads a call to its end."""
    try:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                pass
        statuses.add(grpc.StatusCode.OK, None)
    except grpc.aio.AioRpcError as error:
        statuses.add(error.code(), error.details())


def _streams(tenant: str, clients: int, *, read: bool = True) -> Traffic:
    """Clients on connections of their own that ask for long answers, and `read` them or stop after one message."""

    async def attack(target: str, seconds: float, statuses: Statuses) -> None:
        end = time.monotonic() + seconds

        async def client(number: int) -> None:
            async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
                generate: Any = channel.unary_stream("/draftwood.v1.GenerationService/GenerateStream")
                serial = 0
                while time.monotonic() < end:
                    request = pb.GenerateRequest(tenant=tenant, text=f"Client {number} asks question {serial}.")
                    request.stop.max_tokens, request.stop.ignore_eos = _LONG, True
                    call = generate(request.SerializeToString())
                    serial += 1
                    await (_finish(call, statuses) if read else _stall(call, end, statuses))
                    await asyncio.sleep(_PAUSE if statuses.counts["UNAVAILABLE"] else 0.0)

        await _at_once([client(number) for number in range(clients)], seconds)

    return attack


async def _stall(call: Any, end: float, statuses: Statuses) -> None:
    """Reads one message and no more until `end`."""
    try:
        await call.read()
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        call.cancel()
        statuses.add(grpc.StatusCode.CANCELLED, None)
    except grpc.aio.AioRpcError as error:
        statuses.add(error.code(), error.details())


def _asked(last: bytes = b"", patience: float = _PATIENCE, **fields: Any) -> Traffic:
    """A request again and again; `last` follows its bytes."""
    request = pb.GenerateRequest(tenant=ATTACKER, **fields)
    return _one_after_another("GenerateStream", request.SerializeToString() + last, patience)


def _empty_messages(count: int) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(role="user")] * count)


def _stop_strings() -> Traffic:
    return _asked(text="Hello", stop=pb.StopOptions(strings=[""] * 5_000_000))


def _long_role() -> Traffic:
    message = pb.ChatMessage(role="a" * 15_000_000, content=[pb.ContentPart(text="Hello")])
    return _asked(chat=pb.Chat(messages=[message]))


def _in_format(**chosen: str) -> Traffic:
    stop = pb.StopOptions(max_tokens=64)
    return _asked(patience=0.0, text="Answer as JSON.", format=pb.OutputFormat(**chosen), stop=stop)


def _optional(count: int) -> Traffic:
    properties = {f"p{i}": {"type": "integer"} for i in range(count)}
    return _in_format(json_schema=json.dumps({"type": "object", "properties": properties}))


def _long_tokenize() -> Traffic:
    return _one_after_another("Tokenize", pb.TokenizeRequest(text="a" * 15_000_000).SerializeToString())


_OK, _INVALID = frozenset({"OK"}), frozenset({"INVALID_ARGUMENT"})
_FULL = frozenset({"OK", "UNAVAILABLE"})
_LATE = _OK | _INVALID | {"DEADLINE_EXCEEDED"}
"""Of a format that takes long to compile. The deadline is the attacker's own: the seconds that the attack lasts."""
_STALLED = frozenset({"CANCELLED", "UNAVAILABLE", "ABORTED"})
_MULTIPLE = '{"type": "integer", "multipleOf": 99991}'
_AMBIGUOUS = "start: e\ne: e e | /[a-z ]/"
ATTACKS = [
    Attack("fair", _OK, lambda: _streams(FAIR, FAIR_STREAMS)),
    Attack("many-messages", _INVALID, lambda: _asked(chat=_empty_messages(1_000_000))),
    Attack("malformed", _INVALID, lambda: _asked(b"\x0f", chat=_empty_messages(1_500_000))),
    Attack("stop-strings", _INVALID, _stop_strings),
    Attack("long-role", _INVALID, _long_role),
    Attack("long-text", _INVALID, lambda: _asked(text="a" * 15_000_000)),
    Attack("long-tokenize", _INVALID, _long_tokenize),
    Attack("multiple-of", _LATE, lambda: _in_format(json_schema=_MULTIPLE)),
    Attack("many-properties", _LATE, lambda: _optional(1500)),
    Attack("properties", _LATE, lambda: _optional(500)),
    Attack("ambiguous-grammar", _LATE, lambda: _in_format(lark=_AMBIGUOUS)),
    Attack("10x-fair", _FULL, lambda: _streams(ATTACKER, 10 * FAIR_STREAMS)),
    Attack("long-requests", _FULL, lambda: _streams(ATTACKER, 80)),
    Attack("stalled-readers", _STALLED, lambda: _streams(ATTACKER, 60, read=False)),
    Attack("http-fair", frozenset({"200"}), _fair, True),
    Attack("http-endless-header", _CUT, _endless_header, True),
    Attack("http-large-header", _CUT, lambda: _sends(_HALF_HEADER + b"a" * (32 << 20) + b"\r\n\r\n"), True),
    Attack("http-half-headers", _HTTP_LATE, lambda: _half(_HALF_HEADER), True),
    Attack("http-half-bodies", _HTTP_LATE, lambda: _half(_HALF_BODY), True),
    Attack("http-many-values", frozenset({"400"}), _many_values, True),
]
