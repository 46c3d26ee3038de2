"""Sizes are bounded before any work is done: what is too large reaches neither parser, tokenizer nor template."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from draftwood.v1 import generation_pb2 as pb
from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from draftwood_model_runner.request import SamplingParams, StopParams
from draftwood_model_runner.sampling.generation_defaults import Constraints, GenerationDefaults
from draftwood_service.errors import TooMuchTextError
from draftwood_service.rpc import prompts as text_executor
from draftwood_service.rpc.model_info import model_info
from draftwood_service.rpc.parsing import MAX_FIELDS, FieldCounter, Parser
from draftwood_service.rpc.prompts import Prompt, TextExecutor
from draftwood_service.rpc.requests import Terms, read_terms
from draftwood_service.rpc.statuses import to_status
from draftwood_service.serving import Serving
from draftwood_service.settings import Settings
from draftwood_tenants.config import TenantConfig
from tests.service.fakes import FakeModel, refusal, serving, until
from tests.service.rpc.test_bad_input import violation


def chat(*messages: tuple[str, str]) -> pb.Chat:
    return pb.Chat(
        messages=[pb.ChatMessage(role=role, content=[pb.ContentPart(text=content)]) for role, content in messages]
    )


TOO_LARGE: list[tuple[Any, str, str]] = [
    ({"text": "x" * 2001}, "text", "at most 2000 characters; it has 2001; this model's maximum context length"),
    ({"chat": chat(*[("user", "")] * 6)}, "chat.messages", "6 messages; at most 5"),
    ({"chat": chat(("user", "x" * 1000), ("user", "x" * 1000))}, "chat.messages", "at most 2000 characters"),
    ({"chat": chat(("user", "a"), ("u" * 65, "b"))}, "chat.messages[1].role", "1 to 64 characters; it has 65"),
]


async def test_a_prompt_that_is_too_large_is_not_read() -> None:
    async with serving(max_prompt_characters=2000, max_chat_messages=5) as served:
        for fields, field, problem in TOO_LARGE:
            for call in (
                served.stub.GenerateStream(pb.GenerateRequest(**fields)),
                served.stub.Tokenize(pb.TokenizeRequest(**fields)),
            ):
                found = violation(await refusal(call))
                assert found.field == field
                assert problem in found.description
        assert served.model.tokenizer.encoded_on == []
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.limits.prompt_characters, info.limits.chat_messages) == (2000, 5)


async def test_tokens_are_bounded_and_so_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood_service.rpc.generation.MAX_ANSWER_BYTES", 1000)
    async with serving(max_prompt_characters=300) as served:
        await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * 300))
        await served.stub.Tokenize(pb.TokenizeRequest(text="x" * 200))
        for call, problem in (
            (served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[65] * 301)), "301 items; at most 300 are allowed"),
            (served.stub.Tokenize(pb.TokenizeRequest(text="x" * 300)), "its 300 tokens make an answer of"),
        ):
            assert problem in violation(await refusal(call)).description


@pytest.mark.parametrize(
    "many",
    [
        {"chat": chat(*[("", "")] * (MAX_FIELDS // 2))},  # two fields for each, and their own
        {"stop": pb.StopOptions(strings=[""] * MAX_FIELDS)},
        {"sampling": pb.SamplingOptions(logit_bias=dict.fromkeys(range(MAX_FIELDS // 3 + 1), 1.0))},
    ],
)
def test_a_message_of_very_many_fields_is_not_parsed(many: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(2 * MAX_FIELDS)))  # one field
    assert Parser(pb.GenerateRequest)(packed.SerializeToString()) == packed
    deserialize = Parser(pb.GenerateRequest)
    monkeypatch.setattr(deserialize, "_type", None)
    with pytest.raises(InvalidInputError, match=f"^request: has more than {MAX_FIELDS} fields"):
        deserialize(pb.GenerateRequest(**many).SerializeToString())


@given(st.binary(max_size=200))
def test_counting_ends_on_any_bytes(data: bytes) -> None:
    assert 0 <= FieldCounter(pb.GenerateRequest.DESCRIPTOR)(data, 1000) <= 200


async def test_few_long_texts_wait_and_one_of_a_tenant_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_executor, "_WAITING_OF_TENANT", 3)
    monkeypatch.setattr(text_executor, "_WAITING", 4)
    work, gate = TextExecutor(), threading.Event()
    waiting = [asyncio.create_task(work.run("a", gate.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TooMuchTextError):
        await work.run("a", gate.wait)
    assert await asyncio.wait_for(work.run("b", lambda: "done"), 10) == "done"
    waiting.append(asyncio.create_task(work.run("b", gate.wait)))
    await asyncio.sleep(0)
    with pytest.raises(TooMuchTextError):
        await work.run("c", gate.wait)
    waiting[1].cancel()
    gate.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: not work._pending and not work._one_at_a_time)
    assert await work.run("a", lambda x: x + 1, 4) == 5
    work.close()


async def test_a_caller_whose_texts_wait_is_told_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_executor, "_WAITING_OF_TENANT", 0)
    async with serving(model=FakeModel(max_context=20_000)) as served:
        error = (await served.answer(pb.GenerateRequest(text="x" * 10_000))).status
        assert (await served.answer(pb.GenerateRequest(text="x", stop=pb.StopOptions(max_tokens=2)))).finished
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    status, retry = rpc_status.from_call(error), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert retry.retry_delay.seconds == 1


@pytest.mark.parametrize("value", ["😀" * 10**6, ["y" * 1000] * 1000, np.zeros(10**6, np.int32), 10**300])
def test_no_value_is_shown_whole(value: object) -> None:
    error = InvalidValueError("field", value, "it must be small" + "!" * 10_000)
    assert len(str(InvalidValueError("field", value, "it must be small"))) < 2000
    _, text, trailing = to_status(error, "id")
    assert 490 < len(text.encode()) <= 500
    assert sum(len(key) + len(value) for key, value in trailing) < 3000


DEFAULTS = GenerationDefaults(
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
    min_tokens=3,
    max_tokens=300,
    constraints=Constraints(2, ((1, 2),), (3,), (4, 5), (6,)),
)
MODEL = FakeModel(defaults=DEFAULTS)
PROMPT = Prompt("text", np.zeros(10, np.int32))


def terms(model: FakeModel = MODEL, **message: Any) -> Terms:
    serving = Serving(model, Settings(max_running=8))
    return read_terms(pb.GenerateRequest(**message), serving, "acme", TenantConfig(), None, "anyone")


def test_what_is_set_counts_and_the_rest_is_the_models() -> None:
    nothing = terms().sampling
    assert (nothing.temperature, nothing.top_k, nothing.top_p, nothing.repetition_penalty) == (0.7, 20, 0.8, 1.05)
    assert nothing.seed != terms().sampling.seed
    some = terms(sampling=pb.SamplingOptions(temperature=0, top_k=0, seed=9)).sampling
    assert (some.temperature, some.top_k, some.top_p, some.seed) == (0.0, 0, 0.8, 9)


def test_stop_conditions_have_defaults_within_the_context() -> None:
    def stop(model: FakeModel = MODEL, output_format: pb.OutputFormat | None = None, **options: Any) -> StopParams:
        read = terms(model, stop=pb.StopOptions(**options), format=output_format)
        call: Any = SimpleNamespace(request_id="1", arrived_at=0.0)
        return read.requests(PROMPT, None, call, 1.0)[0].stop

    assert (stop().max_tokens, stop().min_tokens) == (300, 3)
    assert (stop(max_tokens=2).max_tokens, stop(max_tokens=2).min_tokens) == (2, 2)
    assert stop(FakeModel(defaults=DEFAULTS, max_context=100), min_tokens=0).max_tokens == 90
    assert stop(FakeModel()).max_tokens == FakeModel().max_context - 10
    assert stop(output_format=pb.OutputFormat(regex="a")).min_tokens == 0  # the format says when the answer ends


def test_model_info_tells_them() -> None:
    told = model_info(Serving(MODEL, Settings())).generation_defaults
    assert told.sampling.temperature == pytest.approx(0.7)
    assert (told.sampling.top_k, told.stop.max_tokens, told.stop.min_tokens) == (20, 300, 3)
    assert [list(words.ids) for words in told.constraints.bad_words] == [[1, 2]]
    constraints = told.constraints
    assert (constraints.no_repeat_ngram_size, list(constraints.suppressed_first)) == (2, [4, 5])
    assert not model_info(Serving(FakeModel(), Settings())).generation_defaults.stop.HasField("max_tokens")
