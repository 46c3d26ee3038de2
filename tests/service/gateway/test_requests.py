"""Requests that are left, batches, and errors, on real sockets in front of an engine that follows a script."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st

from draftwood_client.cli.options import ServerOptions
from draftwood_client.errors import ArgumentValueError, ErrorDetails, StatusError
from draftwood_service.gateway import reading, responses
from draftwood_service.gateway.command import _arguments, _check_service
from draftwood_service.gateway.errors import body_of, status_of
from draftwood_service.rpc.bound import BoundServer
from draftwood_service.settings import Settings
from tests.service.fakes import ByteTokenizer, FakeEngine, FakeModel, Served, once, serving, until
from tests.service.gateway.listening import Listening, get, listening, post

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
LONG: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2000}


together = pytest.mark.asyncio(loop_scope="module")
"""Tests on a gateway of this file."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_gateway() -> AsyncIterator[Listening]:
    async with serving() as served, listening(served.server.address) as gateway:
        yield gateway


@pytest.fixture
async def slow() -> AsyncIterator[tuple[Listening, Served]]:
    """A gateway, and the service behind it, whose engine does 100 steps a second."""
    async with serving() as served, listening(served.server.address) as gateway:
        served.engine.step_seconds = 0.01
        yield gateway, served


async def live_requests(gateway: Listening, expected: int) -> None:
    """Waits until it answers so many requests."""
    line = f"\ndraftwood_gateway_requests_live {expected}.0\n"
    await once(lambda: gateway.answered(get("/metrics")), lambda answer: line in answer[1])


def choices_of(answer: str) -> list[dict[str, Any]]:
    """The choices in the chunks of a stream."""
    return [json.loads(line[6:])["choices"][0] for line in answer.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("fields", "abort"),
    [
        pytest.param(LONG, False, id="whole"),
        pytest.param({**LONG, "stream": True}, False, id="streamed"),
        pytest.param({**LONG, "stream": True}, True, id="streamed, aborted"),
        pytest.param({**LONG, "prompt": ["Hi", "Ho", "Hu"]}, True, id="batch, aborted"),
        pytest.param({**LONG, "prompt": ["Hi", "Ho", "Hu"], "stream": True}, False, id="streamed batch"),
    ],
)
async def test_a_client_that_leaves_cancels_its_request(
    slow: tuple[Listening, Served], fields: Any, abort: bool
) -> None:
    gateway, served = slow
    _, writer = await gateway.open(post(COMPLETIONS, fields))
    await until(lambda: served.engine.running == (3 if isinstance(fields["prompt"], list) else 1))
    writer.transport.abort() if abort else writer.close()
    await served.assert_idle()
    assert all(len(one.output) < LONG["max_tokens"] for one in served.engine.added)
    await live_requests(gateway, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_it_waits_cancels_its_request(stream: bool) -> None:
    """It waits to be admitted: a stream has not begun, so that nothing would be written to it either."""
    engine = FakeEngine(max_running=1)
    engine.step_seconds = 0.01
    async with serving(engine, max_running=1) as served, listening(served.server.address) as gateway:
        _, first = await gateway.open(post(COMPLETIONS, LONG))
        await until(lambda: engine.running == 1)
        _, second = await gateway.open(post(COMPLETIONS, {**LONG, "stream": stream}))
        await until(lambda: engine.waiting == 1)
        second.close()
        await until(lambda: engine.waiting == 0)
        assert engine.running == 1
        first.close()


async def test_a_client_that_leaves_in_mid_body_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as served, listening(served.server.address) as gateway:
        _, writer = await gateway.open(post(COMPLETIONS, LONG)[:-5])
        await live_requests(gateway, 1)
        writer.close()
        await live_requests(gateway, 0)
        assert served.engine.added == []
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("stream", [False, True])
async def test_one_prompt_that_is_refused_ends_the_others(slow: tuple[Listening, Served], stream: bool) -> None:
    gateway, served = slow
    fields = {**LONG, "prompt": ["Hi", "x" * 4000, "Ho"], "max_tokens": 1000, "stream": stream}
    status, answer = await gateway.posted(COMPLETIONS, fields)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    await served.assert_idle()
    assert all(len(one.output) < fields["max_tokens"] for one in served.engine.added)


async def test_a_prompt_that_fails_later_ends_the_others_and_the_stream(slow: tuple[Listening, Served]) -> None:
    short = {"prompt": ["a", "b", "c", "d", "x" * 4095 + "y"], "max_tokens": 50, "stream": True}
    status, answer = await slow[0].posted(COMPLETIONS, short)  # the fifth begins when one of four has ended
    assert status == 200
    assert "event: error" in answer
    assert "context_length_exceeded" in answer
    assert "[DONE]" not in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("samples", [1, 2])
async def test_a_batch_needs_no_more_places_than_there_are(stream: bool, samples: int) -> None:
    async with serving(max_running=4, max_waiting=0) as served, listening(served.server.address) as gateway:
        fields = {"prompt": ["a", "b"] * 64, "max_tokens": 6, "n": samples, "temperature": 1.0, "stream": stream}
        status, answer = await gateway.posted(COMPLETIONS, fields)
        assert status == 200
        texts = [""] * 128 * samples
        for choice in choices_of(answer) if stream else answer["choices"]:
            texts[choice["index"]] += choice["text"]
        assert not stream or "[DONE]" in answer
        assert texts == ["abcdef"] * 128 * samples
        assert served.engine.most_running <= 4


async def test_a_sample_ends_when_it_has_ended(slow: tuple[Listening, Served]) -> None:
    """Its reason comes once, right behind its text, and not with the end of all."""
    fields = {"prompt": "a", "n": 3, "temperature": 1.0, "max_tokens": 6, "stream": True}
    _, answer = await slow[0].posted(COMPLETIONS, fields)
    for index in range(3):
        own = [one for one in choices_of(answer) if one["index"] == index]
        assert "".join(one["text"] for one in own) == "abcdef"
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]


async def test_the_prompts_of_a_batch_are_streamed_side_by_side(slow: tuple[Listening, Served]) -> None:
    _, answer = await slow[0].posted(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 100, "stream": True})
    order = [one["index"] for one in choices_of(answer)]
    assert 0 in order[order.index(1) :]


async def test_the_deadline_is_that_of_the_whole_batch(slow: tuple[Listening, Served]) -> None:
    gateway, served = slow
    served.engine.step_seconds = 0.02
    sent = post(COMPLETIONS, {"prompt": ["a"] * 96, "max_tokens": 40})  # four of them in 0.4 s
    status, answer = await gateway.answered(sent.replace(b"host: x", b"host: x\r\nx-draftwood-timeout: 0.6"))
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await served.assert_idle()
    assert len(served.engine.added) < 96


async def test_no_error_shows_the_address_of_the_service() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        whole, streamed = (post(COMPLETIONS, {**LONG, "model": "x", "stream": stream}) for stream in (False, True))
        late = whole.replace(b"host: x", b"host: x\r\nx-draftwood-timeout: 0.1")
        async with listening(f"127.0.0.1:{port}") as gateway:
            answers = [await gateway.answered(sent) for sent in (whole, streamed, late, get("/health"))]
    assert (answers[0][0], answers[0][1]["error"]["code"]) == (503, "unavailable")
    for status, answer in answers:
        assert status in (503, 504)
        assert str(port) not in json.dumps(answer)
        assert "127.0.0.1" not in json.dumps(answer)


async def test_a_message_that_the_service_does_not_take_is_too_large() -> None:
    async with serving(max_message_bytes=200_000) as served, listening(served.server.address) as gateway:
        status, answer = await gateway.posted(COMPLETIONS, {**LONG, "prompt": "x" * 300_000})
        assert (status, answer["error"]["type"]) == (413, "invalid_request_error")


def filled(piece: str, begin: str = '{"prompt":[', end: str = "]}", size: int = 1_000_000) -> bytes:
    return (begin + ",".join([piece] * (size // (len(piece) + 1))) + end).encode()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (filled('""'), "more than 100000"),
        (filled("{}"), "more than 100000"),
        (filled('{"role":"u"}', '{"messages":['), "more than 100000"),
        (b'{"prompt":"' + b'\\"' * 400_000, "not JSON"),  # a text that does not end
        (b'"' * 900_000, "more than 100000"),
        (b"", "JSON"),
        (b"[]", "must be an object"),
        (b"[" * 90_000, "nested too deeply"),
        (b'{"prompt": "\xed\xa0\x80"}', "is not UTF-8: byte 12"),  # half of a surrogate pair, which `json` would take
        (b'{"prompt": "x", "metadata": NaN}', "is not JSON: NaN is no finite number"),
        (b'{"prompt": "x", "metadata": [1e999]}', "is not JSON: 1e999 is no finite number"),
        (filled("7"), "tokens"),
        ((b'{"prompt":"' + b'[{\\",' * 150_000 + b'"}'), "characters"),  # brackets of a text count for nothing
    ],
)
@together
async def test_a_body_that_is_no_request_or_costs_much_to_read_is_refused(
    shared_gateway: Listening, body: bytes, problem: str
) -> None:
    path = CHAT if b"messages" in body[:20] else COMPLETIONS
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    began = time.process_time()
    status, answer = await shared_gateway.answered(head.encode() + body)
    assert time.process_time() - began < 5
    assert status == 400
    assert problem in answer["error"]["message"]


MESSAGES = [{"role": "user", "content": "Hi"}]

TOOLS = [{"type": "function", "function": {"name": "f"}}]
LONG_CONTEXT, WRONG = "context_length_exceeded", "invalid_value"


def said(text: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("fields", "code", "param", "begins"),
    [
        # those without a prompt are of chats, MESSAGES if they have no own
        ({"prompt": "x" * 5000}, LONG_CONTEXT, "prompt", "prompt: the prompt has 5000"),
        ({"prompt": [7] * 5000}, LONG_CONTEXT, "prompt", "prompt: the prompt has 5000"),
        ({"prompt": "x" * 70_000}, LONG_CONTEXT, "prompt", "prompt: must have at most"),
        ({"prompt": ["x"] * 129}, None, "prompt", "prompt: has 129 prompts"),
        (said("x" * 5000), LONG_CONTEXT, "messages", "messages: the prompt has"),
        (said("x" * 70_000), LONG_CONTEXT, "messages", "messages: must have at most"),
        (said([{"type": "image_url", "image_url": {"url": "x"}}]), None, "messages[0].content[0].type", ""),
        (said("\ud800"), None, "messages[0].content", "messages[0].content: character 0 is the unpaired surrogate"),
        ({"\ud800": 1}, None, "body", "body: has a name in which character 0 is the unpaired surrogate '\\ud800'"),
        ({"draftwood": {"x\udfff": 1}}, None, "draftwood", "draftwood: has a name in which character 1 is the"),
        ({"metadata": {"a": ["\ud83d\ude00", "\ud83d"]}}, None, "metadata.a[1]", "metadata.a[1]: character 0 is the"),
        (schema({"\ud800": 1}), None, "response_format.json_schema.schema", "response_format.json_schema.schema: has"),
        ({"temperature": 10**400}, None, "temperature", "temperature: inf is not allowed; it must be finite"),
        ({"messages": [{"role": "x" * 99, "content": ""}]}, WRONG, "messages[0].role", "messages[0]."),
        ({"messages": [{"role": "tool", "name": 3}]}, None, "messages[0].name", "messages[0].name: must be"),
        ({"messages": []}, None, "messages", "messages"),
        ({"messages": [{"role": "function"}]}, None, "messages[0].role", "messages[0].role: function is not served"),
        ({"messages": [{"role": "user", "audio": {"id": "x"}}]}, None, "messages[0].audio", "messages[0].audio: is"),
        (said(3), None, "messages[0].content", "messages[0].content: must be a text or a list of parts"),
        ({"prompt": ["x", 3]}, None, "prompt", "prompt: must be a text, token ids, or a list"),
        ({"max_tokens": 5000}, LONG_CONTEXT, "max_tokens", "max_tokens: 5000"),
        ({"max_completion_tokens": 5000}, LONG_CONTEXT, "max_completion_tokens", "max_completion_tokens: 5000"),
        ({"stop": 3}, None, "stop", "stop: must be"),
        ({"n": 99, "temperature": 1}, WRONG, "n", "n: 99"),
        ({"stop": [""]}, WRONG, "stop[0]", "stop[0]: must"),
        ({"stop_token_ids": [300]}, WRONG, "stop_token_ids[0]", "stop_token_ids"),
        ({"logit_bias": {"300": 1}}, WRONG, "logit_bias[300]", "logit_bias[300]"),
        ({"logit_bias": {"x": 1}}, None, "logit_bias", "logit_bias: has a key that is not a token id"),
        ({"logprobs": True, "top_logprobs": 99}, None, "top_logprobs", "top_logprobs: must lie in [0, "),
        ({"prompt": "x", "logprobs": 99}, None, "logprobs", "logprobs: must lie in [0, "),
        ({"top_logprobs": 2}, None, "top_logprobs", "top_logprobs: needs logprobs"),
        ({"stream_options": {"include_usage": True}}, None, "stream_options", "stream_options: needs stream"),
        ({"temperature": -1}, WRONG, "temperature", "temperature: -1"),
        ({"user": "x" * 300}, WRONG, "user", "user"),
        ({"draftwood": {"session": "x" * 300}}, WRONG, "draftwood.session", ""),
        ({"draftwood": {"strategy": 3}}, None, "draftwood.strategy", "draftwood.strategy"),
        ({"draftwood": {"stragety": "trie"}}, None, "draftwood.stragety", ""),
        ({"draftwood": {"max_draft_nodes": -1}}, WRONG, "draftwood.max_draft_nodes", "draftwood.max_draft_nodes"),
        ({"response_format": {"type": "regex", "pattern": "("}}, WRONG, "response_format.pattern", "response_format."),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, WRONG, "ignore_eos", "ignore_eos"),
        ({"response_format": {"type": "regex"}, "tools": TOOLS}, None, "response_format.type", "response_format.type"),
        ({"response_format": {"type": "xml"}}, None, "response_format.type", ""),
        (schema({"type": 3}), WRONG, "response_format.json_schema", ""),
    ],
)
@together
async def test_errors_name_what_the_caller_wrote(
    shared_gateway: Listening, fields: dict[str, Any], code: str | None, param: str, begins: str
) -> None:
    path, given = (COMPLETIONS, {}) if "prompt" in fields else (CHAT, {"messages": MESSAGES})
    status, answer = await shared_gateway.posted(path, {"max_tokens": 4, **given, **fields})
    error = answer["error"]
    assert (status, error["code"], error["param"]) == (400, code, param)
    assert error["message"].startswith(begins)
    assert ("this model's maximum context length is 4096 tokens" in error["message"]) == (code == LONG_CONTEXT)
    for ours in ("stop.", "sampling.", "chat.", "drafting.", "output."):
        assert ours not in error["message"]


UNKNOWN: dict[str, dict[str, Any]] = {
    "x_new": {"x_new": 1, "x_null": None},
    "stream_options.x": {"stream": True, "stream_options": {"x": True, "include_usage": True}},
    "response_format.x": {"response_format": {"type": "text", "x": {}}},
    "messages.content.cache_control, messages.x": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "", "x": 1, "tool_calls": None, "refusal": None},
            {"role": "user", "content": "Hi", "x": 2},
        ]
    },
    "reasoning_effort": {"reasoning_effort": "low"},  # a variable that the template does not have
    "tools.function.x": {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}], "tool_choice": "none"},
    "(a name that is not shown)": {"x\r\nx-injected: 1": 1},
}


NO_THOUGHTS = {"enable_thinking": False}


@pytest.mark.parametrize(
    ("asked", "shown", "ignored"),
    [
        ({"chat_template_kwargs": NO_THOUGHTS}, NO_THOUGHTS, ""),
        ({"chat_template_kwargs": {"messages": []}}, {}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"x": 1, "y": 2}}, {}, "chat_template_kwargs.x, chat_template_kwargs.y"),
        ({"reasoning_effort": "none"}, {**NO_THOUGHTS, "reasoning_effort": "none"}, ""),
        ({"chat_template_kwargs": {}, "reasoning_effort": None}, {}, ""),
    ],
)
async def test_variables_that_the_template_reads_reach_it(asked: Any, shown: Any, ignored: str) -> None:
    model = FakeModel()
    model.tokenizer.template_variables = frozenset({"enable_thinking", "reasoning_effort"})
    async with serving(model=model) as served, listening(served.server.address) as gateway:
        sent = await gateway.raw(post(CHAT, {"messages": MESSAGES, "max_tokens": 2, **asked}))
        assert sent.startswith(b"HTTP/1.1 200")
        assert dict(model.tokenizer.variables) == shown
        assert (f"x-draftwood-ignored: {ignored}".encode() in sent) is bool(ignored)
        long = {"chat_template_kwargs": {"enable_thinking": "x" * 2000}}
        status, answer = await gateway.posted(CHAT, {"messages": MESSAGES, **long})
        assert (status, answer["error"]["param"]) == (400, "chat_template_kwargs")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("embeddings", "is not served: the model writes text"),
        ("audio/speech", "is not served: audio"),
        ("responses/resp_1/cancel", "is not served: answers are not stored"),
        ("else", "is unknown"),
    ],
)
@together
async def test_what_is_not_served_is_refused_by_name(shared_gateway: Listening, path: str, why: str) -> None:
    status, answer = await shared_gateway.posted(f"/v1/{path}", {})
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert answer["error"]["message"].startswith(f"POST /v1/{path} {why}")


async def test_chunks_have_their_usage_as_null_and_the_last_one_what_drafts_did() -> None:
    asked = {"messages": MESSAGES, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    async with serving() as served, listening(served.server.address) as gateway:
        _, answer = await gateway.posted(CHAT, asked)
        _, without = await gateway.posted(CHAT, {**asked, "stream_options": None})
    *chunks, last = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    details = last["usage"]["completion_tokens_details"]
    drafts = last["metrics"]["speculative_decoding"]
    assert details["reasoning_tokens"] == 0
    assert details["accepted_prediction_tokens"] == drafts["accepted_tokens"]
    assert details["rejected_prediction_tokens"] == drafts["draft_tokens"] - drafts["accepted_tokens"]
    assert "usage" not in without


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("ignored", UNKNOWN)
async def test_fields_that_nobody_knows_are_left_out_and_named(
    ignored: str, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served, listening(served.server.address, strict=strict) as gateway:
        for _ in range(2):
            fields = {"messages": MESSAGES, "max_tokens": 2, **UNKNOWN[ignored]}
            sent = await gateway.raw(post(CHAT, fields))
            head = sent.partition(b"\r\n\r\n")[0].decode().lower()
            assert head.startswith(f"http/1.1 {400 if strict else 200}")
            assert (f"x-draftwood-ignored: {ignored}" in head) is not strict
            assert "x-injected:" not in head
    told = [record for record in caplog.records if "left out" in record.getMessage()]
    assert len(told) == (0 if strict else 1)


@together
async def test_fields_that_every_request_may_have_are_not_named(shared_gateway: Listening) -> None:
    known = {"user": "u", "metadata": {}, "store": False, "service_tier": "auto", "echo": False, "logprobs": 0}
    sent = await shared_gateway.raw(post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, **known}))
    assert sent.startswith(b"HTTP/1.1 200")
    assert b"ignored" not in sent.lower()


@pytest.mark.parametrize("fields", [{"n": 2, "temperature": 0}, {"top_k": -1}])
@together
async def test_what_other_servers_take_is_served(shared_gateway: Listening, fields: dict[str, Any]) -> None:
    status, answer = await shared_gateway.posted(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, **fields})
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * fields.get("n", 1)


ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=9) | st.sampled_from(["user", "text", "function"])
INNER = ["role", "content", "type", "text", "name", "function", "arguments", "parameters", "schema", "json_schema", "5"]
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.sampled_from(INNER) | ANY_TEXT, values, max_size=3)
    ),
    max_leaves=9,
)
ALL_FIELDS = reading._COMMON | reading._KNOWN | reading._OF_CHAT | {*reading._REFUSED} | responses._FIELDS[""]
FIELDS = st.sampled_from(sorted(ALL_FIELDS | {*responses._REFUSED, *responses._STORED}))


PATHS = {"messages": CHAT, "prompt": COMPLETIONS, "input": RESPONSES}


@pytest.mark.parametrize(
    "given_first",
    [{"prompt": "x"}, {"messages": MESSAGES}, {"prompt": "x", "stream": True}, {"input": "x"}, {"input": MESSAGES}],
)
@given(fields=st.dictionaries(FIELDS | ANY_TEXT, ANYTHING, max_size=4))
@together
async def test_no_body_ends_in_an_internal_error(
    shared_gateway: Listening, given_first: dict[str, Any], fields: dict[str, Any]
) -> None:
    path = PATHS[min(given_first)]
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    status, answer = await shared_gateway.posted(path, {limit: 2, **given_first, **fields})
    assert status < 500
    assert "server_error" not in str(answer)


@pytest.mark.parametrize("seconds", ["soon", "0", "-1", "nan"])
@together
async def test_a_deadline_is_a_number_above_0(shared_gateway: Listening, seconds: str) -> None:
    with_header = f"host: x\r\nx-draftwood-timeout: {seconds}".encode()
    sent = post(COMPLETIONS, {"prompt": "x"}).replace(b"host: x", with_header, 1)
    status, answer = await shared_gateway.answered(sent)
    assert status == 400
    assert answer["error"]["message"].startswith("x-draftwood-timeout: must be a number of seconds above 0")


async def test_a_model_without_a_chat_template_names_the_other_route() -> None:
    model = FakeModel(tokenizer=ByteTokenizer(has_chat_template=False))
    async with serving(model=model) as served, listening(served.server.address) as gateway:
        status, answer = await gateway.posted(CHAT, {"messages": MESSAGES})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert answer["error"]["message"] == "messages: the model has no chat template; use /v1/completions"


async def test_a_gateway_that_shares_no_credential_refuses_requests_without_a_key() -> None:
    async with serving() as served, listening(served.server.address, keyless=False) as gateway:
        status, answer = await gateway.posted(CHAT, {"messages": MESSAGES})
        assert (status, "has no key" in answer["error"]["message"]) == (401, True)
        assert (await gateway.answered(get("/health")))[0] == 200


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (["Basic c2VjcmV0"], "the authorization header has the scheme 'Basic'"),
        (["c2VjcmV0"], "the authorization header has no scheme"),
        (["Bearer c2VjcmV0", "Bearer c2VjcmV0"], "the call has 2 authorization headers"),
    ],
)
@together
async def test_a_credential_that_is_no_bearer_is_refused(
    shared_gateway: Listening, headers: list[str], said: str
) -> None:
    lines = "host: x" + "".join(f"\r\nauthorization: {header}" for header in headers)
    for sent in (get("/v1/models"), post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})):
        status, answer = await shared_gateway.answered(sent.replace(b"host: x", lines.encode()))
        assert (status, answer["error"]["type"]) == (401, "authentication_error")
        assert answer["error"]["message"].startswith(said)
        assert "c2VjcmV0" not in str(answer)


@pytest.mark.parametrize("code", [grpc.StatusCode.ABORTED, grpc.StatusCode.ALREADY_EXISTS])
def test_what_conflicts_is_a_conflict(code: grpc.StatusCode) -> None:
    error = StatusError(ErrorDetails(code, "somebody else", reason="X"))
    assert (status_of(error), body_of(error)["error"]["type"]) == (409, "invalid_request_error")


async def test_health_is_that_of_the_service() -> None:
    bound = BoundServer(Settings(port=0, model_cache=False))
    async with listening(bound.address) as gateway:
        assert (await gateway.answered(get("/health")))[0] == 503
        await bound.start()  # it loads its model
        status, answer = await gateway.answered(get("/health"))
        assert (status, answer["status"]) == (503, "unavailable")
        assert answer["reason"].startswith("the service does not serve requests now")
        await bound.set_health(health_pb2.HealthCheckResponse.SERVING)
        assert await gateway.answered(get("/health")) == (200, {"status": "ok"})
        await bound.close()


async def test_health_needs_no_credential_and_ends_with_the_engine(tmp_path: Path) -> None:
    keys = tmp_path / "auth.yaml"
    keys.write_text("{}")
    async with serving(auth_file=keys, engine_restarts=0) as served, listening(served.server.address) as gateway:
        assert await gateway.answered(get("/health")) == (200, {"status": "ok"})
        await served.server._set_serving(False)  # as with an engine that has died
        assert (await gateway.answered(get("/health")))[0] == 503


@pytest.mark.parametrize("auth", ["auto", "open"])
async def test_a_gateway_that_other_machines_reach_shows_them_no_server_of_this_machine(
    auth: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(auth=auth) as served:
        target = served.server.address
        reached = _arguments(ServerOptions(target=target), "0.0.0.0")["metadata"]
        async with listening(target, metadata=reached) as gateway:
            fields = {"prompt": "x", "max_tokens": 2, "stream": True, "draftwood": {"draft_trees": True}}
            for sent in (post(COMPLETIONS, fields), get("/v1/models")):
                for with_key in (b"host: x", b"host: x\r\nauthorization: Bearer any"):
                    status, answer = await gateway.answered(sent.replace(b"host: x", with_key))
                    assert status == (200 if auth == "open" else 403)
                    if auth == "auto":
                        assert answer["error"]["code"] == "authentication_off"
            assert (await gateway.answered(get("/health")))[0] == 200
        asked = asyncio.to_thread(_check_service, ServerOptions(target=target), "0.0.0.0")
        with (
            nullcontext()
            if auth == "open"
            else pytest.raises(ArgumentValueError, match=r"--host.* on 0\.0\.0\.0 would")
        ):
            await asked
        await asyncio.to_thread(_check_service, ServerOptions(target=target), "127.0.0.1")


async def test_a_page_whose_name_means_this_machine_reads_nothing() -> None:
    """DNS rebinding: the browser sends the name that it knows."""
    async with serving() as served, listening(served.server.address, hosts=["A.example"]) as gateway:
        for host in ("127.0.0.1:8080", "localhost", "LocalHost:1", "[::1]:8080", "127.9.9.9", "a.example"):
            assert (await gateway.answered(get("/v1/models").replace(b"host: x", f"host: {host}".encode())))[0] == 200
        for host in ("evil.example", "evil.example:8080", "localhost.evil.example", "10.0.0.1", "[::1", ""):
            for path in ("/v1/models", "/health", "/metrics"):
                status, answer = await gateway.answered(get(path).replace(b"host: x", f"host: {host}".encode()))
                assert status == 421
                assert answer["error"]["message"] == (
                    f"host: {host!r} is not a name of this machine's; a proxy's is allowed by --allowed-host"
                )


async def test_pages_of_other_origins_send_nothing() -> None:
    sent = post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
    async with (
        serving() as served,
        listening(served.server.address, hosts=[], origins=["https://app.example"]) as gateway,
    ):
        for origin, count in (
            ("https://evil.example", 0),
            ("http://localhost:9090", 0),
            ("null", 0),
            ("http://localhost:8080", 1),  # its own
            ("https://app.example", 2),
        ):
            lines = f"host: localhost:8080\r\norigin: {origin}".encode()
            status, answer = await gateway.answered(sent.replace(b"host: x", lines))
            assert (status, len(served.engine.added)) == (200 if count else 403, count)
            problem = f"origin: web pages of {origin!r} may not call"
            assert status == 200 or answer["error"]["message"].startswith(problem)
