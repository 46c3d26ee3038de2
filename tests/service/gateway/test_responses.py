"""Responses: the official package for Python against the gateway, in front of an engine that follows a script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.service.gateway.asked import PARAMETERS, Asked, asking

TRACK: Any = {"type": "function", "name": "track", "description": "to track", "parameters": PARAMETERS}


async def create(asked: Asked, **fields: Any) -> Any:
    return await asked.client.responses.create(**{"model": "fake", "input": "Hi", "max_output_tokens": 200, **fields})


def shown(items: Any) -> list[Any]:
    """Items without what each answer has of its own."""
    dropped = {"id", "call_id"}
    return [{name: value for name, value in item.to_dict().items() if name not in dropped} for item in items]


async def test_thoughts_text_and_calls_are_items_whole_and_streamed() -> None:
    async with asking() as asked:
        whole = await create(asked, tools=[TRACK])
        events = [event async for event in await create(asked, tools=[TRACK], stream=True)]
    assert (whole.status, whole.output_text, whole.error) == ("completed", "Sure.", None)
    thought, text, *calls = whole.output
    assert thought.content[0].text == "Hm."
    assert text.content[0].text == "Sure."
    assert [json.loads(call.arguments) for call in calls] == [{"order": 7}, {"order": 8}]
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert whole.tools[0].name == "track"

    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert (last.type, shown(last.response.output)) == ("response.completed", shown(whole.output))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shown(done) == shown(whole.output)
    for index, item in enumerate(done):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert (own[0].item.id, own[0].item.status) == (item.id, "in_progress")
        pieces = [event.delta for event in own if event.type.endswith(".delta")]
        assert "".join(pieces) == (item.arguments if item.type == "function_call" else item.content[0].text)
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(arguments) > 4  # as they are written


async def test_the_official_stream_helper_reads_the_events() -> None:
    async with asking("Sure.") as asked, asked.client.responses.stream(model="fake", input="Hi") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "Sure."


async def test_a_conversation_reaches_the_template_in_its_order() -> None:
    async with asking() as asked:
        answer = await create(asked, tools=[TRACK], instructions="Be brief.")
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": f"in {city}"}
            for item, city in zip(answer.output[2:], ("Bremen", "Kiel"), strict=True)
        ]
        user = {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}
        given = [user, *(item.to_dict() for item in answer.output), *results]
        await create(asked, tools=[TRACK], instructions="Be brief.", input=given)
    system, question, assistant, first, second = asked.tokenizer.messages
    assert (system, question) == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"})
    assert (assistant["reasoning_content"], assistant["content"]) == ("Hm.", "Sure.")
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"order": 7}, {"order": 8}]
    assert (first["content"], first["name"], second["content"]) == ("in Bremen", "track", "in Kiel")


async def test_an_answer_that_is_cut_is_incomplete() -> None:
    async with asking("Sure, at once.") as asked:
        whole = await create(asked, max_output_tokens=5)
        events = [event async for event in await create(asked, max_output_tokens=5, stream=True)]
    for response in (whole, events[-1].response):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [(item.status, item.content[0].text) for item in response.output] == [("incomplete", "Sure,")]
    assert events[-1].type == "response.incomplete"


async def test_an_empty_answer_has_an_item() -> None:
    async with asking("<think>") as asked:
        whole = await create(asked)
        *_, last = [event async for event in await create(asked, stream=True)]
    assert len(whole.output) == len(last.response.output) == 1


async def test_a_stream_that_fails_ends_with_its_error() -> None:
    async with asking() as asked:
        asked.engine.sequence_error = RuntimeError("broken")
        *_, error, failed = [event async for event in await create(asked, stream=True)]
    assert (error.type, failed.type, failed.response.status) == ("error", "response.failed", "failed")
    assert failed.response.error.message == error.message


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "answers are not stored"),
        ({"conversation": "c"}, "conversation", "conversations are not stored"),
        ({"background": True}, "background", "is not served"),
        ({"truncation": "auto"}, "truncation", "must be disabled"),
        ({"include": ["web_search_call.results"]}, "include[0]", "must be reasoning.encrypted_content"),
        ({"input": []}, "input", "must be a text, or a list"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type", "must be input_text"),  # noqa: E501
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference is not served"),
        ({"input": [{"role": "user", "content": "x"}, {"role": "x" * 99, "content": "x"}]}, "input[1].role", "must have 1 to"),  # noqa: E501
        ({"input": [{"type": "function_call", "name": "f", "arguments": "[]", "call_id": "c"}]}, "input[0].arguments", "must be a JSON object"),  # noqa: E501
        ({"input": "x" * 70_000}, "input", "must have at most"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function: web_search is not served"),
        ({"tools": [{**TRACK, "parameters": 3}]}, "tools[0].parameters", "must be a JSON schema"),
        ({"tools": [TRACK], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "must be one of track"),  # noqa: E501
        ({"max_output_tokens": 0}, "max_output_tokens", "0 is not allowed"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "must be text, json_object"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "must be an object"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort", "must be a text"),
        ({"extra_body": {"draftwood": {"token_details": True}}}, "draftwood.token_details", "chat/completions alone"),
    ],
)  # fmt: skip
async def test_what_is_not_served_is_refused_by_its_name(fields: dict[str, Any], param: str, said: str) -> None:
    async with asking() as asked:
        with pytest.raises(openai.BadRequestError) as refused:
            await create(asked, **fields)
    error: Any = refused.value.body
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ")
    assert said in error["message"]


async def test_a_field_that_nobody_knows_is_named() -> None:
    known: Any = {"metadata": {}, "store": False, "include": ["reasoning.encrypted_content"], "truncation": "disabled"}
    async with asking("Sure.") as asked:
        for fields, ignored in (({"extra_body": {"x": 1}}, "x"), (known, None)):
            raw = await asked.client.responses.with_raw_response.create(model="fake", input="Hi", **fields)
            assert raw.headers.get("x-draftwood-ignored") == ignored
