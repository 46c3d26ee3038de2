"""Tools, calls and results: in requests, in answers, and as JSON of `draftwood chat --tools`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import ArgumentError, ChatMessage, Client, Messages, Tool, ToolCall
from draftwood_client.request import generate_request
from tests.client.conftest import Cli
from tests.client.fake_server import FakeServer, calls


def test_tools_calls_and_results_are_in_the_request() -> None:
    messages: Messages = [
        ChatMessage("user", "Where is it?"),
        ChatMessage("assistant", "", [ToolCall("track", '{"order": 7}', "1")]),
        {"role": "tool", "content": "in Bremen", "tool_call_id": "1", "tool_name": "track"},
    ]
    tools = [Tool("track", "Where an order is", '{"type": "object"}')]
    chat = generate_request(messages, {"tools": tools}).chat
    assert [(tool.name, tool.description, tool.parameters) for tool in chat.tools] == [
        ("track", "Where an order is", '{"type": "object"}')
    ]
    assert [(call.id, call.name, call.arguments) for call in chat.messages[1].tool_calls] == [
        ("1", "track", '{"order": 7}')
    ]
    assert (chat.messages[2].tool_call_id, chat.messages[2].tool_name) == ("1", "track")


@pytest.mark.parametrize(
    ("prompt", "tools", "error"),
    [
        ("text", [Tool("f")], "tools: needs a prompt of chat messages"),
        ([ChatMessage("user", "x")], ["f"], r"tools\[0\]: must be a Tool, not str"),
        ([ChatMessage("user", "x")], [Tool(3)], r"tools\[0\].name: must be a str, not int"),  # type: ignore[arg-type]
        ([ChatMessage("user", "x", ["f"])], [], r"prompt\[0\].tool_calls\[0\]: must be a ToolCall"),  # type: ignore[list-item]
    ],
)
def test_wrong_tools(prompt: Any, tools: Any, error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        generate_request(prompt, {"tools": tools})


def test_reasoning_and_calls_of_an_answer(server: FakeServer) -> None:
    server.script = [calls("Hm", "Sure.", ("track", ['{"order"', ": 7}"]), ("refund", ["{}"]))]
    with Client(server.target) as client, client.stream_chat("Where is it?") as stream:
        deltas = [*stream]
        completion = stream.completion()
    assert "".join(delta.reasoning for delta in deltas) == completion.reasoning == "Hm"
    assert "".join(delta.text for delta in deltas) == completion.text == "Sure."
    assert completion.tool_calls == (ToolCall("track", '{"order": 7}', "c0"), ToolCall("refund", "{}", "c1"))
    assert completion.finish_reason == "tool_calls"
    assert deltas[-1].result is not None
    assert deltas[-1].result.reason == pb.FINISH_REASON_TOOL_CALLS
    answered = ChatMessage("assistant", completion.text, completion.tool_calls, reasoning=completion.reasoning)
    [sent] = generate_request([answered], {}).chat.messages
    assert (sent.reasoning, [call.id for call in sent.tool_calls]) == ("Hm", ["c0", "c1"])


WEATHER = {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}}
CALL = ("weather", ['{"city": ', '"Köln"}'])
LINE = '{"name": "weather", "arguments": {"city": "Köln"}}\n'


Ask = Callable[..., Result]


@pytest.fixture
def ask(server: FakeServer, cli: Cli) -> Ask:
    server.tool_format = pb.ToolFormat(
        begin="<tool_call>\n", end="\n</tool_call>", between="\n", name_key="name", arguments_key="arguments"
    )
    return lambda tools, *flags: cli("chat", "Is it cold?", "--tools", tools, *flags)


@pytest.mark.parametrize("tools", [[WEATHER], [{"type": "function", "function": WEATHER}], [{"name": "weather"}]])
def test_tools_go_to_the_server(ask: Ask, server: FakeServer, tools: list[object]) -> None:
    assert ask(json.dumps(tools)).exit_code == 0
    tool = server.requests[0].chat.tools[0]
    assert tool.name == "weather"
    assert (tool.description, tool.parameters) in [("Of a city", '{"type": "object"}'), ("", "")]


def test_calls_are_lines_or_in_the_json(ask: Ask, server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([WEATHER]))
    server.script = [calls("Hm", "I will see.", CALL, CALL)]
    assert ask(f"@{tmp_path / 'tools.json'}").stdout == f"I will see.\n{LINE}{LINE}"  # reasoning is for terminals
    value = json.loads(ask(json.dumps([WEATHER]), "--json").stdout)
    assert (value["text"], value["reasoning"], value["finish_reason"]) == ("I will see.", "Hm", "tool_calls")
    assert value["tool_calls"][0] == {"name": "weather", "arguments": '{"city": "Köln"}', "id": "c0"}
    server.script = [calls("", "", ("weather", ['{"city":\n', '"Köln"']))]
    assert ask(json.dumps([WEATHER])).stdout == '{"name": "weather", "arguments": {"city": "Köln"}\n'  # cut off


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("[", "--tools: is not JSON: Expecting value"),
        ("[" * 100_000, "--tools: is not JSON"),
        ("[]", "--tools: must be a JSON list of functions"),
        ('[{"name": "a"}, {"type": "function"}]', "--tools: entry 1: must be an object with a name, a description"),
        ('[{"name": "a", "strict": true}]', "--tools: entry 0: has the key 'strict'; allowed are description, name"),
        ('[{"name": "a", "description": 3}]', "--tools: entry 0: must have a text as its description"),
    ],
)
def test_bad_tools(ask: Ask, tools: str, problem: str) -> None:
    result = ask(tools)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {problem}")


def test_what_does_not_go_with_tools(ask: Ask, server: FakeServer) -> None:
    refused = ask('[{"name": "a"}]', "--show-drafts")
    assert refused.stderr == "error: --show-drafts: cannot be used with --tools\n"
    server.tool_format = None
    refused = ask('[{"name": "a"}]')
    assert (refused.exit_code, refused.stderr) == (2, "error: --tools: fake takes none: the template shows no tools\n")
