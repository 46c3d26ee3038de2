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


@pytest.fixture
def model(gateway: str) -> Any:
    return chat_model(gateway)


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


def test_whole_streamed_and_in_a_batch_are_the_same(model: Any) -> None:
    whole = model.invoke(QUESTION)
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream(QUESTION))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1] == whole.usage_metadata
    batch = model.batch([QUESTION] * 8)
    assert len({answer.content for answer in batch}) == 1


def test_tools(gateway_with_tools: str) -> None:
    """A call, its result, and an answer, whole and streamed."""
    tool = {"type": "function", "function": {"name": "track", "description": "", "parameters": ORDER}}
    model = chat_model(gateway_with_tools).bind_tools([tool], tool_choice="track", parallel_tool_calls=False)
    answer = model.invoke(QUESTION)
    [call] = answer.tool_calls
    assert (call["name"], {*call["args"]}) == ("track", {"late", "days"})
    chunks = list(model.stream(QUESTION))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [(call["name"], call["args"])]
    result = {"role": "tool", "content": "in Bremen", "tool_call_id": call["id"]}
    assert chat_model(gateway_with_tools).invoke([("user", QUESTION), answer, result]).content
