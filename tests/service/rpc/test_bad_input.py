"""Invalid requests: each refusal names the field and what is allowed, with google.rpc details."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import vllm_engine_pb2

from draftwood.admin.v1 import experiments_pb2, status_pb2, tenants_pb2
from draftwood.v1 import generation_pb2 as pb
from draftwood.v1 import memory_pb2
from draftwood_service.tools import ToolFormat
from tests.service.fakes import ByteTokenizer, FakeModel, Served, answer, serving

together = pytest.mark.asyncio(loop_scope="module")
"""Tests on a server of this file."""
GENERATE = "/draftwood.v1.GenerationService/GenerateStream"


TOO_LONG = {"long text", "very long text", "long token ids", "long chat", "max_tokens over the context"}
TOO_LONG |= {"long when it is indented", "long"}
"""Cases that a shorter prompt would mend."""


def reason_of(too_long: bool) -> str:
    return "CONTEXT_LENGTH_EXCEEDED" if too_long else "INVALID_VALUE"


def violation(
    error: grpc.aio.AioRpcError, reason: str = "INVALID_VALUE"
) -> error_details_pb2.BadRequest.FieldViolation:
    """The one field violation of an INVALID_ARGUMENT."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "draftwood")
    assert status.details[1].Unpack(bad_request)
    [found] = bad_request.field_violations
    assert found.description == error.details()
    return found


def request(text: str = "hi", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def ids(*values: int, **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values), **fields)


def turn(role: str, *texts: str, **fields: Any) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text) for text in texts], **fields)


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[turn(role, text) for role, text in messages]))


def sampling(**options: Any) -> pb.GenerateRequest:
    return request(sampling=pb.SamplingOptions(**options))


def stop(**options: Any) -> pb.GenerateRequest:
    return request(stop=pb.StopOptions(**options))


def drafting(**options: Any) -> pb.GenerateRequest:
    return request(drafting=pb.DraftOptions(**options))


HI = turn("user", "hi")


def with_tool(name: str = "f", **parts: str) -> pb.GenerateRequest:
    chat = pb.Chat(messages=[HI], tools=[pb.Tool(name=name, **parts)])
    return pb.GenerateRequest(chat=chat, stop=pb.StopOptions(max_tokens=4))


def with_call(**parts: str) -> pb.GenerateRequest:
    message = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(**parts)])
    return pb.GenerateRequest(chat=pb.Chat(messages=[message]))


def formatted(**options: Any) -> pb.GenerateRequest:
    return request(format=pb.OutputFormat(regex="a"), stop=pb.StopOptions(**options))


RESULT = turn("tool", "x", tool_call_id="1")
WITH_RESULT = pb.GenerateRequest(chat=pb.Chat(messages=[RESULT]))
NO_PART = pb.GenerateRequest(chat=pb.Chat(messages=[turn("user", "hi")]))
NO_PART.chat.messages[0].content.add()
LATER_PART = pb.GenerateRequest(chat=pb.Chat(messages=[turn("user")]))
LATER_PART.chat.messages[0].content.append(pb.ContentPart.FromString(b"\x12\x01a"))
LATER = pb.OutputFormat.FromString(b"\x32\x01a")
BAD: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt", "text, token_ids and chat"),
    "empty text": (request(""), "text", "must not be empty"),
    "empty token ids": (ids(), "token_ids.ids", "must not be empty"),
    "empty chat": (chat(), "chat.messages", "must not be empty"),
    "chat without a role": (chat(("user", "a"), ("", "b")), r"chat.messages[1].role", "1 to 64 characters; it has 0"),
    "token id over the vocabulary": (ids(1, 2, 256), "token_ids.ids[2]", r"256 is not allowed.*\[0, 255\]"),
    "negative token id": (ids(1, -1), "token_ids.ids[1]", "-1 is not allowed"),
    "long text": (request("x" * 64), "text", "64 tokens.*at most 63"),
    "very long text": (request("x" * 20_000), "text", "20000 tokens.*at most 63"),
    "long token ids": (ids(*[1] * 64), "token_ids.ids", "64 tokens.*at most 63"),
    "long chat": (chat(("user", "x" * 64)), "chat.messages", "70 tokens.*at most 63"),
    "max_tokens over the context": (
        stop(max_tokens=63),
        "stop.max_tokens",
        "63 is .*most 62.*has 2 tokens.*length is 64 ",
    ),
    "max_tokens zero": (stop(max_tokens=0), "stop.max_tokens", "0 is not allowed.*at least 1"),
    "max_tokens negative": (stop(max_tokens=-5), "stop.max_tokens", "-5 is not allowed"),
    "min_tokens over max_tokens": (stop(max_tokens=3, min_tokens=4), "stop.min_tokens", "4 is not allowed"),
    "min_tokens negative": (stop(min_tokens=-1), "stop.min_tokens", "-1 is not allowed"),
    "empty stop string": (stop(strings=["a", ""]), "stop.strings[1]", "1 to 256 characters"),
    "long stop string": (stop(strings=["x" * 257]), "stop.strings[0]", "1 to 256 characters"),
    "many stop strings": (stop(strings=["x"] * 17), "stop.strings", "17 items.*at most 16"),
    "stop token id over the vocabulary": (stop(token_ids=[5, 999]), "stop.token_ids[1]", "999 is not allowed"),
    "many stop token ids": (stop(token_ids=[1] * 257), "stop.token_ids", "257 items.*at most 256"),
    "unknown strategy": (drafting(strategy="oracle"), "drafting.strategy", "'oracle'.*one of .*none, .*trie"),
    "empty strategy": (drafting(strategy=""), "drafting.strategy", "''.*one of .*none, .*trie"),
    "unknown strategy, switched off": (drafting(strategy="oracle", enabled=False), "drafting.strategy", "'oracle'"),
    "negative budget": (drafting(max_nodes=-1), "drafting.max_nodes", "-1 is not allowed.*at least 0"),
    "temperature": (sampling(temperature=100.5), "sampling.temperature", r"100\.5 is not allowed.*\[0, 100\]"),
    "negative temperature": (sampling(temperature=-1), "sampling.temperature", r"-1\.0 is not allowed"),
    "not a number": (sampling(temperature=float("nan")), "sampling.temperature", "nan is not allowed"),
    "infinity": (sampling(frequency_penalty=float("inf")), "sampling.frequency_penalty", "inf is not allowed"),
    "top_p": (sampling(top_p=1.5), "sampling.top_p", r"1\.5 is not allowed"),
    "top_k": (sampling(top_k=-2), "sampling.top_k", "-2 is not allowed"),
    "top_p zero": (sampling(top_p=0.0), "sampling.top_p", r"0\.0 is not allowed.*above 0"),
    "presence penalty": (sampling(presence_penalty=101), "sampling.presence_penalty", r"101\.0.*\[-100, 100\]"),
    "repetition penalty": (sampling(repetition_penalty=1e-40), "sampling.repetition_penalty", r"lie in \[1e-05, 100\]"),
    "logit bias": (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]", r"101\.0 is not allowed.*\[-100, 100\]"),
    "logit bias outside the vocabulary": (
        sampling(logit_bias={1: 1.0, 256: 1.0}),
        "sampling.logit_bias[256]",
        r"the key must lie in \[0, 255\]",
    ),
    "many logit biases": (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", "at most 1024"),
    "no samples": (sampling(n=0), "sampling.n", r"0 is not allowed.*\[1, 4\]"),
    "many samples": (sampling(n=5, temperature=1.0), "sampling.n", r"5 is not allowed.*\[1, 4\]"),
    "top logprobs": (request(output=pb.OutputOptions(top_logprobs=21)), "output.top_logprobs", r"21 .*\[0, 20\]"),
    "empty grammar": (request(format=pb.OutputFormat(regex="")), "format.regex", "1 to 65536 characters"),
    "format with ignore_eos": (formatted(ignore_eos=True), "stop.ignore_eos", "cannot be combined with format"),
    "format with min_tokens": (formatted(min_tokens=1), "stop.min_tokens", "cannot be combined with format"),
    "format of a later version": (request(format=LATER), "format", "a kind that this server does not know"),
    "not a grammar": (request(format=pb.OutputFormat(lark="start: (")), "format.lark", "not a valid grammar"),
    "tools that the template leaves out": (with_tool(), "chat.tools", "takes no tools: its chat template has no tools"),
    "a result that the template leaves out": (WITH_RESULT, "chat.messages[0].tool_call_id", "takes no tools"),
    "a role that needs tools": (chat(("user", "hi"), ("tool", "x")), "chat.messages[1].role", "takes no tools"),
    "priority": (request(priority=11), "priority", r"11 is not allowed.*\[-10, 10\]"),
    "long tenant": (request(tenant="a" * 129), "tenant", "1 to 128 letters"),
    "control character in the tenant": (request(tenant="a\nb"), "tenant", "begin with a letter or digit"),
    "slash in the tenant": (
        request(tenant="a/b"),
        "tenant",
        r"tenant a/b: must be 1 to 128 letters \(a",
    ),
    "no part": (NO_PART, "chat.messages[0].content[1]", "must be a text: no other parts are served"),
    "a part of a later version": (LATER_PART, "chat.messages[0].content[0]", "must be a text"),
    "long request id": (request(request_id="x" * 20_000), "request_id", "at most 256 bytes"),
    "control character in the request id": (request(request_id="a\x00b"), "request_id", "control characters"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """A server with a context of 64 tokens."""
    async with serving(model=FakeModel(max_context=64)) as served:
        yield served


@together
@pytest.mark.parametrize("name", BAD)
async def test_refused(served: Served, name: str) -> None:
    bad, field, text = BAD[name]
    steps = served.engine.steps
    result = await answer(served.stub.GenerateStream(bad))
    found = violation(result.status, reason_of(name in TOO_LONG))
    assert found.field == field
    assert re.search(text, found.description), found.description
    assert result.kinds == []
    await served.assert_idle()
    assert served.engine.steps == steps


GOOD: dict[str, pb.GenerateRequest] = {
    "options that greedy decoding ignores": sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=2**64 - 1),
    "widest names": request(tenant="Z9" + 126 * "~", request_id="x" * 256),
    "the whole context": stop(max_tokens=62),
    "longest prompt": ids(*[1] * 63),
    "no draft nodes": drafting(max_nodes=0),
    "more draft nodes than the server's cap": drafting(max_nodes=10_000),
    "drafting off": drafting(enabled=False, strategy="trie"),
    "no strategy": drafting(strategy="none"),
    "chat": chat(("user", "hi")),
}


@together
@pytest.mark.parametrize("name", GOOD)
async def test_allowed(served: Served, name: str) -> None:
    result = await answer(served.stub.GenerateStream(GOOD[name]))
    assert result.finished.usage.completion_tokens == result.events[0].started.max_tokens
    off = name in ("drafting off", "no strategy")
    assert result.events[0].started.strategy == ("none" if off else "hybrid")
    await served.assert_idle()


MARKED = ToolFormat("<call>", "</call>", None, "name", "arguments")
MANY = pb.Chat(messages=[HI], tools=[pb.Tool(name="f")] * 129)


def nested(levels: int, innermost: str = "") -> str:
    return '{"a":' * (levels - 1) + f"[{innermost}]" + "}" * (levels - 1)


def with_variables(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[HI], template_kwargs=text), stop=pb.StopOptions(max_tokens=4))


VARIABLES = "chat.template_kwargs"
PARAMETERS, CALL = "chat.tools[0].parameters", "chat.messages[0].tool_calls[0]"
LONG_LIST = nested(32, "1," * 2000 + "1")
WRONG_TOOLS: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no name": (with_tool(name=""), "chat.tools[0].name", "1 to 256 characters; it has 0"),
    "no JSON": (with_tool(parameters="{"), PARAMETERS, "is not JSON"),
    "no object": (with_tool(parameters="[]"), PARAMETERS, "must be a JSON object, not list"),
    "deep": (with_tool(parameters="[" * 50_000), PARAMETERS, "nested too deeply"),
    "33 levels": (with_tool(parameters=nested(33)), PARAMETERS, "nested too deeply; at most 32 levels"),
    "half a surrogate pair": (with_tool(parameters=r'{"x": "\ud83d"}'), PARAMETERS, r"unpaired surrogate '\ud83d'"),
    "not a number": (with_call(name="f", arguments='{"x": NaN}'), f"{CALL}.arguments", "Out of"),
    "long when it is indented": (with_tool(parameters=LONG_LIST), "chat.messages", "as indented JSON; it has 28"),
    "many": (pb.GenerateRequest(chat=MANY), "chat.tools", "129 tools; at most"),
    "long": (with_tool(description="x" * 200_000), "chat.messages", "with tools as indented JSON; it has 200"),
    "variables that are no JSON": (with_variables("{"), VARIABLES, "is not JSON"),
    "variables that are no object": (with_variables("[]"), VARIABLES, "must be a JSON object, not list"),
    "many variables": (with_variables('{"x": "' + "y" * 1024 + '"}'), VARIABLES, "1 to 1024 characters; it has 1033"),
    "another variable": (
        with_variables('{"messages": []}'),
        VARIABLES,
        "'messages' is no variable of the model's chat template; there are enable_thinking",
    ),
    "wrong arguments": (with_call(name="f", arguments="7"), f"{CALL}.arguments", "JSON object, not int"),
    "call without name": (with_call(arguments="{}"), f"{CALL}.name", "1 to 256"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_tools() -> AsyncIterator[Served]:
    """A server with a model that takes tools."""
    tokenizer = ByteTokenizer()
    tokenizer.tool_format = MARKED
    tokenizer.template_variables = frozenset({"enable_thinking"})
    async with serving(model=FakeModel(tokenizer=tokenizer)) as served:
        yield served


@together
@pytest.mark.parametrize("name", WRONG_TOOLS)
async def test_wrong_tools(with_tools: Served, name: str) -> None:
    bad, field, text = WRONG_TOOLS[name]
    found = violation((await answer(with_tools.stub.GenerateStream(bad))).status, reason_of(name in TOO_LONG))
    assert found.field == field
    assert text in found.description
    await with_tools.assert_idle()


@together
async def test_tools_reach_the_template(with_tools: Served) -> None:
    good = with_tool(parameters='{"type": "object", "properties": {}}', description="d")
    assert (await answer(with_tools.stub.GenerateStream(good))).finished.usage.completion_tokens > 0
    assert with_tools.model.tokenizer.tools == [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    info = await with_tools.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.tool_format.begin, info.tool_format.HasField("between")) == ("<call>", False)
    assert (info.no_tools_reason, info.limits.tools) == ("", 128)


@together
async def test_variables_reach_the_template(with_tools: Served) -> None:
    good = with_variables('{"enable_thinking": false}')
    assert (await answer(with_tools.stub.GenerateStream(good))).finished.usage.completion_tokens > 0
    assert with_tools.model.tokenizer.variables == {"enable_thinking": False}
    info = await with_tools.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert ([*info.template_kwargs], info.limits.template_kwargs_characters) == (["enable_thinking"], 1024)


async def test_a_result_has_the_name_of_its_call() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.tool_format = MARKED
    calls = [pb.ToolCall(id=key, name=f"tool_{key}", arguments='{"x": 1}') for key in "ab"]
    results = [pb.ChatMessage(role="tool", tool_call_id="b"), pb.ChatMessage(role="tool", tool_name="own")]
    messages = [HI, pb.ChatMessage(role="assistant", tool_calls=calls), *results]
    async with serving(model=FakeModel(tokenizer=tokenizer)) as served:
        asked = pb.GenerateRequest(chat=pb.Chat(messages=messages), stop=pb.StopOptions(max_tokens=4))
        assert (await answer(served.stub.GenerateStream(asked))).finished.usage.completion_tokens > 0
    shown = [call["function"] for call in tokenizer.messages[1]["tool_calls"]]
    assert shown == [{"name": f"tool_{key}", "arguments": {"x": 1}} for key in "ab"]
    assert [message.get("name") for message in tokenizer.messages] == [None, None, "tool_b", "own"]


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        ("s0 u1", ["user:s0||u1"]),
        ("s0 s1 u2 a3 u4", ["user:s0||s1||u2", "assistant:a3", "user:u4"]),
        ("u0 a1 s2 u3", ["user:u0", "assistant:a1", "user:s2||u3"]),
        ("s0 a1 u2", ["assistant:a1", "user:s0||u2"]),
        ("u0 s1", ["user:u0", "user:s1"]),
        ("u0 a1 u2", ["user:u0", "assistant:a1", "user:u2"]),
    ],
)
async def test_system_messages_of_a_template_without_the_role(turns: str, shown: list[str]) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    asked = chat(*((roles[turn[0]], turn) for turn in turns.split()))
    asked.stop.max_tokens = 2
    for takes in (True, False):
        tokenizer = ByteTokenizer()
        tokenizer.takes_system = takes
        async with serving(model=FakeModel(tokenizer=tokenizer)) as served:
            assert (await answer(served.stub.GenerateStream(asked))).finished.usage.completion_tokens > 0
        seen = [f"{message['role']}:{message['content']}".replace("\n\n", "||") for message in tokenizer.messages]
        assert seen == ([f"{roles[turn[0]]}:{turn}" for turn in turns.split()] if takes else shown)


async def test_a_text_with_a_token_that_the_model_lacks() -> None:
    """As of the tokenizers of some models. Such a token ends no answer either."""
    async with serving(model=FakeModel(vocab_size=100)) as served:
        for asked, field in ((request("az"), "text"), (chat(("user", "z")), "chat.messages")):
            found = violation((await answer(served.stub.GenerateStream(asked))).status)
            assert found.field == field
            assert found.description.endswith(r"its tokenizer makes token 122 of it; the model's vocabulary is [0, 99]")


async def test_chat_without_a_template() -> None:
    async with serving(model=FakeModel(tokenizer=ByteTokenizer(has_chat_template=False))) as served:
        found = violation((await answer(served.stub.GenerateStream(chat(("user", "hi"))))).status)
        assert found.field == "chat"
        assert "no chat template" in found.description


def _delimited(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


MALFORMED = {
    "text": (_delimited(1, b"ok \xff"), "UTF-8"),
    "second chat message": (
        _delimited(3, _delimited(1, b"") + _delimited(1, _delimited(2, _delimited(1, b"\x80")))),
        "UTF-8",
    ),
    "cut off in a nested message": (_delimited(7, b"\x1a\x7f"), "corrupt"),
    "not protobuf": (b"\xff\xff\xff", "corrupt"),
}


@together
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bytes_are_refused_with_the_reason(served: Served, name: str) -> None:
    data, reason = MALFORMED[name]
    raw: grpc.aio.UnaryStreamMultiCallable[Any, Any] = served.channel.unary_stream(
        GENERATE, response_deserializer=pb.GenerateStreamResponse.FromString
    )
    call = raw(data)
    found = violation((await answer(call)).status)
    assert found.field == "request"
    assert "serialized draftwood.v1.GenerateRequest" in found.description
    assert reason in found.description
    await served.assert_idle()


SERVICES = [
    service
    for module in (pb, memory_pb2, experiments_pb2, status_pb2, tenants_pb2, vllm_engine_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
METHODS = {f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
NAMES = ["", "acme", "tenants/acme", "experiments/x", "experiments/-", "trie", "user", "*", "a.b", '{"type": "object"}']
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]) | st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 5),
    FieldDescriptor.CPPTYPE_STRING: st.sampled_from(NAMES) | st.text(max_size=20),
}


@st.composite
def messages(draw: st.DrawFn, kind: Any, levels: int = 4) -> Any:
    """Of a type; some of its fields are set, to anything."""
    message = GetMessageClass(kind)()
    fields = [field for field in kind.fields if levels or field.message_type is None]
    for field in draw(st.lists(st.sampled_from(fields), max_size=5, unique=True)) if fields else ():
        if field.message_type is not None:
            values: Any = messages(field.message_type, levels - 1)
        else:
            values = st.binary(max_size=9) if field.type == FieldDescriptor.TYPE_BYTES else SCALARS[field.cpp_type]
        held = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for entry in draw(st.lists(values, max_size=2)):
                if hasattr(entry.value, "DESCRIPTOR"):
                    held[entry.key].CopyFrom(entry.value)
                else:
                    held[entry.key] = entry.value
        elif field.is_repeated:
            held.extend(draw(st.lists(values, max_size=3)))
        elif field.message_type is not None:
            held.CopyFrom(draw(values))
        else:
            setattr(message, field.name, draw(values))
    return message


@together
@pytest.mark.parametrize("path", METHODS)
@given(data=st.data())
async def test_no_message_ends_in_an_internal_error(served: Served, path: str, data: st.DataObject) -> None:
    """By any method, with any message; streams of the client have up to two."""
    method = METHODS[path]
    sent = data.draw(st.lists(messages(method.input_type), min_size=1, max_size=1 + method.client_streaming))
    call: Any = served.channel.stream_stream(path)(iter([one.SerializeToString() for one in sent]), timeout=20)
    with suppress(grpc.aio.AioRpcError):
        async for _ in call:
            if method.name == "WatchStatus":
                break
    call.cancel()
    assert await call.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), await call.details()


async def test_message_over_the_limit() -> None:
    async with serving() as served:
        result = await answer(served.stub.GenerateStream(request("x" * (20 * 1024 * 1024))))
        assert result.status.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4194304" in str(result.status.details())
        assert (await answer(served.stub.GenerateStream(stop(max_tokens=2)))).finished


async def test_unary_methods_refuse_as_well() -> None:
    async with serving() as served:
        with pytest.raises(grpc.aio.AioRpcError) as no_input:
            await served.stub.Tokenize(pb.TokenizeRequest())
        assert violation(no_input.value).field == "input"
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 300]))
        assert violation(unknown.value).field == "token_ids[1]"
        raw: grpc.aio.UnaryUnaryMultiCallable[Any, Any] = served.channel.unary_unary(
            "/draftwood.v1.GenerationService/Tokenize"
        )
        with pytest.raises(grpc.aio.AioRpcError) as invalid:
            await raw(b"\x0a\x01\xff")
        assert violation(invalid.value).field == "request"
