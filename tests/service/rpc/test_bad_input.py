"""Invalid requests: each refusal names the field and what is allowed, with google.rpc details."""

from __future__ import annotations

import json
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
from tests.service.fakes import ByteTokenizer, FakeModel, Served, refusal, serving

together = pytest.mark.asyncio(loop_scope="module")
"""Tests on a server of this file."""


def violation(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest.FieldViolation:
    """The one field violation of an INVALID_ARGUMENT; the reason tells whether a shorter prompt would mend it."""
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = rpc_status.from_call(error)
    info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    [found] = bad_request.field_violations
    assert found.description == error.details()
    too_long = "maximum context length" in found.description
    reason = "CONTEXT_LENGTH_EXCEEDED" if too_long else "INVALID_VALUE"
    assert (info.reason, info.domain) == (reason, "draftwood")
    return found


def request(text: str = "hi", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values))


def turn(role: str, *texts: str) -> pb.ChatMessage:
    return pb.ChatMessage(role=role, content=[pb.ContentPart(text=text) for text in texts])


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


LATER_PART = pb.GenerateRequest(chat=pb.Chat(messages=[turn("user")]))
LATER_PART.chat.messages[0].content.append(pb.ContentPart.FromString(b"\x12\x01a"))
LATER = pb.OutputFormat.FromString(b"\x32\x01a")
BAD: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no prompt": (pb.GenerateRequest(), "prompt", "text, token_ids and chat"),
    "empty text": (request(""), "text", "must not be empty"),
    "empty token ids": (ids(), "token_ids.ids", "must not be empty"),
    "empty chat": (chat(), "chat.messages", "must not be empty"),
    "chat without a role": (chat(("user", "a"), ("", "b")), "chat.messages[1].role", "1 to 64 characters; it has 0"),
    "token id over the vocabulary": (ids(1, 2, 256), "token_ids.ids[2]", r"256 is not allowed.*\[0, 255\]"),
    "negative token id": (ids(1, -1), "token_ids.ids[1]", "-1 is not allowed"),
    "long text": (request("x" * 64), "text", "64 tokens.*at most 63.*maximum context length is 64"),
    "long token ids": (ids(*[1] * 64), "token_ids.ids", "64 tokens.*at most 63.*maximum context"),
    "long chat": (chat(("user", "x" * 64)), "chat.messages", "70 tokens.*at most 63.*maximum context"),
    "max_tokens over the context": (stop(max_tokens=63), "stop.max_tokens", "63 is .*most 62.*2 tokens.*length is 64 "),
    "max_tokens zero": (stop(max_tokens=0), "stop.max_tokens", "0 is not allowed.*at least 1"),
    "min_tokens over max_tokens": (stop(max_tokens=3, min_tokens=4), "stop.min_tokens", "4 is not allowed"),
    "empty stop string": (stop(strings=["a", ""]), "stop.strings[1]", "1 to 256 characters"),
    "long stop string": (stop(strings=["x" * 257]), "stop.strings[0]", "1 to 256 characters"),
    "many stop strings": (stop(strings=["x"] * 17), "stop.strings", "17 items.*at most 16"),
    "stop token id over the vocabulary": (stop(token_ids=[5, 999]), "stop.token_ids[1]", "999 is not allowed"),
    "many stop token ids": (stop(token_ids=[1] * 257), "stop.token_ids", "257 items.*at most 256"),
    "unknown strategy": (drafting(strategy="oracle"), "drafting.strategy", "'oracle'.*one of .*none, .*trie"),
    "unknown strategy, switched off": (drafting(strategy="oracle", enabled=False), "drafting.strategy", "'oracle'"),
    "negative budget": (drafting(max_nodes=-1), "drafting.max_nodes", "-1 is not allowed.*at least 0"),
    "temperature": (sampling(temperature=100.5), "sampling.temperature", r"100\.5 is not allowed.*\[0, 100\]"),
    "not a number": (sampling(temperature=float("nan")), "sampling.temperature", "nan is not allowed"),
    "infinity": (sampling(frequency_penalty=float("inf")), "sampling.frequency_penalty", "inf is not allowed"),
    "top_k": (sampling(top_k=-2), "sampling.top_k", "-2 is not allowed"),
    "top_p": (sampling(top_p=0.0), "sampling.top_p", r"0\.0 is not allowed.*above 0"),
    "presence penalty": (sampling(presence_penalty=101), "sampling.presence_penalty", r"101\.0.*\[-100, 100\]"),
    "repetition penalty": (sampling(repetition_penalty=1e-40), "sampling.repetition_penalty", r"lie in \[1e-05, 100\]"),
    "logit bias": (sampling(logit_bias={7: 101.0}), "sampling.logit_bias[7]", r"101\.0 is not allowed.*\[-100, 100\]"),
    "logit bias of no token": (sampling(logit_bias={256: 1.0}), "sampling.logit_bias[256]", r"must lie in \[0, 255\]"),
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
    "a role that needs tools": (chat(("user", "hi"), ("tool", "x")), "chat.messages[1].role", "takes no tools"),
    "priority": (request(priority=11), "priority", r"11 is not allowed.*\[-10, 10\]"),
    "long tenant": (request(tenant="a" * 129), "tenant", "1 to 128 letters"),
    "slash in the tenant": (request(tenant="a/b"), "tenant", r"tenant a/b: must be 1 to 128 letters \(a"),
    "a part of a later version": (LATER_PART, "chat.messages[0].content[0]", "must be a text: no other parts"),
    "long request id": (request(request_id="x" * 20_000), "request_id", "at most 256 bytes"),
    "control character in the request id": (request(request_id="a\x00b"), "request_id", "control characters"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """A server with a context of 64 tokens."""
    async with serving(model=FakeModel(max_context=64)) as served:
        yield served


async def assert_refused(served: Served, case: tuple[pb.GenerateRequest, str, str]) -> None:
    """Before any work is done for it."""
    bad, field, text = case
    steps = served.engine.steps
    result = await served.answer(bad)
    found = violation(result.status)
    assert found.field == field
    assert re.search(text, found.description), found.description
    assert result.kinds == []
    await served.assert_idle()
    assert served.engine.steps == steps


@together
@pytest.mark.parametrize("name", BAD)
async def test_refused(served: Served, name: str) -> None:
    await assert_refused(served, BAD[name])


GOOD: dict[str, pb.GenerateRequest] = {
    "options that greedy decoding ignores": sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1, seed=2**64 - 1),
    "widest names": request(tenant="Z9" + 126 * "~", request_id="x" * 256),
    "the whole context": stop(max_tokens=62),
    "longest prompt": ids(*[1] * 63),
    "longest and most stop strings": stop(strings=["x" * 256] * 16, max_tokens=2),
    "no draft nodes": drafting(max_nodes=0),
    "more draft nodes than the server's cap": drafting(max_nodes=10_000),
    "drafting off": drafting(enabled=False, strategy="trie"),
    "no strategy": drafting(strategy="none"),
}


@together
@pytest.mark.parametrize("name", GOOD)
async def test_allowed(served: Served, name: str) -> None:
    result = await served.answer(GOOD[name])
    assert result.finished.usage.completion_tokens == result.events[0].started.max_tokens
    off = name in ("drafting off", "no strategy")
    assert result.events[0].started.strategy == ("none" if off else "hybrid")
    await served.assert_idle()


MARKED = ToolFormat("<call>", "</call>", None, "name", "arguments")


def nested(levels: int, innermost: str = "") -> str:
    return '{"a":' * (levels - 1) + f"[{innermost}]" + "}" * (levels - 1)


def with_variables(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.Chat(messages=[HI], template_kwargs=text), stop=pb.StopOptions(max_tokens=4))


VARIABLES = "chat.template_kwargs"
PARAMETERS, CALL = "chat.tools[0].parameters", "chat.messages[0].tool_calls[0]"
LONG_LIST = nested(32, "1," * 2000 + "1")
MANY = pb.GenerateRequest(chat=pb.Chat(messages=[HI], tools=[pb.Tool(name="f")] * 129))
WRONG_TOOLS: dict[str, tuple[pb.GenerateRequest, str, str]] = {
    "no name": (with_tool(name=""), "chat.tools[0].name", "1 to 256 characters; it has 0"),
    "no JSON": (with_tool(parameters="{"), PARAMETERS, "is not JSON"),
    "no object": (with_tool(parameters="[]"), PARAMETERS, "must be a JSON object, not list"),
    "deep": (with_tool(parameters="[" * 50_000), PARAMETERS, "nested too deeply"),
    "33 levels": (with_tool(parameters=nested(33)), PARAMETERS, "nested too deeply; at most 32 levels"),
    "half a surrogate pair": (with_tool(parameters=r'{"x": "\ud83d"}'), PARAMETERS, r"unpaired surrogate '\\ud83d'"),
    "not a number": (with_call(name="f", arguments='{"x": NaN}'), f"{CALL}.arguments", "Out of"),
    "long when it is indented": (with_tool(parameters=LONG_LIST), "chat.messages", "indented JSON; it has 28.*context"),
    "many": (MANY, "chat.tools", "129 tools; at most"),
    "long": (with_tool(description="x" * 200_000), "chat.messages", "as indented JSON; it has 200.*maximum context"),
    "variables that are no object": (with_variables("[]"), VARIABLES, "must be a JSON object, not list"),
    "long variables": (with_variables('{"x": "' + "y" * 1024 + '"}'), VARIABLES, "1 to 1024 characters; it has 1033"),
    "another variable": (with_variables('{"x": []}'), VARIABLES, "'x' is no variable.*there are enable_thinking"),
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
    await assert_refused(with_tools, WRONG_TOOLS[name])


@together
async def test_tools_and_variables_reach_the_template(with_tools: Served) -> None:
    schema = {"type": "object", "properties": {}}
    asked = with_tool(parameters=json.dumps(schema), description="d")
    asked.chat.template_kwargs = '{"enable_thinking": false}'
    assert (await with_tools.answer(asked)).finished
    tokenizer = with_tools.model.tokenizer
    function = {"name": "f", "description": "d", "parameters": schema}
    assert tokenizer.tools == [{"type": "function", "function": function}]
    assert tokenizer.variables == {"enable_thinking": False}
    info = await with_tools.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.tool_format.begin, info.tool_format.HasField("between")) == ("<call>", False)
    assert (info.no_tools_reason, info.limits.tools) == ("", 128)
    assert ([*info.template_kwargs], info.limits.template_kwargs_characters) == (["enable_thinking"], 1024)


@together
async def test_a_result_has_the_name_of_its_call(with_tools: Served) -> None:
    calls = [pb.ToolCall(id=key, name=f"tool_{key}", arguments='{"x": 1}') for key in "ab"]
    results = [pb.ChatMessage(role="tool", tool_call_id="b"), pb.ChatMessage(role="tool", tool_name="own")]
    messages = [HI, pb.ChatMessage(role="assistant", tool_calls=calls), *results]
    asked = pb.GenerateRequest(chat=pb.Chat(messages=messages), stop=pb.StopOptions(max_tokens=4))
    assert (await with_tools.answer(asked)).finished
    read = with_tools.model.tokenizer.messages
    shown = [call["function"] for call in read[1]["tool_calls"]]
    assert shown == [{"name": f"tool_{key}", "arguments": {"x": 1}} for key in "ab"]
    assert [message.get("name") for message in read] == [None, None, "tool_b", "own"]


@together
@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        ("s0 s1 u2 a3 u4", ["user:s0||s1||u2", "assistant:a3", "user:u4"]),
        ("u0 a1 s2 u3", ["user:u0", "assistant:a1", "user:s2||u3"]),
        ("s0 a1 u2", ["assistant:a1", "user:s0||u2"]),
        ("u0 s1", ["user:u0", "user:s1"]),
    ],
)
async def test_system_messages_of_a_template_without_the_role(with_tools: Served, turns: str, shown: list[str]) -> None:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    asked = chat(*((roles[turn[0]], turn) for turn in turns.split()))
    asked.stop.max_tokens = 2
    tokenizer = with_tools.model.tokenizer
    for takes in (False, True):
        tokenizer.takes_system = takes
        assert (await with_tools.answer(asked)).finished
        seen = [f"{message['role']}:{message['content']}".replace("\n\n", "||") for message in tokenizer.messages]
        assert seen == ([f"{roles[turn[0]]}:{turn}" for turn in turns.split()] if takes else shown)


async def test_a_text_with_a_token_that_the_model_lacks() -> None:
    """As of the tokenizers of some models. Such a token ends no answer either."""
    async with serving(model=FakeModel(vocab_size=100)) as served:
        for asked, field in ((request("az"), "text"), (chat(("user", "z")), "chat.messages")):
            found = violation((await served.answer(asked)).status)
            assert found.field == field
            assert found.description.endswith(r"its tokenizer makes token 122 of it; the model's vocabulary is [0, 99]")


async def test_chat_without_a_template() -> None:
    async with serving(model=FakeModel(tokenizer=ByteTokenizer(has_chat_template=False))) as served:
        await assert_refused(served, (chat(("user", "hi")), "chat", "no chat template"))


@together
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x1a\x09\x0a\x00\x0a\x05\x12\x03\x0a\x01\x80", "UTF-8"),  # in the second message of a chat
        (b"\x3a\x02\x1a\x7f", "corrupt"),  # cut off in a nested message
    ],
)
async def test_malformed_bytes_are_refused_with_the_reason(served: Served, data: bytes, reason: str) -> None:
    call: Any = served.channel.unary_stream("/draftwood.v1.GenerationService/GenerateStream")
    found = violation(await refusal(call(data)))
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
    code, details = await call.code(), await call.details()
    # grpc.aio loses the status of a call that ends while its client writes (grpc/grpc issue 36066).
    if not (method.client_streaming and details == "Internal error from Core"):
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), details


@together
async def test_other_methods_refuse_as_well(served: Served) -> None:
    raw: Any = served.channel.unary_unary("/draftwood.v1.GenerationService/Tokenize")
    stream: Any = served.channel.stream_stream("/draftwood.v1.MemoryService/WarmMemory")
    for call, field in (
        (served.stub.Tokenize(pb.TokenizeRequest()), "input"),
        (served.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 300])), "token_ids[1]"),
        (raw(b"\x0a\x01\xff"), "request"),
        (stream(iter([b"\x0a\xff\xff"])), "request"),
        (served.channel.stream_stream("/draftwood.v1.GenerationService/Generate")(iter([])), "request"),  # no message
    ):
        assert violation(await refusal(call)).field == field
