"""What a client without a key can hold: headers, bodies and connections, on real sockets."""

from __future__ import annotations

import asyncio
import gc
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from draftwood_service.gateway import connections
from draftwood_service.gateway import http as requests
from draftwood_service.gateway.reading import ParsedRequest
from tests.certificates import make_certificate
from tests.service.fakes import serving, until
from tests.service.gateway.listening import Listening, get, listening, post, read_answer

HALF_HEAD = b"GET / HTTP/1.1\r\nhost: x\r\nx-a: "
HALF_BODY = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
ENDLESS = b"a" * 65_536
STREAM = post("/v1/completions", {"prompt": "Hi", "max_tokens": 200, "stream": True})
SHORT = {"prompt": "Hi", "max_tokens": 2}
OK = 200, {"status": "ok"}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that a test can wait for. Other tests have as much as there is, since this machine may be busy."""
    for name in ("HEADER_SECONDS", "BODY_SECONDS", "READ_SECONDS", "_CLOSE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.5)
    monkeypatch.setattr(connections, "_SWEEP_SECONDS", 0.1)


@pytest.fixture
async def gateway() -> AsyncIterator[Listening]:
    async with serving() as served, listening(served.server.address) as running:
        yield running


async def until_closed(reader: Any) -> bytes:
    answer = b""
    with suppress(ConnectionError):
        while part := await asyncio.wait_for(reader.read(65_536), 20):
            answer += part
    return answer


async def test_a_header_without_end_is_refused(gateway: Listening) -> None:
    reader, writer = await gateway.open(HALF_HEAD)
    sent = 0
    with suppress(ConnectionError):
        while sent < 64 << 20 and not writer.is_closing() and not reader.at_eof():
            writer.write(ENDLESS)
            await writer.drain()
            sent += len(ENDLESS)
            await asyncio.sleep(0)
    assert sent < 16 << 20  # what sockets hold
    assert b"431" in (await until_closed(reader))[:20] or reader.exception() is not None or reader.at_eof()


@pytest.mark.parametrize("sizes", [[33_000], [200_000], [10] * 4000])
async def test_headers_that_are_too_large_are_refused(gateway: Listening, sizes: list[int]) -> None:
    headers = "".join(f"x-{at}: {'a' * size}\r\n" for at, size in enumerate(sizes))
    status, answer = await gateway.answered(f"GET / HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
    assert (status, answer["error"]["type"]) == (431, "invalid_request_error")


async def test_headers_of_30_kb_are_accepted(gateway: Listening) -> None:
    head = f"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: {'a' * 30_000}\r\n\r\n".encode()
    reader, writer = await gateway.open()
    for at in range(0, len(head), 1000):
        writer.write(head[at : at + 1000])
        await writer.drain()
    assert read_answer(await until_closed(reader)) == OK


@pytest.mark.parametrize("name", ["trailers", "chunk extension"])
async def test_what_comes_between_chunks_is_bounded(gateway: Listening, name: str) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    begin = b"1\r\n{\r\n0\r\nx: " if name == "trailers" else b"1;x="
    reader, _ = await gateway.open(head + begin + b"a" * 400_000)
    answer = await until_closed(reader)
    assert b" 431 " in answer[:20] or b" 400 " in answer[:20] or not answer


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("begun", [b"", HALF_HEAD, HALF_BODY, b"\r\n"])
async def test_a_request_that_is_not_finished_in_time_is_ended(gateway: Listening, begun: bytes) -> None:
    began = time.monotonic()
    reader, writer = await gateway.open(begun)

    async def trickle() -> None:
        while True:
            await asyncio.sleep(0.05)
            writer.write(begun and (b"\r\n" if begun == b"\r\n" else b" "))

    trickling = asyncio.create_task(trickle())
    answer = await until_closed(reader)
    trickling.cancel()
    assert time.monotonic() - began > 0.4
    assert "late" in gateway.ended
    if begun in (HALF_HEAD, HALF_BODY):
        assert b"408" in answer[:20]
    assert await gateway.answered(get("/health")) == OK


@pytest.mark.usefixtures("short")
async def test_the_second_request_of_a_connection_has_the_same_time(gateway: Listening) -> None:
    reader, writer = await gateway.open(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.7)  # idle, within the keep-alive timeout: longer than a request may take
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(HALF_HEAD)
    assert b" 408 " in (await until_closed(reader))[:20]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is late."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_half_open_connections_make_place_for_others() -> None:
    async with serving() as served, listening(served.server.address, limit=20) as gateway:
        held = [await gateway.open(part) for part in (HALF_HEAD, HALF_BODY, b"") for _ in range(20)]
        for _ in range(5):
            assert await gateway.answered(get("/health")) == OK
        assert {*gateway.ended} == {"full"}
        assert gateway.ended.count("full") >= 40
        assert len(held) == 60


async def test_a_connection_that_is_answered_keeps_its_place() -> None:
    async with serving() as served, listening(served.server.address, limit=3) as gateway:
        served.engine.step_seconds = 0.01
        streams = [await gateway.open(STREAM) for _ in range(2)]
        for reader, _ in streams:
            await reader.readuntil(b"data: ")
        for _ in range(10):
            await gateway.open(HALF_HEAD)
        for reader, _ in streams:
            assert b"[DONE]" in await until_closed(reader)


LARGE = {"prompt": "x" * 500_000, "max_tokens": 2}


@pytest.mark.parametrize("authorization", [None, "Bearer wrong"])
async def test_a_large_body_of_a_caller_who_is_not_known_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authorization: str | None
) -> None:
    """It is discarded as it comes, and the caller reads why."""
    (tmp_path / "auth.yaml").write_text("{}")
    monkeypatch.setattr(requests.BodyBudget, "taken", None)  # nothing is read
    async with serving(auth_file=tmp_path / "auth.yaml") as served, listening(served.server.address) as gateway:
        header = "" if authorization is None else f"\r\nauthorization: {authorization}"
        sent = post("/v1/completions", LARGE).replace(b"host: x", f"host: x{header}".encode())
        for status, answer in await asyncio.gather(*(gateway.answered(sent) for _ in range(10))):
            assert (status, answer["error"]["type"]) == (401, "authentication_error")


async def test_large_bodies_are_read_a_few_at_once_and_small_ones_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests.BodyBudget.__init__, "__defaults__", (1_200_000,))
    sent = post("/v1/completions", LARGE)
    async with serving() as served, listening(served.server.address) as gateway:
        held = [await gateway.open(sent[:-10]) for _ in range(2)]  # of 500 KB each
        await until(lambda: len(gateway.made._bodies._waiting) == 0 and gateway.made._bodies._free < 300_000)
        waits = asyncio.create_task(gateway.answered(sent))
        await until(lambda: len(gateway.made._bodies._waiting) == 1)
        assert (await gateway.posted("/v1/completions", SHORT))[0] == 200
        held[0][1].transport.abort()
        status, answer = await waits
        assert (status, answer["error"]["param"]) == (400, "prompt")
        held[1][1].write(sent[-10:])
        assert b" 400 " in (await until_closed(held[1][0]))[:20]
        await until(lambda: gateway.made._bodies._free == 1_200_000)


@pytest.mark.parametrize("fields", [{"prompt": [30_000] * 100_000}, {"prompt": ["x", "x" * 100_000], "stream": True}])
async def test_a_refused_request_leaves_nothing_to_the_collector(fields: dict[str, Any]) -> None:
    """It would hold 64 large requests at once until it runs."""
    async with serving() as served, listening(served.server.address) as gateway:
        assert (await gateway.posted("/v1/completions", fields))[0] == 400
        gc.collect()
        gc.disable()
        try:
            assert (await gateway.posted("/v1/completions", fields))[0] == 400
            await until(lambda: not any(type(one) is ParsedRequest for one in gc.get_objects()))
        finally:
            gc.enable()


@pytest.mark.usefixtures("patient")
async def test_half_a_request_behind_a_whole_one_makes_place() -> None:
    async with serving() as served, listening(served.server.address, limit=10) as gateway:
        for _ in range(30):
            reader, _ = await gateway.open(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HALF_HEAD)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        assert gateway.ended.count("full") == 20


@pytest.mark.usefixtures("short")
async def test_clients_that_read_nothing_make_place() -> None:
    async with serving() as served, listening(served.server.address, limit=5) as gateway:
        for _ in range(15):
            reader, writer = await gateway.open()
            reader._transport.pause_reading()
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2000)
            await asyncio.sleep(0.05)
        for _ in range(200):  # on a busy machine those may still be answered that take nothing
            if (answer := await gateway.answered(get("/health"))) == OK:
                break
            await asyncio.sleep(0.1)
        assert answer == OK
        for writer in gateway.writers:
            writer.transport.abort()


async def test_no_place_is_a_503() -> None:
    async with serving() as served, listening(served.server.address, limit=1) as gateway:
        reader, _ = await gateway.open(STREAM)
        await reader.readuntil(b"data: ")
        served.engine.gate.clear()
        status, answer = await gateway.answered(b"")
        assert (status, answer["error"]["type"]) == (503, "server_error")
        served.engine.gate.set()
        assert b"[DONE]" in await until_closed(reader)


async def test_incomplete_bodies_are_bounded_together() -> None:
    async with serving() as served, listening(served.server.address, byte_limit=300_000) as gateway:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n"
        held = [await gateway.open(head + b" " * 90_000) for _ in range(10)]
        for reader, _ in held[:6]:
            assert await until_closed(reader) == b""
        assert {*gateway.ended} == {"bytes"}
        status, answer = await gateway.posted("/v1/completions", SHORT)
        assert (status, answer["choices"][0]["text"]) == (200, "ab")


@pytest.mark.usefixtures("short")
async def test_a_client_that_reads_nothing_is_left(gateway: Listening) -> None:
    """/ is large enough for the buffers of a few pipelined answers."""
    reader, writer = await gateway.open()
    reader._transport.pause_reading()
    began = time.monotonic()
    with suppress(ConnectionError):
        while time.monotonic() - began < 20 and "late" not in gateway.ended:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 200)
            await asyncio.sleep(0.02)
    assert "late" in gateway.ended
    writer.transport.abort()


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"NONSENSE\r\n\r\n", 400, None),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: x\r\n\r\n", 400, None),
        (get("/v1/nothing"), 404, "unknown_url"),
        (get("/v1/chat/completions"), 405, "method_not_supported"),
    ],
)
async def test_every_error_has_the_form_of_openai(
    gateway: Listening, sent: bytes, status: int, code: str | None
) -> None:
    got, answer = await gateway.answered(sent)
    assert (got, answer["error"]["code"]) == (status, code)
    assert answer["error"].keys() == {"message", "type", "param", "code"}


async def test_a_large_body_that_is_refused_reads_why(gateway: Listening) -> None:
    status, answer = await gateway.answered(post("/v1/completions", {"prompt": "x" * (2 << 20)}))
    assert (status, answer["error"]["param"]) == (400, "body")


async def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    trusting = ssl.create_default_context(cafile=str(certificate))
    trusting.check_hostname = False
    async with serving() as served, listening(served.server.address, limit=5, tls=context) as gateway:
        for _ in range(3):
            status, answer = await gateway.answered(post("/v1/completions", SHORT), trusting)
            assert (status, answer["choices"][0]["text"]) == (200, "ab")
        monkeypatch.setattr(connections, "HEADER_SECONDS", 1.5)
        silent = [await gateway.open() for _ in range(20)]
        assert (await gateway.answered(get("/health"), trusting))[0] == 200
        assert gateway.ended.count("full") >= 15
        for reader, _ in silent:
            assert await until_closed(reader) == b""  # a handshake that does not come is late
        reader, _ = await gateway.open(get("/health"))
        assert b"200" not in await until_closed(reader)  # no clear text
