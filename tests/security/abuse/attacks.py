"""The attacks, each by one tenant on a service that another tenant uses.

Every one of them once stopped or starved the other callers; docs/limits.md says what bounds it now.
"""

from __future__ import annotations

import asyncio
import json
import time
from functools import partial
from typing import Any

import grpc
import grpc.aio

from draftwood.v1 import generation_pb2 as pb
from tests.security.abuse.attack import Attack, Statuses, Traffic
from tests.security.abuse.gateway_attacks import GATEWAY_ATTACKS

ATTACKER, FAIR = "attacker", "fair"
MAX_MESSAGE_BYTES = 17 << 20
"""The service is started with this limit: with its default of 4 MiB gRPC would refuse the largest requests unread."""
FAIR_STREAMS = 4
"""Streams of a well-behaved tenant: its share of the slots beside one other tenant."""
_PAUSE = 0.25
"""Seconds between two calls of an attack that sends one large request after the other."""
_LONG = 400
"""Tokens of a long answer."""
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", 64 << 20)]


def _one_after_another(method: str, payload: bytes) -> Traffic:
    assert len(payload) < MAX_MESSAGE_BYTES

    async def attack(target: str, seconds: float, statuses: Statuses) -> None:
        end = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(target, options=_OPTIONS) as channel:
            call: Any = channel.unary_stream(f"/draftwood.v1.GenerationService/{method}")
            if method != "Generate":
                call = channel.unary_unary(f"/draftwood.v1.GenerationService/{method}")
            while time.monotonic() < end:
                await _finish(call(payload, timeout=seconds), statuses)
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
                generate: Any = channel.unary_stream("/draftwood.v1.GenerationService/Generate")
                serial = 0
                while time.monotonic() < end:
                    request = _request(tenant, text=f"Client {number} asks question {serial}.")
                    request.stop.max_tokens, request.stop.ignore_eos = _LONG, True
                    call = generate(request.SerializeToString())
                    serial += 1
                    if read:
                        await _finish(call, statuses)
                    else:
                        await _stall(call, end, statuses)
                    await asyncio.sleep(_PAUSE if statuses.counts["UNAVAILABLE"] else 0.0)

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

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


def _request(tenant: str = ATTACKER, **prompt: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(tenant=tenant, **prompt)


def _formatted(schema: dict[str, Any]) -> Traffic:
    return _in_format(json_schema=json.dumps(schema))


def _in_format(**chosen: str) -> Traffic:
    request = _request(text="Answer as JSON.", format=pb.OutputFormat(**chosen))
    request.stop.max_tokens = 64
    return _one_after_another("Generate", request.SerializeToString())


def _optional(count: int) -> Traffic:
    return _formatted({"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}})


def _many_messages(count: int, last: bytes = b"") -> Traffic:
    """A chat of empty messages; `last` follows it."""
    request = _request(chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * count))
    return _one_after_another("Generate", request.SerializeToString() + last)


def _stop_strings(count: int) -> Traffic:
    request = _request(text="Hello", stop=pb.StopOptions(strings=[""] * count))
    return _one_after_another("Generate", request.SerializeToString())


def _long_role() -> Traffic:
    request = _request()
    request.chat.messages.add(role="a" * 15_000_000, content="Hello")
    return _one_after_another("Generate", request.SerializeToString())


def _long_text(method: str) -> Traffic:
    text = "a" * 15_000_000
    request = _request(text=text) if method == "Generate" else pb.TokenizeRequest(text=text)
    return _one_after_another(method, request.SerializeToString())


_OK, _INVALID = frozenset({"OK"}), frozenset({"INVALID_ARGUMENT"})
_FULL = frozenset({"OK", "UNAVAILABLE"})
_LATE = _OK | _INVALID | {"DEADLINE_EXCEEDED"}
"""Of a format that takes long to compile. The deadline is the attacker's own, of two seconds."""
_STALLED = frozenset({"CANCELLED", "UNAVAILABLE", "ABORTED"})
_MULTIPLE = {"type": "integer", "multipleOf": 99991}
_AMBIGUOUS = "start: e\ne: e e | /[a-z ]/"
ATTACKS = [
    Attack("fair", "a well-behaved tenant: its share of the slots", _OK, partial(_streams, FAIR, FAIR_STREAMS)),
    Attack("many-messages", "a chat of a million empty messages", _INVALID, partial(_many_messages, 1_000_000)),
    Attack("malformed", "12 MB of messages, and one bad byte", _INVALID, partial(_many_messages, 1_500_000, b"\x0f")),
    Attack("stop-strings", "five million empty stop strings", _INVALID, partial(_stop_strings, 5_000_000)),
    Attack("long-role", "a role of 15 MB", _INVALID, _long_role),
    Attack("long-text", "a prompt of 15 MB", _INVALID, partial(_long_text, "Generate")),
    Attack("long-tokenize", "15 MB to Tokenize", _INVALID, partial(_long_text, "Tokenize")),
    Attack("multiple-of", "a schema with multipleOf 99991", _LATE, partial(_formatted, _MULTIPLE)),
    Attack("many-properties", "a schema with 1,500 optional properties", _LATE, partial(_optional, 1500)),
    Attack("properties", "a schema with 500 optional properties", _LATE, partial(_optional, 500)),
    Attack("ambiguous-grammar", "a grammar whose masks take long", _LATE, partial(_in_format, lark=_AMBIGUOUS)),
    Attack("10x-fair", "ten times its fair share of streams", _FULL, partial(_streams, ATTACKER, 10 * FAIR_STREAMS)),
    Attack("long-requests", "80 long requests at once", _FULL, partial(_streams, ATTACKER, 80)),
    Attack("stalled-readers", "60 that stop reading", _STALLED, partial(_streams, ATTACKER, 60, read=False)),
]
ATTACKS += GATEWAY_ATTACKS
