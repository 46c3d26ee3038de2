"""Clients in Python against a gateway: `python clients.py URL MODEL`, in the environment of requirements.txt.

Prints a JSON object for each case. Imports nothing of this repository, which is not there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, Literal

URL, MODEL = f"{sys.argv[1]}/v1", sys.argv[2]
KEY: dict[str, Any] = {"base_url": URL, "api_key": "unused"}
QUESTION = "Where is my parcel?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["number"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "find_parcel", "description": "Finds.", "parameters": NUMBER}
TOOL: Any = {"type": "function", "function": FUNCTION}
NAMED: Any = {"type": "function", "function": {"name": "find_parcel"}}
CASES: list[tuple[str, Callable[[], None]]] = []


def case(client: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a case of a client; it fails if it raises."""

    def add(run: Callable[[], None]) -> Callable[[], None]:
        CASES.append((client, run))
        return run

    return add


def require_number(arguments: str) -> None:
    assert 10 <= json.loads(arguments)["number"] <= 99, arguments


def error_of(kind: type[Exception], run: Callable[[], object]) -> Any:
    try:
        run()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def openai() -> Any:
    from openai import OpenAI

    return OpenAI(**KEY, max_retries=0)


def chat(**fields: Any) -> Any:
    return openai().chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 20, **fields})


@case("openai")
def chat_whole_and_streamed() -> None:
    chunks = [*chat(stream=True, stream_options={"include_usage": True})]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat().choices[0].message.content
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens >= 0


@case("openai")
def chat_tool_in_pieces() -> None:
    chunks = [*chat(max_tokens=100, tools=[TOOL], tool_choice=NAMED, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 1
    require_number("".join(piece.function.arguments for piece in pieces))


@case("openai")
def chat_parse() -> None:
    from pydantic import BaseModel, Field

    class Parcel(BaseModel):
        number: int = Field(ge=10, le=99)

    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 100, "response_format": Parcel}
    assert 10 <= openai().chat.completions.parse(**fields).choices[0].message.parsed.number <= 99


@case("openai")
def template_kwargs() -> None:
    plain, thinking = (
        chat(extra_body={"chat_template_kwargs": {"enable_thinking": on}}).usage.prompt_tokens for on in (False, True)
    )
    assert thinking > plain
    assert chat(reasoning_effort="low").usage.prompt_tokens > plain


@case("openai")
def reasoning_content() -> None:
    message = chat(extra_body={"chat_template_kwargs": {"enable_thinking": True}}).choices[0].message
    assert message.reasoning_content


@case("openai")
def unknown_fields_are_named() -> None:
    raw = openai().chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=2, extra_body={"new_field": 1}
    )
    assert raw.headers["x-draftwood-ignored"] == "new_field"


@case("openai")
def embeddings_are_refused_by_name() -> None:
    from openai import NotFoundError

    error = error_of(NotFoundError, lambda: openai().embeddings.create(model=MODEL, input="x"))
    assert "embeddings" in str(error)


def respond(**fields: Any) -> Any:
    return openai().responses.create(**{"model": MODEL, "input": QUESTION, "max_output_tokens": 20, **fields})


@case("openai")
def responses_whole_and_streamed() -> None:
    with openai().responses.stream(model=MODEL, input=QUESTION, max_output_tokens=20) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == respond().output_text


@case("openai")
def responses_tool_and_its_result() -> None:
    tools = [{"type": "function", **FUNCTION}]
    named = {"type": "function", "name": "find_parcel"}
    answer = respond(tools=tools, tool_choice=named, max_output_tokens=100)
    [call] = answer.output
    require_number(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "in Bremen"}
    assert respond(input=[*MESSAGES, call.to_dict(), result], tools=tools).output


@case("openai")
def responses_format() -> None:
    form = {"type": "json_schema", "name": "parcel", "schema": NUMBER, "strict": True}
    require_number(respond(text={"format": form}, max_output_tokens=100).output_text)


@case("openai")
def previous_response_id_is_refused_by_name() -> None:
    from openai import BadRequestError

    error = error_of(BadRequestError, lambda: respond(previous_response_id="resp_1"))
    assert error.param == "previous_response_id"


def agent(responses: bool) -> None:
    """A tool, its result, and an answer."""
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    agents.set_default_openai_client(AsyncOpenAI(**KEY))
    agents.set_default_openai_api("responses" if responses else "chat_completions")
    found: list[int] = []

    def find_parcel(number: Literal[10, 11, 12]) -> str:
        """Finds."""
        found.append(number)
        return "in Bremen"

    settings = agents.ModelSettings(tool_choice="find_parcel", max_tokens=100, temperature=0)
    tools = [agents.function_tool(find_parcel)]
    made = agents.Agent(name="agent", model=MODEL, tools=tools, model_settings=settings)
    assert agents.Runner.run_sync(made, QUESTION, max_turns=3).final_output
    assert found[0] in (10, 11, 12)


@case("openai-agents")
def responses() -> None:
    agent(responses=True)


@case("openai-agents")
def chat_completions() -> None:
    agent(responses=False)


def langchain(**fields: Any) -> Any:
    from langchain_openai import ChatOpenAI

    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 100, "max_retries": 0}
    return ChatOpenAI(**KEY, **options, **fields)


def check_langchain(model: Any) -> None:
    whole = model.invoke(QUESTION)
    streamed: Any = None
    for chunk in model.stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    [call] = model.bind_tools([TOOL], tool_choice="find_parcel").invoke(QUESTION).tool_calls
    assert 10 <= call["args"]["number"] <= 99


@case("langchain-openai")
def chat_and_tools() -> None:
    check_langchain(langchain(stream_usage=True))


@case("langchain-openai")
def responses_and_tools() -> None:
    check_langchain(langchain(use_responses_api=True))


@case("litellm")
def completion() -> None:
    import litellm

    fields: Any = {"model": f"openai/{MODEL}", **KEY, "messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    chunks = [*litellm.completion(**fields, stream=True)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == litellm.completion(**fields).choices[0].message.content


@case("litellm")
def responses_of_litellm() -> None:
    import litellm

    fields: Any = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "unused", "max_output_tokens": 20}
    answer: Any = litellm.responses(**fields, input=QUESTION)
    assert answer.output[0].content[0].text


@case("anthropic")
def messages_and_tools() -> None:
    from anthropic import Anthropic

    client = Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
    fields: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20}
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
    whole: Any = client.messages.create(**fields).content
    assert text == whole[0].text
    word = text.split()[2]
    stopped = client.messages.create(**fields, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    tool: Any = {"name": "find_parcel", "input_schema": NUMBER}
    choice: Any = {"type": "tool", "name": "find_parcel"}
    [call] = client.messages.create(**{**fields, "max_tokens": 100}, tools=[tool], tool_choice=choice).content
    assert 10 <= call.input["number"] <= 99


for _client, _run in CASES:
    _why = ""
    try:
        _run()
    except BaseException as _error:  # a row, whatever it is
        _why = f"{type(_error).__name__}: {str(_error)[:300]}"
    print(json.dumps({"client": _client, "case": _run.__name__, "ok": not _why, "why": _why}), flush=True)
