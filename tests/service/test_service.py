"""The unary methods, health, reflection, TLS, start and stop of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood.v1 import memory_pb2 as memory_pb
from draftwood.v1 import memory_pb2_grpc as memory_pb_grpc
from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.auth import Role
from draftwood_service.engine import reports as reporter
from draftwood_service.rpc.bound import LIVENESS, SERVICES, BoundServer, server_credentials
from draftwood_service.rpc.server import RunningServer
from draftwood_service.settings import Settings
from tests.certificates import make_certificate
from tests.service.auth.test_matrix import Keys, bearer
from tests.service.fakes import FakeEngine, FakeModel, Served, answer, serving, started_bridge, started_server, until
from tests.service.rpc.test_endings import ask, reason

Status = health_pb2.HealthCheckResponse
SERVICE = "draftwood.v1.GenerationService"


async def test_tokenize_and_back_and_long_texts_beside_the_event_loop(served: Served) -> None:
    tokens = await served.stub.Tokenize(pb.TokenizeRequest(text="hé"))
    assert list(tokens.token_ids) == [104, 0xC3, 0xA9]
    assert list(tokens.tokens) == ["h", "\ufffd", "\ufffd"]
    text = await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "hé"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=[pb.ContentPart(text="x")])])
    assert bytes((await served.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids) == b"<user>x"
    assert len((await served.stub.Tokenize(pb.TokenizeRequest(text="x" * 9000))).tokens) == 9000
    assert [thread == "MainThread" for thread in served.model.tokenizer.encoded_on] == [True, True, False]


async def test_model_info() -> None:
    async with serving(max_waiting=7, max_draft_nodes=5) as served:
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_context_tokens) == ("fake", 256, 4096)
    assert (info.max_running_requests, info.max_waiting_requests, info.max_draft_nodes) == (4, 7, 5)
    assert (info.runner, info.dtype, info.weights, info.default_strategy) == ("torch", "float32", "float32", "hybrid")
    assert {"none", "trie"} <= {*info.strategies}


async def test_liveness_fails_while_the_engine_hangs_and_not_during_a_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_SECONDS", 0.02)
    async with serving(engine_stall_timeout=1.0, drain_grace=5.0) as served:
        health, liveness = health_pb2_grpc.HealthStub(served.channel), health_pb2.HealthCheckRequest(service=LIVENESS)
        watch = health.Watch(liveness)
        assert (await watch.read()).status == Status.SERVING
        served.engine.gate.clear()
        call = served.stub.GenerateStream(ask("hello", 1000))
        assert (await watch.read()).status == Status.NOT_SERVING
        served.engine.gate.set()
        assert (await watch.read()).status == Status.SERVING
        served.engine.step_seconds = 0.02
        stopping = asyncio.create_task(served.server.stop())
        await until(lambda: not served.server.serving)
        assert (await health.Check(liveness)).status == Status.SERVING
        call.cancel()
        await stopping


async def test_a_drain_is_told_to_watches_of_health_lets_live_requests_finish_and_admits_none(served: Served) -> None:
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await watch.read()).status == Status.SERVING
    served.engine.gate.clear()
    live = asyncio.create_task(answer(served.stub.GenerateStream(ask(max_tokens=50))))
    await until(lambda: served.server.bridge.live == 1)
    stopping = asyncio.create_task(served.server.stop(grace=60.0))
    assert (await watch.read()).status == Status.NOT_SERVING
    late = await answer(served.stub.GenerateStream(ask()))
    assert late.status.code() is grpc.StatusCode.UNAVAILABLE
    assert reason(late.status) == "SHUTTING_DOWN"
    served.engine.gate.set()
    assert (await live).finished.usage.completion_tokens == 50
    await stopping
    await served.server.stop()
    assert served.engine.closed


async def test_a_drain_closes_the_port_first_and_waits_for_an_import(served: Served) -> None:
    part = memory_pb.ImportMemoryRequest(tenant="a", records=[memory_pb.MemoryRecord(text="hello")])
    call: Any = memory_pb_grpc.MemoryServiceStub(served.channel).ImportMemory()
    await call.write(part)
    assert (await call.read()).records == 1
    stopping = asyncio.create_task(served.server.stop(grace=10.0))
    for _ in range(500):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        except (ConnectionRefusedError, ConnectionResetError):
            break
        writer.close()
        await asyncio.sleep(0.01)
    else:
        raise AssertionError("the port is open")
    await asyncio.sleep(0.05)
    assert not stopping.done()
    await call.write(part)
    assert (await call.read()).records == 2
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await stopping


async def test_calls_are_answered_and_need_a_key_while_the_model_is_loaded(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "auth.yaml")
    caller = bearer(keys.of_role[Role.CALLER])
    settings = Settings(port=0, max_running=4, auth_file=keys.path)
    bound, engine, model = BoundServer(settings), FakeEngine(), FakeModel()
    await bound.start()
    async with grpc.aio.insecure_channel(bound.address) as channel:
        health, stub = health_pb2_grpc.HealthStub(channel), pb_grpc.GenerationServiceStub(channel)
        for service in SERVICES:
            checked = await health.Check(health_pb2.HealthCheckRequest(service=service.full_name))
            assert checked.status == Status.NOT_SERVING
        assert reason((await answer(stub.GenerateStream(ask()))).status) == "UNAUTHENTICATED"
        early = await answer(stub.GenerateStream(ask(), metadata=caller))
        assert early.status.code() is grpc.StatusCode.UNAVAILABLE
        assert reason(early.status) == "LOADING"
        with pytest.raises(grpc.aio.AioRpcError, match="the server is loading its model"):
            await stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=caller)
        server = RunningServer(bound, model, await started_bridge(settings, model, lambda: engine))
        await server.start()
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.SERVING
        loaded = await answer(stub.GenerateStream(ask(max_tokens=4), metadata=caller))
        assert loaded.finished.usage.completion_tokens == 4
    await server.stop()


@pytest.mark.parametrize(("request_seconds", "refused"), [(1.0, 0), (20.0, 3)])
async def test_a_drain_refuses_at_once_what_waits_and_would_not_end_in_time(
    served: Served, request_seconds: float, refused: int
) -> None:
    served.server.bridge._admission._request_seconds = request_seconds  # as long as requests took so far
    served.engine.gate.clear()
    live = [asyncio.create_task(answer(served.stub.GenerateStream(ask(max_tokens=50)))) for _ in range(7)]
    await until(lambda: served.server.bridge.live == 7)
    stopping = asyncio.create_task(served.server.stop(grace=10.0))
    await until(lambda: served.server.bridge.draining and sum(one.done() for one in live) == refused)
    served.engine.gate.set()
    answers = [await one for one in live]
    assert [reason(one.error) for one in answers if one.error is not None] == ["SHUTTING_DOWN"] * refused
    assert [one.finished.usage.completion_tokens for one in answers if one.error is None] == [50] * (7 - refused)
    await stopping


async def test_addresses_that_are_taken_not_ours_or_not_resolved(served: Served) -> None:
    taken = Settings(port=served.server.port)
    with pytest.raises(InvalidValueError, match=rf"^port {taken.port}: address already in use$"):
        BoundServer(taken)
    for host, problem in (("203.0.113.1", "cannot assign requested address$"), ("no.such.host.invalid", ".*name")):
        with pytest.raises(InvalidValueError, match=rf"^host {host}: {problem}"):
            BoundServer(Settings(host=host, port=0, auth="open"))


async def test_engine_that_cannot_be_made() -> None:
    def fail() -> FakeEngine:
        raise MemoryError("too little")

    with pytest.raises(MemoryError, match="too little"):
        await started_server(Settings(port=0), FakeModel(), fail)


async def test_tls_follows_a_renewed_certificate(tmp_path: Path) -> None:
    async def asked(certificate: bytes) -> str:
        credentials = grpc.ssl_channel_credentials(certificate)
        async with grpc.aio.secure_channel(f"localhost:{served.server.port}", credentials) as channel:
            stub = pb_grpc.GenerationServiceStub(channel)
            return (await stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20.0)).model

    cert, key = make_certificate(tmp_path, "one")
    async with serving(tls_cert=cert, tls_key=key) as served:
        old = cert.read_bytes()
        assert await asked(old) == "fake"
        renewed = make_certificate(tmp_path, "two")
        await asyncio.sleep(0.01)
        renewed[1].replace(key)
        renewed[0].replace(cert)
        assert await asked(cert.read_bytes()) == "fake"
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asked(old)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_is_replaced_only_when_it_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise handshakes at the same time fail, and after some thousand of them gRPC ends the process by a signal."""
    fetchers = []
    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", lambda first, fetch, **more: fetchers.append(fetch))
    cert, key = make_certificate(tmp_path, "one")
    server_credentials(Settings(tls_cert=cert, tls_key=key))
    (fetch,) = fetchers
    assert fetch() is None
    renewed = make_certificate(tmp_path, "two")
    key.unlink()
    assert fetch() is None
    renewed[1].replace(key)
    renewed[0].replace(cert)
    assert [isinstance(fetch(), grpc.ServerCertificateConfiguration), fetch()] == [True, None]
