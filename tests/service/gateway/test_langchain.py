"""LangChain's `ChatOpenAI` against the gateway."""

from __future__ import annotations

from typing import Any

import pytest

ChatOpenAI: Any = pytest.importorskip("langchain_openai").ChatOpenAI
QUESTION = "Where is my parcel?"
ORDER = {
    "title": "order",
    "type": "object",
    "properties": {"late": {"type": "boolean"}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["late", "days"],
    "additionalProperties": False,
}


def chat_model(gateway: str) -> Any:
    return ChatOpenAI(
        base_url=f"{gateway}/v1",
        api_key="unused",
        model="draftwood-demo",
        temperature=0,
        max_tokens=80,
        max_retries=0,
        stream_usage=True,
    )


def test_whole_streamed_and_in_a_batch_are_the_same(gateway: str) -> None:
    model = chat_model(gateway)
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1] == whole.usage_metadata
    assert {answer.content for answer in model.batch([QUESTION] * 8)} == {whole.content}


def test_tools(gateway_with_tools: str) -> None:
    """A call, its result, and an answer, whole and streamed."""
    tool = {"type": "function", "function": {"name": "track", "description": "", "parameters": ORDER}}
    model = chat_model(gateway_with_tools).bind_tools([tool], tool_choice="track", parallel_tool_calls=False)
    answer = model.invoke(QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], {*call["args"]}) == ("track", {"late", "days"})
    first, *more = model.stream(QUESTION)
    [streamed] = sum(more, first).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])
    result = {"role": "tool", "content": "in Bremen", "tool_call_id": call["id"]}
    assert chat_model(gateway_with_tools).invoke([("user", QUESTION), answer, result]).content
