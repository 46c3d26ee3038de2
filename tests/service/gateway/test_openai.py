"""The official packages, and LangChain's, against the gateway in front of a real service."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

MODEL = "draftwood-demo"
TEXT = "Where is my parcel?"
QUESTION: Any = [{"role": "user", "content": TEXT}]
LATE = {
    "type": "object",
    "properties": {"late": {"type": "boolean"}},
    "required": ["late"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0}
NODE = shutil.which("node")
MODULES = Path(__file__).parents[3] / "build" / "node" / "node_modules"


@pytest.fixture
async def client(gateway: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway}/v1", api_key="unused", max_retries=0) as made:
        yield made


async def test_chat_whole_and_streamed_are_the_same(client: AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(**GREEDY)
    assert whole.object == "chat.completion"
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    drafts = whole.model_extra["metrics"]["speculative_decoding"]
    assert drafts["mean_acceptance_length"] >= 1.0
    options: dict[str, Any] = {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    chunks = [chunk async for chunk in await client.chat.completions.create(**options)]
    *content, ended, last = chunks
    assert content[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in content) == whole.choices[0].message.content
    assert all(one.choices[0].finish_reason is None for one in content)
    assert (ended.choices[0].delta.content, ended.choices[0].finish_reason) == (None, whole.choices[0].finish_reason)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert len({one.id for one in chunks}) == 1


async def test_completions_with_several_prompts_samples_and_token_ids(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0.9, "seed": -7, "n": 2}
    texts = await client.completions.create(prompt=["Your order", "The parcel"], **options)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    alone = await client.completions.create(prompt="The parcel", **options)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in texts.choices[2:]]
    ids = await client.completions.create(prompt=[5, 6, 7], model=MODEL, max_tokens=4)
    assert ids.usage is not None
    assert (ids.usage.prompt_tokens, len(ids.choices)) == (3, 1)
    streamed: dict[int, str] = {}
    async for chunk in await client.completions.create(prompt=["Your order", "The parcel"], stream=True, **options):
        streamed[chunk.choices[0].index] = streamed.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert [streamed[index] for index in range(4)] == [choice.text for choice in texts.choices]


async def test_draft_trees_have_the_tokens_of_their_steps(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 60, "stream": True}
    own = {"draft_trees": True, "token_details": True, "strategy": "trie", "tenant": "trees"}
    accepted = 0
    for _ in range(10):  # until the memory knows the answer
        async for chunk in await client.chat.completions.create(**options, extra_body={"draftwood": own}):
            details = (chunk.model_extra or {}).get("draftwood", {"tokens": [], "trees": []})
            for tree in details["trees"]:
                assert len(tree["tokens"]) == len(tree["parents"])
                assert [tree["parents"][node] for node in tree["accepted"]] == [-1, *tree["accepted"]][:-1]
            of_chunk = sum(len(tree["accepted"]) for tree in details["trees"])
            assert of_chunk == [token["drafted"] for token in details["tokens"]].count(True)
            accepted += of_chunk
        if accepted:
            break
    assert accepted > 0
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{**options, "stream": False}, extra_body={"draftwood": own})
    assert refused.value.param == "draftwood.draft_trees"


async def test_logprobs(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    given: dict[str, Any] = {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, **options}
    chat = (await client.chat.completions.create(**given)).choices[0]
    assert chat.logprobs is not None
    assert chat.logprobs.content is not None
    assert "".join(one.token for one in chat.logprobs.content) == chat.message.content
    for one in chat.logprobs.content:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].logprob == pytest.approx(one.logprob)
        assert (one.top_logprobs[0].token, one.top_logprobs[0].bytes) == (one.token, one.bytes)
        assert one.bytes == [*one.token.encode()]
    plain = (await client.completions.create(prompt="Your order", logprobs=2, **options)).choices[0]
    assert plain.logprobs is not None
    assert "".join(plain.logprobs.tokens or ()) == plain.text


async def test_json_schema(client: AsyncOpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "parcel", "schema": LATE}}
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=64, response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content or "")["late"], bool)


async def test_drafting_can_be_switched_per_request_and_tokens_say_how_they_came(client: AsyncOpenAI) -> None:
    answers = [
        await client.chat.completions.create(**GREEDY, extra_body={"draftwood": {"token_details": True, **own}})
        for own in ({}, {}, {"drafting": False})
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    drafted = [[one["drafted"] for one in answer.choices[0].model_extra["draftwood"]["tokens"]] for answer in answers]
    assert any(drafted[1])
    assert not any(drafted[2])


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="gpt-9", messages=QUESTION)


async def test_an_error_in_the_middle_of_a_stream_is_an_event(client: AsyncOpenAI) -> None:
    options: dict[str, Any] = {**GREEDY, "max_tokens": 2000, "stream": True, "extra_body": {"ignore_eos": True}}
    late = {"x-draftwood-timeout": "0.3"}
    with pytest.raises(openai.APIError, match=r"within 0\.3 s"):
        async for _ in await client.chat.completions.create(**options, extra_headers=late):
            pass


@pytest.mark.system
@pytest.mark.skipif(
    NODE is None or not (MODULES / "openai").is_dir(),
    reason="node or its packages are missing; `make build/node/.installed` installs them where npm is",
)
def test_the_official_package_for_javascript(gateway: str, gateway_with_tools: str) -> None:
    assert NODE is not None
    command = [NODE, str(Path(__file__).parent / "openai_conformance.js"), gateway, gateway_with_tools]
    environment = {"PATH": os.environ["PATH"], "NODE_PATH": str(MODULES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def langchain(gateway: str) -> Any:
    """LangChain's client."""
    made = pytest.importorskip("langchain_openai").ChatOpenAI
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 80, "stream_usage": True}
    return made(base_url=f"{gateway}/v1", api_key="unused", max_retries=0, **options)


@pytest.mark.system
def test_answers_to_langchain_whole_streamed_and_in_a_batch_are_the_same(gateway: str) -> None:
    model = langchain(gateway)
    whole = model.invoke(TEXT)
    chunks = list(model.stream(TEXT))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata][-1] == whole.usage_metadata
    assert {answer.content for answer in model.batch([TEXT] * 8)} == {whole.content}


@pytest.mark.system
def test_langchain_gets_a_call_and_sends_its_result(gateway_with_tools: str) -> None:
    tool = {"type": "function", "function": {"name": "track", "description": "", "parameters": LATE}}
    model = langchain(gateway_with_tools).bind_tools([tool], tool_choice="track", parallel_tool_calls=False)
    answer = model.invoke(TEXT)
    [call] = answer.tool_calls
    assert (call["name"], isinstance(call["args"]["late"], bool)) == ("track", True)
    first, *more = model.stream(TEXT)
    [streamed] = sum(more, first).tool_calls
    assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])
    result = {"role": "tool", "content": "in Bremen", "tool_call_id": call["id"]}
    assert langchain(gateway_with_tools).invoke([("user", TEXT), answer, result]).content
