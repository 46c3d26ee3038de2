"""Tools, calls and results in requests and in answers."""

from __future__ import annotations

from typing import Any

import pytest

from draftwood.v1 import generation_pb2 as pb
from draftwood_client import ArgumentError, ChatMessage, Client, Messages, Tool, ToolCall
from draftwood_client.request import generate_request
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
