"""Calls of tools in answers, however they are cut into deltas."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood_client import ArgumentError, ChatMessage, Messages, Tool, ToolCall, ToolCallReader, ToolFormat
from draftwood_client.request import generate_request


def pieces_of(case: dict[str, Any]) -> list[Any]:
    if case["expected"] is None:
        return [case["text"]]
    return [piece if isinstance(piece, str) else (piece["name"], piece["arguments"]) for piece in case["expected"]]


SHARED = json.loads((Path(__file__).parent / "tool_calls.json").read_text(encoding="utf-8"))
"""Cases of the readers in all languages: the pieces of an answer, or null where all of it is text."""
FORMATS = {
    name: ParseDict({key: value for key, value in form.items() if value is not None}, ToolFormat())
    for name, form in SHARED["forms"].items()
}
MARKED, NAMES = FORMATS["marked"], SHARED["names"]
LONG = "9" * 5000, "[" * 5000 + "]" * 5000
CASES: list[tuple[str, str, list[Any]]] = [(case["form"], case["text"], pieces_of(case)) for case in SHARED["cases"]]
for value in LONG:
    text = f'<tool_call>{{"name": "track", "arguments": {{"a": {value}}}}}</tool_call>'
    CASES.append(("marked", text, [text]))


def read(form: ToolFormat, text: str, cuts: list[int]) -> list[str | tuple[str, object]]:
    reader, pieces_read = ToolCallReader(form, NAMES), list[str | ToolCall]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces_read += reader.push(text[begin:end])
    merged: list[str | tuple[str, object]] = []
    for piece in [*pieces_read, *reader.close()]:
        if isinstance(piece, ToolCall):
            assert piece.id
            merged.append((piece.name, json.loads(piece.arguments)))
        elif merged and isinstance(last := merged[-1], str):
            merged[-1] = last + piece
        else:
            merged.append(piece)
    return merged


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_and_text(form: str, text: str, expected: list[Any]) -> None:
    assert read(FORMATS[form], text, []) == expected


pieces = ["<tool_call>", "</tool_call>", "[", "]", ", ", " ", "\n", "text", '{"name": "track", ', '"arguments": {}}']
pieces += ['"parameters": {"x": "é\\n\\"}"}}', '{"name": "refund", "arguments": {"deep": {"y": [true]}}}', *'{}"\\']
texts = st.lists(st.sampled_from(pieces), max_size=8).map("".join) | st.sampled_from([text for _, text, _ in CASES])


@given(form=st.sampled_from([*FORMATS]), text=texts, data=st.data())
@settings(max_examples=300, derandomize=True)
def test_how_a_text_is_cut_changes_nothing(form: str, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = read(FORMATS[form], text, [])
    assert read(FORMATS[form], text, cuts) == whole
    assert read(FORMATS[form], text, [*range(1, len(text))] if text else []) == whole
    if not any(isinstance(piece, tuple) for piece in whole):
        assert "".join(str(piece) for piece in whole) == text


def test_text_is_not_held_back_for_long() -> None:
    reader = ToolCallReader(MARKED, NAMES)
    assert reader.push("An answer without calls") == ["An answer without calls"]
    assert reader.push(" and <b") == [" and <b"]
    assert reader.push(" <tool") == []
    assert reader.push("box>") == [" <toolbox>"]


@pytest.mark.parametrize("arguments", ['{"text": "' + "word " * 20_000 + '"}', '{"list": [' + "{}, " * 25_000 + "{}]}"])
def test_each_character_of_a_long_call_is_looked_at_once(arguments: str) -> None:
    """Decoding what is held at each delta takes 10 to 30 seconds of the event loop here."""
    text = f'<tool_call>{{"name": "track", "arguments": {arguments}}}</tool_call>'
    began = time.process_time()
    assert read(MARKED, text, [*range(4, len(text), 4)]) == [("track", json.loads(arguments))]
    assert time.process_time() - began < 3


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


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    given = '{"order": 12345678901234567890, "of": {"arguments": [1.0, "}, {"]}, "name": "caf\\u00e9"}'
    text = f'<tool_call>{{"arguments": {{}}, "name" : "track", "arguments" : {given} }}</tool_call>'
    [call] = ToolCallReader(MARKED, NAMES).push(text)
    assert isinstance(call, ToolCall)
    assert call.arguments == given
