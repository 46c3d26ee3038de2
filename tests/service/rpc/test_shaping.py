"""Answers at a fixed cadence in messages of a fixed size: what an observer sees does not depend on what is written."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc
import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import generation_pb2_grpc as pb_grpc
from draftwood_client import AsyncClient
from draftwood_model_runner.errors import ModelError
from draftwood_service.rpc.answers import pad
from tests.service.fakes import Answer, FakeEngine, answer, serving, until
from tests.service.rpc.test_bad_input import violation
from tests.service.rpc.test_endings import ask, reason

CADENCE, PADDING = 0.02, 1024
SHAPED: dict[str, Any] = {"delta_cadence": CADENCE, "delta_padding": PADDING, "delta_rounding": 8}
NO_DRAFTS = pb.DraftOptions(enabled=False)
"""The first use of a strategy compiles it, for seconds."""


def sizes(result: Answer) -> list[int]:
    return [event.ByteSize() for event in result.events]


@pytest.mark.parametrize("multiple", [1, 2, 3, 127, 256, 1024, 16_400, 65_536])
def test_padding_reaches_every_multiple(multiple: int) -> None:
    for length in itertools.chain(range(300), range(16_000, 16_800, 7)):
        message = pb.GenerateStreamResponse(delta=pb.Delta(parts=[pb.Part(text="x" * length)]))
        pad(message, multiple)
        assert len(message.SerializeToString()) % multiple == 0
        assert message.delta.parts[0].text == "x" * length
        assert message.ByteSize() < length + 20 + 2 * multiple + 1


async def observed(text: str, tokens_per_step: int, step_seconds: float, **settings: Any) -> Answer:
    engine = FakeEngine()
    engine.text, engine.tokens_per_step, engine.step_seconds = text, tokens_per_step, step_seconds
    async with serving(engine, **settings) as served:
        result = await served.answer(ask(max_tokens=40, drafting=NO_DRAFTS))
        assert result.text == 40 * text
        assert len(result.token_ids) == 40
        assert result.finished.usage.completion_tokens == 40
    return result


async def test_sizes_reveal_neither_the_text_nor_the_accepted_tokens() -> None:
    slowly = {**SHAPED, "delta_cadence": 0.1}
    short = await observed("a", 1, 0.001, **slowly)
    long = await observed("äöü and more", 5, 0.002, **slowly)
    assert sizes(short) == sizes(long) == [PADDING] * 10  # Started, eight deltas, Finished


async def test_deltas_come_at_multiples_of_the_cadence_only() -> None:
    async with serving(delta_cadence=0.1) as served:
        served.engine.step_seconds = 0.01
        began, times = time.perf_counter(), []
        call = served.stub.GenerateStream(ask(max_tokens=100, drafting=NO_DRAFTS))
        while isinstance(event := await call.read(), pb.GenerateStreamResponse):
            if event.WhichOneof("event") == "delta":
                times.append(time.perf_counter() - began)
        # The engine writes every 10 ms; a reader on a busy machine may see a delta late, but none early.
        assert len(times) >= 3
        assert all(later > 0.1 * number - 0.01 for number, later in enumerate(times, 1))


async def test_a_queued_request_sends_empty_deltas() -> None:
    async with serving(**SHAPED) as served:
        served.engine.gate.clear()
        call = served.stub.GenerateStream(ask(max_tokens=6))
        events: list[Any] = [await call.read() for _ in range(4)]
        assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta", "delta"]
        assert [list(event.delta.token_ids) for event in events] == [[]] * 4
        assert [event.ByteSize() for event in events] == [PADDING] * 4
        served.engine.gate.set()
        assert (await answer(call)).text == "abcdef"


@pytest.mark.parametrize(
    ("padding", "text", "tokens", "fewest"),
    [
        pytest.param(256, "some text ", 100, 4, id="tokens beyond a message"),
        pytest.param(64, "x" * 100, 3, 5, id="a token larger than a message"),
    ],
)
async def test_what_does_not_fit_a_message_waits_for_the_next_one(
    padding: int, text: str, tokens: int, fewest: int
) -> None:
    async with serving(delta_cadence=CADENCE, delta_padding=padding) as served:
        served.engine.tokens_per_step, served.engine.text = 100, text
        result = await served.answer(ask(max_tokens=tokens))
        assert result.text == tokens * text
        deltas = [event.ByteSize() for event in result.events if event.HasField("delta")]
        assert deltas == [padding] * len(deltas)
        assert len(deltas) >= fewest


async def test_details_of_each_token() -> None:
    async with serving(**SHAPED) as served:
        result = await served.answer(ask(max_tokens=60, output=pb.OutputOptions(token_details=True)))
        details = [detail for event in result.events for detail in event.delta.details]
        assert "".join(detail.text for detail in details) == result.text
        assert [detail.drafted for detail in details] == [True, False] * 30
        assert set(sizes(result)) == {PADDING}


async def test_samples_have_a_delta_each_until_the_last_has_ended() -> None:
    async with serving(**SHAPED) as served:
        result = await served.answer(ask(max_tokens=30, sampling=pb.SamplingOptions(n=3, temperature=1.0, seed=1)))
        deltas = [event.delta for event in result.events if event.HasField("delta")]
        assert len(deltas) % (3 * SHAPED["delta_rounding"]) == 0
        assert [delta.sample for delta in deltas] == [0, 1, 2] * (len(deltas) // 3)
        for sample in range(3):
            tokens = [token for delta in deltas if delta.sample == sample for token in delta.token_ids]
            assert tokens == [97 + i % 26 for i in range(30)]
        assert not any(delta.HasField("result") for delta in deltas)  # when a sample ends is told at the end
        assert len(result.finished.samples) == 3


async def test_padding_alone_sends_tokens_as_they_come() -> None:
    result = await observed("ab", 2, 0.001, delta_padding=PADDING)
    assert set(sizes(result)) == {PADDING}
    assert all(event.delta.token_ids for event in result.events if event.HasField("delta"))


async def test_clients_see_neither_padding_nor_empty_deltas() -> None:
    async with serving(**SHAPED) as served, AsyncClient(served.server.address) as client:
        served.engine.step_seconds = 0.02
        async with client.stream("hello", max_tokens=12) as stream:
            deltas = [delta async for delta in stream]
        assert all(delta.token_ids for delta in deltas)
        assert "".join(delta.text for delta in deltas) == "abcdefghijkl"


async def test_messages_are_not_compressed_for_a_client_that_could_read_it() -> None:
    received = 0

    async def relayed(source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool) -> None:
        nonlocal received
        while data := await source.read(65_536):
            received += len(data) if counted else 0
            sink.write(data)
        sink.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        await asyncio.gather(relayed(reader, server_writer, False), relayed(server_reader, writer, True))

    async with serving(delta_cadence=CADENCE, delta_padding=8192) as served:
        served.engine.text = "a" * 50
        proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", compression=grpc.Compression.Gzip) as channel:
            result = await answer(pb_grpc.GenerationServiceStub(channel).GenerateStream(ask(max_tokens=400)))
        proxy.close()
        assert result.finished
        assert received >= sum(sizes(result)) == 8192 * len(result.events)


async def test_an_error_ends_the_answer_at_once() -> None:
    async with serving(delta_cadence=5.0, delta_padding=PADDING) as served:
        served.engine.step_seconds = 0.01
        call = served.stub.GenerateStream(ask())
        await call.read()
        await until(lambda: served.engine.running == 1)
        began = time.perf_counter()
        served.engine.sequence_error = ModelError("broken")
        assert reason((await answer(call)).status) == "MODEL_FAILED"
        assert time.perf_counter() - began < 4.0


@pytest.mark.parametrize("own_deadline", [0.8, None])
async def test_deadlines_hold_also_after_the_last_token(own_deadline: float | None) -> None:
    async with serving(delta_cadence=0.05, delta_rounding=10_000, default_timeout=0.9) as served:
        result = await served.answer(ask(max_tokens=6, drafting=NO_DRAFTS), timeout=own_deadline)
        assert result.text == "abcdef"
        assert result.status.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_shutdown_ends_an_answer_that_only_waits_for_its_end() -> None:
    async with serving(delta_cadence=0.05, delta_rounding=10_000) as served:
        call, text = served.stub.GenerateStream(ask(max_tokens=6)), ""
        while text != "abcdef":
            event: Any = await call.read()
            text += "".join(part.text for part in event.delta.parts)
        await served.server.stop(grace=0.1)
        assert reason((await answer(call)).status) == "SHUTTING_DOWN"


async def test_a_cadence_longer_than_the_pause_of_slow_readers_pauses_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(delta_cadence=0.6) as served:
        served.engine.step_seconds = 0.05
        result = await served.answer(ask(max_tokens=40, drafting=NO_DRAFTS))
        assert result.text == "".join(chr(97 + i % 26) for i in range(40))
        assert len(result.events) <= 8
        assert "pauses" not in caplog.text


@pytest.mark.parametrize("shaped", [{"delta_padding": PADDING}, {"delta_cadence": CADENCE}])
async def test_draft_trees_are_refused(shaped: dict[str, Any]) -> None:
    async with serving(**shaped) as served:
        found = violation((await served.answer(ask(output=pb.OutputOptions(draft_trees=True)))).status)
        assert found.field == "output.draft_trees"
        assert "is not served where deltas are padded" in found.description
