"""Reasoning and calls of tools in answers, however they are cut into tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.v1 import generation_pb2 as pb
from draftwood_service.rpc.parts import AnswerReader, ToolCallReader, whole_parts
from draftwood_service.tools import MAX_NESTING, ReasoningFormat, ToolFormat
from tests.service.fakes import Answer, scripted, serving

DATA = json.loads((Path(__file__).parent / "tool_calls.json").read_text(encoding="utf-8"))
"""Answers and their pieces; null if all of an answer is text. A call that is cut off has its arguments as text."""
FORMATS = {name: ToolFormat(**form) for name, form in DATA["forms"].items()}
MARKED, NAMES = FORMATS["marked"], DATA["names"]
THINK = ReasoningFormat("<think>", "</think>", opened_by_prompt=False)


def pieces_of(case: dict[str, Any]) -> list[Any]:
    if case["expected"] is None:
        return [case["text"]]
    return [
        piece if isinstance(piece, str) else (piece["name"], piece["cut"] if "cut" in piece else piece["arguments"])
        for piece in case["expected"]
    ]


CASES: list[tuple[str, str, list[Any]]] = [(case["form"], case["text"], pieces_of(case)) for case in DATA["cases"]]
for value in ("9" * 5000, "[" * 5000 + "]" * 5000):
    ends = 0 if value[0] == "9" else MAX_NESTING - 1
    arguments = f'{{"a":{" " if ends else ""}{value[:ends]}'
    text = f'<tool_call>{{"name": "track", "arguments": {{"a": {value}}}}}</tool_call>'
    CASES.append(("marked", text, [("track", arguments), text[text.index(arguments) + len(arguments) :]]))


def read(form: ToolFormat, text: str, cuts: list[int]) -> list[Any]:
    """The pieces of text and calls; arguments that are no JSON as they are."""
    reader, parts = ToolCallReader(form, NAMES), list[pb.Part]()
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts += reader.push(text[begin:end])
    merged: list[Any] = []
    for part in whole_parts([*parts, *reader.close()]):
        if part.HasField("tool_call"):
            assert part.tool_call.id
            merged.append((part.tool_call.name, decoded(part.tool_call.arguments)))
        else:
            merged.append(part.text)
    assert reader.complete == sum(isinstance(piece, tuple) and isinstance(piece[1], dict) for piece in merged)
    return merged


def decoded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


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
        assert "".join(whole) == text


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(), values, max_size=3), ascii_only=st.booleans(), indent=st.sampled_from([None, 1])
)
@settings(max_examples=200, derandomize=True)
def test_any_arguments_are_read_to_their_end(value: Any, ascii_only: bool, indent: int | None) -> None:
    arguments = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    text = f'Sure. <tool_call>{{"name": "track", "arguments": {arguments}}}</tool_call> Done.'
    assert read(MARKED, text, [*range(1, len(text))]) == ["Sure.", ("track", value), " Done."]


def test_text_is_not_held_back_for_long() -> None:
    reader = ToolCallReader(MARKED, NAMES)
    assert said(reader.push("An answer without calls")) == ["An answer without calls"]
    assert said(reader.push(" and <b")) == [" and <b"]
    assert reader.push(" <tool") == []
    assert said(reader.push("box>")) == [" <toolbox>"]


def test_arguments_come_as_they_are_written() -> None:
    reader = ToolCallReader(MARKED, NAMES)
    assert reader.push('<tool_call>{"name": "track", "argu') == []
    begun, first = reader.push('ments": {"text": "a')
    assert (begun.tool_call.index, begun.tool_call.name, begun.tool_call.arguments) == (0, "track", "")
    assert begun.tool_call.id.startswith("call_")
    assert first.tool_call == pb.ToolCallDelta(index=0, arguments='{"text": "a')
    told = {" long": " long", " text\\": " text", 'n", "n": 1': '\\n", "n":', "2}}</tool_call>": " 12}"}
    for written, expected in told.items():
        assert [part.tool_call.arguments for part in reader.push(written)] == [expected]
    assert (reader.close(), reader.complete) == ([], 1)


def test_arguments_are_the_text_that_the_model_wrote() -> None:
    given_text = '{"order": 12345678901234567890, "of": {"arguments": [1.0, "}, {"]}, "name": "caf\\u00e9"}'
    text = f'<tool_call>{{"arguments": {{}}, "name" : "track", "arguments" : {given_text} }}</tool_call>'
    [part] = ToolCallReader(MARKED, NAMES).push(text)
    assert part.tool_call.arguments == given_text


def test_a_name_without_an_end_is_looked_at_once() -> None:
    began, text = time.thread_time(), '<tool_call>{"name": "' + "x" * 100_000
    assert read(MARKED, text, [*range(4, len(text), 4)]) == [text]
    assert time.thread_time() - began < 3


@pytest.mark.parametrize(
    ("order", "begin", "piece", "end"),
    [
        ('{{"name": "track", "arguments": {}}}', '{"list": [', "{}, ", "{}]}"),
        ('{{"name": "track", "arguments": {}}}', '{"text": "', "word ", '"}'),
        ('{{"arguments": {}, "name": "track"}}', '{"text": "', "word ", '"}'),
    ],
)
def test_each_character_of_a_long_call_is_looked_at_once(order: str, begin: str, piece: str, end: str) -> None:
    """Decoding what is held at each delta would take 64 times as long for a call of eight times the length."""
    seconds = []
    for count in (4_000, 32_000):
        arguments = begin + piece * count + end
        text = f"<tool_call>{order.format(arguments)}</tool_call>"
        began = time.thread_time()
        assert read(MARKED, text, [*range(4, len(text), 4)]) == [("track", json.loads(arguments))]
        seconds.append(time.thread_time() - began)
    assert seconds[1] < 24 * seconds[0]


def said(parts: list[pb.Part]) -> list[str]:
    return [part.text for part in parts]


REASONED = [
    ("\n<think>\nIt is late.\n</think>\n\nGood night.", False, "It is late.", "Good night."),
    ("It is late.\n</think>\n\nGood night.", True, "It is late.", "Good night."),
    ("<think>\nIt is late.</think>x", True, "It is late.", "x"),
    ("<think>no end ", False, "no end", ""),
    ("no end </thin", True, "no end </thin", ""),
    ("<thin", False, "", "<thin"),
    ("Text <think>x</think>", False, "", "Text <think>x</think>"),
    ("<think></think>Text</think>", False, "", "Text</think>"),
    ("", True, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "reasoning", "rest"), REASONED)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning(text: str, opened: bool, reasoning: str, rest: str, size: int) -> None:
    reader, parts = AnswerReader(THINK, opened), list[pb.Part]()
    for at in range(0, len(text), size):
        parts += reader.push(text[at : at + size])
    parts += reader.close()
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.text for part in parts) == rest
    assert reader.reasoning_tokens is not None
    assert (reader.reasoning_tokens > 0) == bool(text and (opened or text.lstrip().startswith("<think>")))


def test_calls_are_read_behind_reasoning_not_within_it() -> None:
    call = '<tool_call>{"name": "track", "arguments": {}}</tool_call>'
    reader = AnswerReader(THINK, False, MARKED, NAMES)
    parts = whole_parts([*reader.push(f"<think>{call}</think>Yes. {call}"), *reader.close()])
    assert [part.WhichOneof("part") for part in parts] == ["reasoning", "text", "tool_call"]
    assert (parts[0].reasoning, parts[1].text, reader.calls) == (call, "Yes.", 1)


THOUGHT = "<think>Where?</think>\n"
CALL = '<tool_call>\n{"name": "track", "arguments": {"a": "b c d e f"}}\n</tool_call>'


def asked(tool: str = "track", **output: Any) -> pb.GenerateRequest:
    parts = [pb.ContentPart(text="Where "), pb.ContentPart(text="is it?")]
    question = pb.ChatMessage(role="user", content=parts)
    return pb.GenerateRequest(
        chat=pb.Chat(messages=[question], tools=[pb.Tool(name=tool)]),
        stop=pb.StopOptions(max_tokens=400),
        drafting=pb.DraftOptions(enabled=False),
        output=pb.OutputOptions(**output),
    )


def parts_of(result: Answer) -> list[pb.AnswerPart]:
    return whole_parts(part for event in result.events for part in event.delta.parts)


async def test_a_stream_and_a_whole_answer_have_the_same_parts() -> None:
    async with serving(*scripted(f"{THOUGHT}Sure.\n{CALL}", MARKED)) as served:
        streamed = await served.answer(asked(token_details=True))
        whole = await served.stub.Generate(asked(token_details=True))
        assert served.model.tokenizer.messages[0]["content"] == "Where is it?"
    [result], [one] = streamed.finished.samples, whole.answers
    for found in (parts_of(streamed), one.parts):
        reasoning, text, call = found
        assert (reasoning.reasoning, text.text) == ("Where?", "Sure.")
        assert (call.tool_call.name, call.tool_call.arguments) == ("track", '{"a": "b c d e f"}')
    assert one.result == result
    assert result.reason == pb.FINISH_REASON_TOOL_CALLS
    assert result.usage.reasoning_tokens == len("<think>Where?</think>")  # a token is a byte
    assert whole.usage == streamed.finished.usage
    assert whole.usage.reasoning_tokens == result.usage.reasoning_tokens
    details = [detail for event in streamed.events for detail in event.delta.details]
    assert [*one.details] == details
    assert "".join(detail.text for detail in details) == f"{THOUGHT}Sure.\n{CALL}"
    assert [detail.token_id for detail in details] == [*one.token_ids]


async def test_raw_text_is_what_the_model_wrote() -> None:
    async with serving(*scripted(f"{THOUGHT}{CALL}", MARKED)) as served:
        whole = await served.stub.Generate(asked(raw_text=True))
    [part] = whole.answers[0].parts
    assert part.text == f"{THOUGHT}{CALL}"
    assert whole.answers[0].result.reason == pb.FINISH_REASON_STOP
    assert not whole.usage.HasField("reasoning_tokens")


LONG_NAME = "t" * 150


@pytest.mark.parametrize(
    ("text", "tool", "size"),
    [
        (f"{THOUGHT}Sure.\n{CALL}", "track", 128),
        (THOUGHT * 3 + "And so it is, as it ever was, no call.", "track", 128),
        (CALL.replace("track", LONG_NAME), LONG_NAME, 256),  # the beginning of any call fits
    ],
)
async def test_parts_do_not_change_the_size_of_deltas_at_a_cadence(text: str, tool: str, size: int) -> None:
    shaping: dict[str, Any] = {"delta_cadence": 0.02, "delta_padding": 128}
    async with serving(*scripted(text, MARKED), **shaping) as served:
        result = await served.answer(asked(tool))
    assert {event.ByteSize() for event in result.events if event.HasField("delta")} == {size}
    parts = parts_of(result)
    assert (parts[-1].tool_call.name == tool) is ("<tool_call>" in text)
