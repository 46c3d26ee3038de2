"""Anthropic's Messages, in front of an engine that follows a script. tests/callers has the official package."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.service.fakes import serving
from tests.service.gateway.asked import PARAMETERS, SCRIPT, asking
from tests.service.gateway.listening import listening, post

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
TRACK = {"name": "track", "description": "to track", "input_schema": PARAMETERS}


def events_of(answer: str) -> list[dict[str, Any]]:
    """The events of a stream, whose names are their types."""
    lines = answer.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [line[7:] for line in lines if line.startswith("event: ")] == [event["type"] for event in events]
    return events


async def test_thoughts_text_and_calls_are_blocks_whole_and_streamed() -> None:
    fields = {**ASKED, "tools": [TRACK]}
    async with asking() as asked:
        status, whole = await asked.gateway.posted(MESSAGES, {**fields, "thinking": {"type": "disabled"}})
        assert asked.tokenizer.variables == {"enable_thinking": False}
        _, streamed = await asked.gateway.posted(MESSAGES, {**fields, "stream": True})
    assert (status, whole["stop_reason"]) == (200, "tool_use")
    thought, text, *calls = whole["content"]
    assert (thought["thinking"], text["text"]) == ("Hm.", "Sure.")
    assert [call["input"] for call in calls] == [{"order": 7}, {"order": 8}]
    assert whole["usage"]["output_tokens"] == len(SCRIPT)

    first, *events, ended, last = events_of(streamed)
    assert (first["type"], last) == ("message_start", {"type": "message_stop"})
    assert (ended["delta"]["stop_reason"], ended["usage"]["output_tokens"]) == ("tool_use", len(SCRIPT))
    for index, block in enumerate(whole["content"]):
        begin, *pieces, end = [event for event in events if event["index"] == index]
        assert (begin["type"], end["type"]) == ("content_block_start", "content_block_stop")
        assert begin["content_block"]["type"] == block["type"]
        field = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
        joined = "".join(piece["delta"][field] for piece in pieces)
        assert (json.loads(joined) if field == "partial_json" else joined) == block.get(field, block.get("input"))


async def test_a_conversation_reaches_the_template_in_its_order() -> None:
    used = {"type": "tool_use", "id": "c", "name": "track", "input": {"order": 7}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "in Bremen"}]}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "Where?"}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    fields = {**ASKED, "tools": [TRACK], "system": "Be brief.", "messages": given}
    async with asking() as asked:
        assert (await asked.gateway.posted(MESSAGES, fields))[0] == 200
    read = asked.tokenizer.messages
    assert [message["role"] for message in read] == ["system", "user", "assistant", "tool", "user"]
    _, _, assistant, tool, question = read
    [call] = assistant["tool_calls"]
    assert (assistant["reasoning_content"], call["function"]["arguments"]) == ("Hm.", {"order": 7})
    assert (tool["content"], tool["name"], question["content"]) == ("in Bremen", "track", "Well?")


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "must be set"),
        ({"messages": []}, "messages", "must be a list with"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "image is not"),  # noqa: E501
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "must be user or assistant"),
        ({"tools": [{"type": "bash_1", "name": "bash"}]}, "tools[0].type", "must be custom: bash_1 is not served"),
        ({"tools": [TRACK], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "must be one of track"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type", "must be auto, any, tool or none"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "must have 1 to"),
        ({"mcp_servers": [{}]}, "mcp_servers", "is not served"),
        ({"system": "x" * 70_000}, "messages", "must have at most"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str, said: str) -> None:
    async with asking() as asked:
        status, answer = await asked.gateway.posted(MESSAGES, {**ASKED, **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


@pytest.mark.parametrize(("limit", "reason"), [(4, "max_tokens"), (200, "end_turn")])
async def test_why_an_answer_ended(limit: int, reason: str) -> None:
    async with asking("Sure, at once.") as asked:
        _, answer = await asked.gateway.posted(MESSAGES, {**ASKED, "max_tokens": limit})
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, None)


async def test_the_key_may_be_in_the_header_of_their_clients() -> None:
    async with serving() as served, listening(served.server.address, keyless=False) as gateway:
        sent = post(MESSAGES, {**ASKED, "max_tokens": 2})
        assert (await gateway.answered(sent))[0] == 401
        assert (await gateway.answered(sent.replace(b"host: x", b"host: x\r\nx-api-key: k")))[0] == 200
