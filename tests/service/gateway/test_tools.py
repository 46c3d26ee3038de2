"""Tools: the official package for Python against a model that was never trained on them, which a grammar makes call."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import llguidance
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessage

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import Delta, FinishReason, ToolFormat
from draftwood_model_runner.errors import InvalidInputError
from draftwood_model_runner.request import GrammarKind
from draftwood_model_runner.sampling.grammar import GrammarState
from draftwood_model_runner.sampling.grammar_compilation import compiled
from draftwood_model_runner.sequence import Grammar
from draftwood_service.gateway.answers import Answers
from draftwood_service.gateway.errors import InvalidRequestError
from draftwood_service.gateway.reading import read_chat, with_tools
from draftwood_service.gateway.tools import grammar, read_tools
from tests.service.fakes import ByteTokenizer, FakeGrammars, FakeModel
from tests.service.gateway.asked import CALL, FORM, asking
from tests.service.gateway.listening import post

QUESTION: Any = [{"role": "user", "content": "Where is my parcel?"}]
MODEL = "draftwood-demo"
HERMES = ToolFormat(**asdict(FORM))
LIST = ToolFormat(begin="[", end="]", between=", ", name_key="name", arguments_key="arguments")
BARE = ToolFormat(name_key="name", arguments_key="parameters")


def tool(name: str, strict: bool | None = None, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    function = {"name": name, "description": f"to {name}", "parameters": schema}
    return {"type": "function", "function": function if strict is None else {**function, "strict": strict}}


TRACK = tool("track", order={"type": "integer", "minimum": 1, "maximum": 9999})
REFUND = tool("refund", reason={"enum": ["late", "broken"]}, full={"$ref": "#/$defs/flag"})
REFUND["function"]["parameters"]["$defs"] = {"flag": {"type": "boolean"}}
OPTIONS: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "tools": [TRACK, REFUND], "max_tokens": 120}


both_gateways = pytest.mark.parametrize("client", ["gateway_with_tools", "gateway_with_marker_tokens"], indirect=True)


@pytest.fixture
async def client(request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    url = request.getfixturevalue(getattr(request, "param", "gateway_with_tools"))
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def checked(message: Any) -> list[tuple[str, Any]]:
    """The calls of a message, which keep to the schemas."""
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    for name, arguments in calls:
        if name == "track":
            assert [*arguments] == ["order"]
            assert 1 <= arguments["order"] <= 9999
        else:
            assert name == "refund"
            assert arguments["reason"] in ("late", "broken")
            assert isinstance(arguments["full"], bool)
    return calls


@both_gateways
async def test_a_required_call_whole_and_streamed_and_the_answer_to_its_result(client: AsyncOpenAI) -> None:
    options = {**OPTIONS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = (await client.chat.completions.create(**options)).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    [call] = checked(whole.message)
    chunks = [chunk async for chunk in await client.chat.completions.create(**options, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == ""
    first, *more = [one for delta in deltas for one in delta.tool_calls or ()]
    assert (first.index, first.type, bool(first.id)) == (0, "function", True)
    assert all((one.index, one.id, one.function.name) == (0, None, None) for one in more)
    arguments = "".join(one.function.arguments for one in (first, *more))
    assert (first.function.name, json.loads(arguments)) == call
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "tool_calls"]

    assert isinstance(whole.message, ChatCompletionMessage)
    assert whole.message.tool_calls
    result = {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "in Bremen"}
    messages = [*QUESTION, whole.message.model_dump(exclude_none=True), result]
    last = (await client.chat.completions.create(**{**OPTIONS, "messages": messages})).choices[0]
    assert last.finish_reason in ("stop", "length")
    assert last.message.content
    assert last.message.tool_calls is None


@both_gateways
async def test_drafts_change_no_call(client: AsyncOpenAI) -> None:
    answers = []
    for own in ({"drafting": False}, {"strategy": "trie"}, {"strategy": "hybrid"}, {"strategy": "trie"}):
        options: dict[str, Any] = {**OPTIONS, "tool_choice": "required", "seed": 4, "temperature": 1.0}
        answer = await client.chat.completions.create(**options, extra_body={"draftwood": own})
        answers.append([(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls])
    assert answers[0]
    assert all(one == answers[0] for one in answers)


@both_gateways
async def test_none_and_auto_leave_an_ordinary_answer_as_it_is(client: AsyncOpenAI) -> None:
    plain = {key: value for key, value in OPTIONS.items() if key != "tools"}
    expected = (await client.chat.completions.create(**plain)).choices[0].message.content
    none = (await client.chat.completions.create(**OPTIONS, tool_choice="none")).choices[0].message
    assert (none.content, none.tool_calls) == (expected, None)
    auto = (await client.chat.completions.create(**OPTIONS, tool_choice="auto")).choices[0].message
    assert auto.tool_calls is None
    assert auto.content
    strict = {**OPTIONS, "tools": [tool("track", strict=True)]}
    assert (await client.chat.completions.create(**strict)).choices[0].message.content


async def test_a_call_that_is_cut_is_text(client: AsyncOpenAI) -> None:
    cut = (await client.chat.completions.create(**{**OPTIONS, "max_tokens": 12}, tool_choice="required")).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert (cut.message.content or "").startswith("<tool_call>")


def nested(levels: int) -> Any:
    return {"x": nested(levels - 1)} if levels else 1


CALLED_WITH_LIST = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "code"}]}, "tools[0]"),
        ({"tools": [tool("f"), tool("f")]}, "tools"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [tool("f", deep=nested(31))]}, "tools[0].function.parameters"),
        ({"tool_choice": "track"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format.type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"parallel_tool_calls": False, "stop": ["x", 3]}, "stop[1]"),
        ({"functions": [{"name": "f"}], "tools": []}, "functions"),
        ({"tools": [tool("f", x={"type": 3})], "tool_choice": "required"}, "tools"),
        ({"messages": [CALLED_WITH_LIST]}, "messages[0].tool_calls[0].function.arguments"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(client: AsyncOpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{**OPTIONS, **change})
    body: Any = refused.value.body
    assert (body["param"], body["type"]) == (param, "invalid_request_error")


async def test_a_model_whose_template_has_no_tools_refuses_them(gateway: str) -> None:
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="takes none: its chat template has no tools"):
            await client.chat.completions.create(**OPTIONS)
        answer = await client.chat.completions.create(**OPTIONS, tool_choice="none")
        assert answer.choices[0].message.content


def lark_of(fields: dict[str, Any], form: ToolFormat, schema: dict[str, Any] | None = None) -> str:
    """The grammar of the answers to a request."""
    read = read_tools(fields)
    assert read is not None
    return grammar(read, form, schema)


def matches(lark: str, text: str) -> bool:
    """Whether a whole text is what a grammar allows."""
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), lark)
    assert not matcher.get_error()
    return matcher.try_consume_tokens([*text.encode()]) == len(text.encode()) and bool(matcher.is_accepting())


REQUIRED = {"tool_choice": "required"}
NAMED = {"tool_choice": {"type": "function", "function": {"name": "track"}}}
STRICT = {"tools": [tool("track", strict=True, order={"type": "integer"})]}


@pytest.mark.parametrize(
    ("change", "text", "allowed"),
    [
        (REQUIRED, f"{CALL}\n{CALL}", True),
        (REQUIRED, f"Sure. {CALL}", False),
        (REQUIRED, CALL.replace("7", "0"), False),
        (REQUIRED, CALL.replace("track", "other"), False),
        ({**REQUIRED, "parallel_tool_calls": False}, f"{CALL}\n{CALL}", False),
        (NAMED, CALL, True),
        (NAMED, f"{CALL}\n{CALL}", False),
        (STRICT, "Any text <b>", True),
        (STRICT, f"Sure.\n{CALL}\n{CALL} Done.", True),
        (STRICT, f"Sure.\n{CALL.replace('7', 'null')}", False),
    ],
)
def test_the_grammar_of_calls(change: dict[str, Any], text: str, allowed: bool) -> None:
    assert matches(lark_of({**OPTIONS, **change}, HERMES), text) is allowed


@pytest.mark.parametrize("form", [HERMES, LIST, BARE], ids=["marked", "list", "bare"])
def test_the_grammar_of_calls_or_an_answer_in_a_format(form: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"late": {"type": "boolean"}}, "required": ["late"]}
    lark = lark_of(OPTIONS, form, schema)
    call = json.dumps({"name": "track", form.arguments_key: {"order": 7}})
    assert matches(lark, '{"late": true}')
    assert matches(lark, f"{form.begin}{call}{form.end}".lstrip())
    assert matches(lark, f"{form.begin}{call}{form.between}{call}{form.end}".lstrip()) is form.HasField("between")
    for wrong in ("Sure.", '{"late": 1}', call.replace("7", "0"), f'{{"late": true}}{form.begin}{call}{form.end}'):
        assert not matches(lark, wrong)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}}, {"b": 1}, {"b": "x"}),
        ({"properties": {"parts": {"items": {"$ref": "#"}}}, "required": ["parts"]}, {"parts": [{"parts": []}]}, {}),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "required": ["a"]}}}, {"a": 1}, {}),
        ({"properties": {"a": {"const": "#"}, "b": {"type": "integer"}}}, {"a": "#", "b": 1}, {"a": "#/"}),
    ],
)
def test_references_are_from_the_root_of_the_schema_of_a_tool(schema: Any, good: Any, bad: Any) -> None:
    given = {"type": "function", "function": {"name": "f", "parameters": schema}}
    lark = lark_of({**REQUIRED, "tools": [given]}, BARE)
    for arguments, allowed in ((good, True), (bad, False)):
        assert matches(lark, json.dumps({"name": "f", "parameters": arguments})) is allowed


def test_many_tools_are_read_at_once() -> None:
    """Comparing each name with each other takes half a minute here."""
    began = time.process_time()
    assert read_tools({"tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(50_000)]})
    assert time.process_time() - began < 5


def test_the_grammar_of_a_model_that_writes_bare_json() -> None:
    asked, call = {**OPTIONS, **REQUIRED}, '{"name": "track", "parameters": {"order": 12}}'
    assert matches(lark_of(asked, BARE), call)
    assert not matches(lark_of(asked, BARE), call + call)
    assert matches(lark_of(asked, ToolFormat(between="", name_key="name", arguments_key="parameters")), call + call)
    with pytest.raises(InvalidRequestError, match="strict cannot be kept for track"):
        with_tools(read_chat({**OPTIONS, **STRICT}), BARE)


@pytest.mark.parametrize("cut", [False, True])
async def test_calls_that_a_model_writes_by_itself(cut: bool) -> None:
    """Whole and streamed, for two samples, through the service."""
    script = f"Sure.\n{CALL}\n{CALL.replace('7', '8')}"
    options = {**OPTIONS, "model": "", "n": 2, "temperature": 1.0, "max_tokens": len(script) - 4 if cut else 200}
    async with asking(script) as asked:
        whole = (await asked.client.chat.completions.create(**options)).choices
        chunks = [chunk async for chunk in await asked.client.chat.completions.create(**options, stream=True)]
    for sample in whole:
        assert [call["order"] for _, call in checked(sample.message)] == [7, 8]
        assert (sample.message.content, sample.finish_reason) == ("Sure.", "length" if cut else "tool_calls")
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == sample.index]
        assert "".join(one.content or "" for one in deltas) == "Sure."
        pieces = [call for one in deltas for call in one.tool_calls or ()]
        assert len(pieces) > 4  # arguments come as they are written
        for index, order in enumerate((7, 8)):
            first, *others = [piece for piece in pieces if piece.index == index]
            assert (first.id is not None, first.type, first.function.name) == (True, "function", "track")
            assert all((piece.id, piece.function.name) == (None, None) for piece in others)
            arguments = "".join(piece.function.arguments for piece in (first, *others))
            assert json.loads(arguments)["order"] == order
    assert {choice.finish_reason for chunk in chunks for choice in chunk.choices} == {None, whole[0].finish_reason}


class ByteGrammars(FakeGrammars):
    def compile(self, kind: GrammarKind, text: str) -> Grammar:
        return GrammarState(compiled(llguidance.LLTokenizer("byte"), kind, text), 256)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_fails_within_an_answer_is_that_of_the_tools(stream: bool) -> None:
    """Of a caller who sent no response_format."""
    tokenizer = ByteTokenizer()
    tokenizer.tool_format = FORM
    async with asking(model=FakeModel(tokenizer=tokenizer, grammars=ByteGrammars())) as asked:
        asked.engine.sequence_error = InvalidInputError("format", None, "is too complex: too many items")
        fields = {**OPTIONS, **REQUIRED, "model": "", "stream": stream}
        answer = (await asked.gateway.raw(post("/v1/chat/completions", fields))).decode()
    assert "format" not in answer
    assert '"param":"tools"' in answer
    assert "cannot be kept to: is too complex: too many items" in answer


async def test_parallel_calls_that_are_not_wanted_end_the_answer() -> None:
    asked = with_tools(read_chat({**OPTIONS, "parallel_tool_calls": False, "stop": "x"}), HERMES)
    assert asked.options["stop"] == ["x", "</tool_call>"]
    assert with_tools(read_chat(OPTIONS), HERMES).options.get("stop") is None
    all_that_fit = [str(number) for number in range(16)]
    asked = with_tools(read_chat({**OPTIONS, "parallel_tool_calls": False, "stop": all_that_fit}), HERMES)
    assert asked.options["stop"] == all_that_fit


async def test_a_call_without_arguments_is_one_with_none() -> None:
    async with asking() as asked:
        for arguments in ("", None, "{}"):
            call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
            result = {"role": "tool", "tool_call_id": "c", "content": "1"}
            history = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, result]
            fields = {**OPTIONS, "model": "", "messages": history}
            assert (await asked.gateway.posted("/v1/chat/completions", fields))[0] == 200
            [shown] = asked.tokenizer.messages[1]["tool_calls"]
            assert shown["function"]["arguments"] == {}


def call_delta(index: int, arguments: str) -> Delta:
    call = pb.ToolCallDelta(index=index, id=f"c{index}", name="track", arguments=arguments)
    return Delta(pb.Delta(parts=[pb.Part(tool_call=call)], token_ids=[1]))


async def test_of_a_list_of_calls_one_is_taken_if_parallel_ones_are_not_wanted() -> None:
    """Its end, a bracket, cannot end the answer: arguments may have brackets."""
    asked = with_tools(read_chat({**OPTIONS, "parallel_tool_calls": False}), LIST)
    assert "stop" not in asked.options
    answers, arguments = Answers(asked, MODEL), '{"orders": [1, 2]}'
    chunks = [chunk for index in range(2) for chunk in answers.delta(0, call_delta(index, arguments))]
    chunks += answers.finished(0, 0, FinishReason.TOOL_CALLS)
    calls = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [one["function"]["arguments"] for one in calls] == ['{"orders": [1, 2]}']


async def test_reasoning_is_a_field_of_its_own() -> None:
    thought = {"role": "assistant", "content": "No.", "reasoning_content": "Well."}
    fields: Any = {"model": "", "messages": [*QUESTION, thought, *QUESTION], "max_tokens": 100}
    async with asking("<think>\nHm.\n</think>\n\nYes.") as asked:
        whole: Any = (await asked.client.chat.completions.create(**fields)).choices[0].message
        chunks = [chunk async for chunk in await asked.client.chat.completions.create(**fields, stream=True)]
    deltas: list[Any] = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert (whole.reasoning_content, whole.content) == ("Hm.", "Yes.")
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm."
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert [message.get("reasoning_content") for message in asked.tokenizer.messages] == [None, "Well.", None]
