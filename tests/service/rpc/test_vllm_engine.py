"""`vllm.grpc.engine.VllmEngine`: its requests are those of GenerationService, with the same limits, log and stream."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from draftwood.v1 import generation_pb2 as native
from draftwood_model_runner.request import SamplingParams
from draftwood_model_runner.sampling.generation_defaults import GenerationDefaults
from draftwood_service.auth import Role
from draftwood_service.auth.auth_file import KeyEntry, new_key, updated
from draftwood_service.authorization import TENANT
from draftwood_service.rpc.vllm_engine import as_native
from tests.service.fakes import FakeEngine, FakeModel, Served, answer, refusal, serving, until
from tests.service.rpc.test_bad_input import violation
from tests.service.rpc.test_endings import reason

PROMPT = [97, 98, 99]


def ask(tokens: int = 5, stream: bool = True, request_id: str = "", **params: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=tokens, **params)
    tokenized = pb.TokenizedInput(original_text="abc", input_ids=PROMPT)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=sampling, stream=stream)


def engine_of(served: Served) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel)


async def said(call: Any) -> tuple[list[Any], list[Any]]:
    """The chunks and the ends of an answer, which come after all chunks."""
    got = [message async for message in call]
    chunks = [message.chunk for message in got if message.HasField("chunk")]
    ends = [message.complete for message in got if message.HasField("complete")]
    assert [*chunks, *ends] == [message.chunk if message.HasField("chunk") else message.complete for message in got]
    return chunks, ends


async def test_streams_the_tokens_of_generation_service(served: Served) -> None:
    plain = native.GenerateRequest(token_ids=native.TokenIds(ids=PROMPT), stop=native.StopOptions(max_tokens=5))
    expected = (await served.answer(plain)).token_ids
    chunks, [end] = await said(engine_of(served).Generate(ask()))
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert sum(chunk.completion_tokens for chunk in chunks) == len(expected) == 5
    assert {chunk.prompt_tokens for chunk in chunks} == {3}
    assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 3, 5)
    assert not end.output_ids
    assert end.spec_draft_tokens == 2 * end.spec_accepted_tokens > 0


async def test_without_stream_all_comes_at_the_end(served: Served) -> None:
    chunks, [end] = await said(engine_of(served).Generate(ask(stream=False)))
    assert not chunks
    assert list(end.output_ids) == [97, 98, 99, 100, 101]
    assert end.finish_reason == "length"
    served.engine.script = "ab"
    text = pb.GenerateRequest(text="hello", sampling_params=pb.SamplingParams(max_tokens=9))
    _, [end] = await said(engine_of(served).Generate(text))
    assert (end.finish_reason, end.prompt_tokens) == ("stop", 5)


@pytest.mark.parametrize("stream", [True, False])
async def test_several_samples(served: Served, stream: bool) -> None:
    chunks, ends = await said(engine_of(served).Generate(ask(4, stream, n=3, temperature=0.5, seed=-1)))
    assert [end.index for end in ends] == [0, 1, 2]
    assert {chunk.index for chunk in chunks} == ({0, 1, 2} if stream else set())
    assert [end.completion_tokens for end in ends] == [4, 4, 4]
    seeds = {sequence.request.sampling.seed for sequence in served.engine.added}
    assert seeds == {2**64 - 1, 0, 1}


async def test_numbers_are_meant_as_they_stand() -> None:
    """But for those that would mean nothing, which leave the model's defaults."""
    defaults = GenerationDefaults(SamplingParams(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1))
    async with serving(model=FakeModel(defaults=defaults)) as served:
        await said(engine_of(served).Generate(ask(1)))
        await said(engine_of(served).Generate(ask(1, temperature=0.25, top_p=0.5, top_k=2**32 - 1, min_p=0.5)))
        unset, given = (sequence.request.sampling for sequence in served.engine.added)
        assert (unset.temperature, unset.top_k, unset.top_p, unset.min_p) == (0.7, 0, 0.8, 0.0)
        assert (given.temperature, given.top_k, given.top_p, given.min_p) == (0.25, 2**31 - 1, 0.5, 0.5)


def test_every_field_has_its_counterpart() -> None:
    same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "seed": 7, "n": 2}
    same |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.5, "logit_bias": {6: -1.0}}
    stop: dict[str, Any] = {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True}
    params = pb.SamplingParams(**same, **stop, stop=["x", "y"], stop_token_ids=[4, 5], logprobs=3)
    request = pb.GenerateRequest(request_id="r", text="t", sampling_params=params)
    assert as_native(request, 256) == native.GenerateRequest(
        request_id="r",
        text="t",
        sampling=native.SamplingOptions(**same),
        stop=native.StopOptions(**stop, strings=["x", "y"], token_ids=[4, 5]),
        output=native.OutputOptions(top_logprobs=3),
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"json_schema": '{"type": "array"}'}, native.OutputFormat(json_schema='{"type": "array"}')),
        ({"regex": "a+"}, native.OutputFormat(regex="a+")),
        ({"grammar": 'start: "a"'}, native.OutputFormat(lark='start: "a"')),
        ({"json_object": True}, native.OutputFormat(json_schema='{"type": "object"}')),
        ({"json_object": False}, native.OutputFormat()),
        ({"choice": {"choices": ["yes", 'a "no"']}}, native.OutputFormat(lark='start: "yes" | "a \\"no\\""')),
    ],
)
def test_formats(given: dict[str, Any], expected: native.OutputFormat) -> None:
    assert as_native(ask(**given), 256).format == expected


IDS = pb.TokenizedInput(input_ids=[1, 2**32 - 1])
MEDIA = pb.MultimodalInputs(mm_hashes=["x"])
REFUSED: list[tuple[pb.GenerateRequest, str, str]] = [
    (pb.GenerateRequest(), "input", "tokenized and text"),
    (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "tokenized.input_ids", "must not be empty"),
    (pb.GenerateRequest(tokenized=IDS), "tokenized.input_ids[1]", "4294967295 is not allowed"),
    (ask(4094), "sampling_params.max_tokens", "at most 4093"),
    (ask(temperature=-1), "sampling_params.temperature", "-1.0 is not allowed"),
    (ask(n=2**32 - 1), "sampling_params.n", "must lie in"),
    (ask(stop=["a", ""]), "sampling_params.stop[1]", "1 to 256 characters"),
    (ask(stop_token_ids=[256]), "sampling_params.stop_token_ids[0]", "256 is not allowed"),
    (ask(logprobs=-1), "sampling_params.logprobs", "-1 is not allowed"),
    (ask(prompt_logprobs=1), "sampling_params.prompt_logprobs", "is not served"),
    (ask(grammar="x"), "sampling_params.grammar", "not a valid grammar"),
    (ask(json_schema="{}"), "sampling_params.json_schema", "not a valid grammar"),
    (ask(grammar='root ::= "a"'), "sampling_params.grammar", "Lark"),
    (ask(choice=pb.ChoiceConstraint()), "sampling_params.choice", "none of them empty"),
    (ask(structural_tag="{}"), "sampling_params.structural_tag", "is not served"),
    (pb.GenerateRequest(text="a", mm_inputs=MEDIA), "mm_inputs", "text alone"),
    (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json", "KV pages"),
    (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank", "rank 0 alone"),
]


@pytest.mark.parametrize(("request_", "field", "problem"), REFUSED, ids=[field for _, field, _ in REFUSED])
async def test_refusals_name_the_field_of_this_service(
    request_: pb.GenerateRequest, field: str, problem: str, served: Served
) -> None:
    found = violation(await refusal(engine_of(served).Generate(request_)))
    assert found.field == field
    assert found.description.startswith(field)
    assert problem in found.description


def keys_of(path: Path, *tenants: str | None) -> list[str]:
    """A file with a key for each tenant; None for an operator."""
    keys = []
    with updated(path) as entries:
        for tenant in tenants:
            made = new_key()
            role = Role.OPERATOR if tenant is None else Role.CALLER
            keys.append(made.key)
            now = datetime.now(UTC)
            entries.append(KeyEntry(id=made.id, tenant=tenant, role=role, sha256=made.sha256, created=now))
    return keys


def metadata(key: str, *named: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"), *((TENANT, tenant) for tenant in named))


@asynccontextmanager
async def guarded(tmp_path: Path, *tenants: str | None, **settings: Any) -> AsyncIterator[tuple[Served, list[str]]]:
    keys = keys_of(tmp_path / "auth.yaml", *tenants)
    async with serving(auth_file=tmp_path / "auth.yaml", **settings) as served:
        yield served, keys


async def test_the_tenant_is_that_of_the_key_and_operators_name_one(tmp_path: Path) -> None:
    async with guarded(tmp_path, "acme", None) as (served, [acme, operator]):
        engine = engine_of(served)
        for call in (engine.Generate(ask()), engine.Generate(ask(), metadata=metadata("dw_x"))):
            assert (await refusal(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        for sent in (metadata(acme), metadata(acme, "acme"), metadata(operator), metadata(operator, "beta")):
            await said(engine.Generate(ask(), metadata=sent))
        tenants = [sequence.request.tenant for sequence in served.engine.added]
        assert tenants == ["acme", "acme", "default", "beta"]
        error = await refusal(engine.Generate(ask(), metadata=metadata(acme, "beta")))
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED
        error = await refusal(engine.Generate(ask(), metadata=metadata(operator, "a", "b")))
        assert violation(error).field == TENANT


async def test_methods_by_role(tmp_path: Path) -> None:
    async with guarded(tmp_path, "acme", None) as (served, [acme, operator]):
        engine = engine_of(served)
        for call, request in (
            (engine.HealthCheck, pb.HealthCheckRequest()),
            (engine.GetModelInfo, pb.GetModelInfoRequest()),
            (engine.GetServerInfo, pb.GetServerInfoRequest()),
            (engine.Abort, pb.AbortRequest()),
        ):
            await call(request, metadata=metadata(acme))
            assert (await refusal(call(request))).code() is grpc.StatusCode.UNAUTHENTICATED
        error = await refusal(engine.GetLoads(pb.GetLoadsRequest(), metadata=metadata(acme)))
        assert "requires the role operator" in str(error.details())
        assert (await engine.GetLoads(pb.GetLoadsRequest(), metadata=metadata(operator))).dp_rank_count == 1


async def test_abort_ends_requests_of_the_own_tenant_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path, "acme", "beta", None) as (served, [acme, beta, operator]):
        engine = engine_of(served)
        served.engine.step_seconds = 0.01  # an answer of 4,000 tokens takes 20 s
        calls = {
            name: asyncio.create_task(said(engine.Generate(ask(tokens, stream, name), metadata=metadata(key))))
            for name, key, stream, tokens in (
                ("stream", acme, True, 4000),
                ("whole", acme, False, 4000),
                ("other", acme, True, 100),
                ("foreign", beta, True, 100),
            )
        }
        await until(lambda: len(served.engine.added) == 4)
        names = ["stream", "whole", "foreign", "nobody's"]
        await engine.Abort(pb.AbortRequest(request_ids=names), metadata=metadata(acme))
        for name, expected in (("stream", "abort"), ("whole", "abort"), ("other", "length"), ("foreign", "length")):
            _, [end] = await calls[name]
            assert end.finish_reason == expected, name
        await served.assert_idle()
        call = asyncio.create_task(said(engine.Generate(ask(4000, True, "foreign"), metadata=metadata(beta))))
        await until(lambda: len(served.engine.added) == 5)
        await engine.Abort(pb.AbortRequest(request_ids=["foreign"]), metadata=metadata(operator))
        await engine.Abort(pb.AbortRequest(request_ids=["foreign"]), metadata=metadata(operator, "beta"))
        _, [end] = await call
        assert end.finish_reason == "abort"


async def test_abort_ends_a_request_of_generation_service_with_one_status(served: Served) -> None:
    served.engine.step_seconds = 0.01
    call = served.stub.GenerateStream(native.GenerateRequest(text="x", request_id="r"))
    await until(lambda: len(served.engine.added) == 1)
    await engine_of(served).Abort(pb.AbortRequest(request_ids=["r"]))
    result = await answer(call)
    assert result.status.code() is grpc.StatusCode.CANCELLED
    assert "aborted by a call of Abort" in str(result.status.details())


async def test_the_log_has_its_requests(served: Served, logged: io.StringIO) -> None:
    await said(engine_of(served).Generate(ask(4, True, "mine", temperature=0)))
    await refusal(engine_of(served).Generate(ask(5000, True, "wrong")))
    await refusal(engine_of(served).Generate(ask(5, True, "unread", structural_tag="{}")))
    await until(lambda: logged.getvalue().count('"event": "request"') == 3)
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    mine, wrong, unread = (line for line in lines if line["event"] == "request")
    assert (mine["request_id"], mine["tenant"], mine["outcome"]) == ("mine", "default", "length")
    assert (mine["prompt_tokens"], mine["completion_tokens"]) == (3, 4)
    assert (wrong["request_id"], wrong["outcome"]) == ("wrong", "context_length_exceeded")
    assert (unread["request_id"], unread["tenant"], unread["outcome"]) == ("unread", "default", "invalid_value")


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_are_refused_where_sizes_are_hidden(stream: bool) -> None:
    async with serving(delta_padding=256) as served:
        error = await refusal(engine_of(served).Generate(ask(stream=stream)))
        assert "cannot be padded" in violation(error).description


async def test_a_cadence_holds_here_too() -> None:
    engine = FakeEngine()
    async with serving(engine, delta_cadence=0.05, delta_rounding=4) as served:
        chunks, [end] = await said(engine_of(served).Generate(ask(40)))
        assert len(chunks) % 4 == 0
        assert len(chunks) < 40 // engine.tokens_per_step
        assert sum(chunk.completion_tokens for chunk in chunks) == end.completion_tokens == 40


async def test_health_model_and_server(served: Served) -> None:
    engine = engine_of(served)
    model = await engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.served_model_name, model.is_generation, model.vocab_size) == ("fake", True, 256)
    assert (model.max_context_length, model.max_req_input_len, list(model.eos_token_ids)) == (4096, 4095, [0])
    assert json.loads(model.default_sampling_params_json)["temperature"] == 0.0
    for serves in (False, True):
        served.server.serving = serves
        assert (await engine.HealthCheck(pb.HealthCheckRequest())).healthy is serves
        assert (await engine.GetServerInfo(pb.GetServerInfoRequest())).is_paused is not serves


async def test_requests_are_counted_for_operators_alone(tmp_path: Path) -> None:
    async with guarded(tmp_path, "acme", "beta", None) as (served, [acme, beta, operator]):
        served.engine.gate.clear()
        call = asyncio.create_task(said(engine_of(served).Generate(ask(), metadata=metadata(beta))))
        await until(lambda: served.server.bridge.live == 1)
        for key, count in ((acme, 0), (beta, 0), (operator, 1)):
            server = await engine_of(served).GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata(key))
            assert (server.active_requests, server.max_num_seqs) == (count, 4)
            assert server.uptime_seconds > 0
        served.engine.gate.set()
        await call


async def test_the_tokenizers_files(served: Served) -> None:
    call = engine_of(served).GetTokenizer(common_pb2.GetTokenizerRequest())
    chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == served.model.tokenizer.files()


async def test_methods_that_are_not_served_say_why(served: Served) -> None:
    engine = engine_of(served)
    for call, words in (
        (engine.Embed(pb.EmbedRequest()), "no embeddings"),
        (engine.FlushCache(common_pb2.FlushCacheRequest()), "PurgeMemory"),
        (engine.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()), "no events"),
    ):
        error = await refusal(call)
        assert (error.code(), reason(error)) == (grpc.StatusCode.UNIMPLEMENTED, "NOT_SERVED")
        assert words in str(error.details())
