"""The Shepherd gateway (`smg`) in front of two services: what docs/smg.md promises of it, and what it does not do.

It is in an environment of its own, which `make test-system` installs.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import psutil
import pytest

from draftwood_benchmarks.harness.servers import ServerProcess, server_process
from draftwood_client import Client
from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
from tests.engines.servers import until
from tests.model_runner.loading.templates import HERMES
from tests.service import fakes
from tests.service.fakes import ByteTokenizer, FakeModel, serving
from tests.service.rpc.test_vllm_engine import keys_of

SMG = Path(__file__).parents[2] / ".venv-peers" / "smg" / "bin" / "smg"
pytestmark = [
    pytest.mark.skipif(not SMG.exists(), reason="smg is not installed: make .venv-peers/smg/.installed"),
    pytest.mark.timeout(900),
]

MODEL = "tools"
THINKING = HERMES.rstrip() + (
    "{%- if add_generation_prompt and reasoning_effort is defined and reasoning_effort %}"
    "{{- 'Effort: ' + reasoning_effort + '\\n' }}{%- endif %}"
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}"
)
ASKED: list[Any] = [{"role": "user", "content": "Where is my parcel?"}]
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["number"],
    "additionalProperties": False,
}
FUNCTION = {"name": "find_parcel", "description": "Finds.", "parameters": NUMBER}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
NAMED: Any = {"type": "function", "function": {"name": "find_parcel"}}


def posted(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def is_ready(url: str) -> bool:
    """It knows the model, and has its tokenizer."""
    try:
        return bool(posted(f"{url}/v1/chat/completions", {"model": MODEL, "messages": ASKED, "max_tokens": 1}))
    except OSError:
        return False


@contextmanager
def shepherd(log: Path, *flags: str, workers: list[str], ready: Callable[[str], bool] = is_ready) -> Iterator[str]:
    """The URL of a gateway in front of workers, given as "host:port"."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics = (free.getsockname()[1] for free in (one, other))  # free at once, so never the same
    command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--worker-startup-check-interval", "1", "--policy", "round_robin", "--backend", "vllm"]
    command += ["--worker-urls", *(f"grpc://{worker}" for worker in workers), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, cwd=log.parent, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    try:
        url = f"http://127.0.0.1:{port}"
        try:
            until(lambda: process.poll() is not None or ready(url), 200)
            assert process.poll() is None
        except AssertionError:
            raise AssertionError(log.read_text(errors="replace")[-3000:]) from None
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with a template that has tools and thoughts, though it was not trained on them."""
    folder = tmp_path_factory.mktemp("model") / MODEL
    shutil.copytree(BUNDLED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def replicas(folder: Path) -> Iterator[list[ServerProcess]]:
    flags = "--threads", "1", "--model", str(folder), "--log-level", "info", "--log-format", "json"
    with server_process(*flags) as first, server_process(*flags) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def url(replicas: list[ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    workers = [replica.target for replica in replicas]
    log = tmp_path_factory.mktemp("smg") / "log"
    with shepherd(log, "--tool-call-parser", "qwen", workers=workers) as started:
        yield started


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASKED, **{"max_tokens": 40, **fields})


def requests_of(replicas: list[ServerProcess]) -> list[dict[str, Any]]:
    """Lines of the servers' logs of requests."""
    lines = [line for replica in replicas for line in replica.log.read_text().splitlines(keepends=True)]
    whole = [json.loads(line) for line in lines if line.endswith("\n") and '"request"' in line]
    return [read for read in whole if read["event"] == "request"]


def test_the_answer_is_that_of_the_service(client: openai.OpenAI, replicas: list[ServerProcess]) -> None:
    """So its tokenizer and template, which it has from the service, make the same prompt."""
    with Client(replicas[0].target) as own:
        expected = own.chat("Where is my parcel?", max_tokens=40)
    answer = chat(client)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 40
    chunks = [*chat(client, stream=True, stream_options={"include_usage": True})]
    written = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(written) == expected.text
    assert sum(map(bool, written)) > 1
    assert chunks[-1].usage.completion_tokens == 40
    # What each replica learned of the first answers.
    until(lambda: chat(client).usage.completion_tokens_details.accepted_prediction_tokens > 0)


def test_stops_samples_and_logprobs(client: openai.OpenAI) -> None:
    text = chat(client).choices[0].message.content
    word = text.split()[4]
    answer = chat(client, stop=[word])
    assert answer.choices[0].message.content == text[: text.index(word)]
    assert answer.choices[0].finish_reason == "stop"
    drawn = chat(client, n=2, temperature=0.9, seed=5, max_tokens=8)
    again = chat(client, n=2, temperature=0.9, seed=5, max_tokens=8)
    first, second = ([choice.message.content for choice in answer.choices] for answer in (drawn, again))
    assert first == second
    assert first[0] != first[1]
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=3)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob) for entry in entries)
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2]


def test_formats(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": NUMBER}}
    answer = chat(client, response_format=form)
    assert 10 <= json.loads(answer.choices[0].message.content)["number"] <= 99
    answer = chat(client, extra_body={"regex": "yes|no"})
    assert answer.choices[0].message.content in ("yes", "no")
    refused: list[tuple[str, dict[str, Any]]] = [
        (r"sampling_params\.regex", {"extra_body": {"regex": "("}}),
        (r"sampling_params\.grammar: is EBNF", {"extra_body": {"ebnf": 'root ::= "a"'}}),
        (r"sampling_params\.max_tokens.*maximum context length", {"max_tokens": 100_000}),
    ]
    for message, options in refused:
        with pytest.raises(openai.BadRequestError, match=message):
            chat(client, **options)


def test_tools(client: openai.OpenAI) -> None:
    [call] = chat(client, tools=TOOLS, tool_choice=NAMED).choices[0].message.tool_calls
    assert call.function.name == "find_parcel"
    assert 10 <= json.loads(call.function.arguments)["number"] <= 99
    pieces = [
        piece
        for chunk in chat(client, tools=TOOLS, tool_choice=NAMED, stream=True)
        for piece in chunk.choices[0].delta.tool_calls or ()
    ]
    assert [piece.function.name for piece in pieces if piece.function.name] == ["find_parcel"]
    arguments = [piece.function.arguments for piece in pieces if piece.function.arguments]
    assert len(arguments) > 1
    assert json.loads("".join(arguments))["number"]
    written = '<tool_call>\\n\\{"name": "find_parcel", "arguments": \\{"number": 11\\}\\}\\n</tool_call>'
    answer = chat(client, tools=TOOLS, max_tokens=80, extra_body={"regex": written}).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert json.loads(answer.message.tool_calls[0].function.arguments) == {"number": 11}


def test_responses(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Where is my parcel?", "temperature": 0}
    expected = chat(client).choices[0].message.content
    response = client.responses.create(**asked, max_output_tokens=40)
    assert response.output_text == expected
    events = [*client.responses.create(**asked, max_output_tokens=40, stream=True)]
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    written = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert written == expected
    assert events[-1].type == "response.incomplete"  # it ended at max_output_tokens
    tool: Any = {"type": "function", "strict": True, **FUNCTION}
    choice: Any = {"type": "function", "name": "find_parcel"}
    response = client.responses.create(**asked, max_output_tokens=60, tools=[tool], tool_choice=choice)
    called: Any = response.output[0]
    assert (called.type, called.name) == ("function_call", "find_parcel")
    assert json.loads(called.arguments)["number"]
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": NUMBER}}
    assert json.loads(client.responses.create(**asked, max_output_tokens=60, text=form).output_text)["number"]
    with pytest.raises(openai.BadRequestError, match="'resp_nobody' not found"):
        client.responses.create(**asked, previous_response_id="resp_nobody")


def test_messages_of_anthropic(url: str, client: openai.OpenAI) -> None:
    read = posted(f"{url}/v1/messages", {"model": MODEL, "messages": ASKED, "max_tokens": 40})
    assert read["content"] == [{"type": "text", "text": chat(client).choices[0].message.content}]
    assert read["stop_reason"] == "max_tokens"


def test_what_is_not_text_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="Embed is not served"):
        client.embeddings.create(model=MODEL, input="x")
    image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError, match="image input is not supported"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [image]}])


def test_reasoning_and_options_of_the_template(replicas: list[ServerProcess], tmp_path: Path) -> None:
    workers = [replicas[0].target]
    with shepherd(tmp_path / "log", "--reasoning-parser", "qwen3", workers=workers) as started:
        client = openai.OpenAI(base_url=f"{started}/v1", api_key="unused")
        options = {"regex": "so it is</think>yes", "chat_template_kwargs": {"enable_thinking": True}}
        message = chat(client, extra_body=options).choices[0].message
        assert (message.reasoning_content, message.content) == ("so it is", "yes")
        plain, low = (chat(client, max_tokens=1, **more) for more in ({}, {"reasoning_effort": "low"}))
        assert low.usage.prompt_tokens > plain.usage.prompt_tokens


def test_a_stream_that_is_closed_ends_its_request(client: openai.OpenAI, replicas: list[ServerProcess]) -> None:
    stream = chat(client, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    stream.close()

    def ended() -> list[dict[str, Any]]:
        return [line for line in requests_of(replicas) if line["request_id"].startswith(chunk.id)]

    until(lambda: bool(ended()))
    [line] = ended()
    assert line["outcome"] == "cancelled"
    assert line["completion_tokens"] < 1500


def test_two_replicas_and_one_that_ends(replicas: list[ServerProcess], folder: Path, tmp_path: Path) -> None:
    with (
        server_process("--threads", "1", "--model", str(folder)) as third,
        shepherd(tmp_path / "log", workers=[replicas[0].target, third.target]) as started,
        openai.OpenAI(base_url=f"{started}/v1", api_key="unused", max_retries=0) as client,
    ):
        asked: set[str] = set()

        def ask() -> None:
            raw = client.chat.completions.with_raw_response
            asked.add(raw.create(model=MODEL, messages=ASKED, max_tokens=4).headers["x-smg-routed-worker-id"])

        def both_asked() -> bool:
            ask()
            return asked == {f"grpc://{replicas[0].target}", f"grpc://{third.target}"}

        until(both_asked)
        ending = psutil.Process(third.pid)
        ending.terminate()
        while ending.is_running() and ending.status() != psutil.STATUS_ZOMBIE:
            ask()
        for _ in range(10):
            ask()


async def test_it_sends_no_credential_and_no_tenant(tmp_path: Path) -> None:
    """So it cannot be in front of a service with keys. Once this fails, docs/smg.md is to be written anew."""
    (tmp_path / "auth.yaml").write_text("keys: []\n")
    async with serving(auth_file=tmp_path / "auth.yaml") as served:
        flags = "--api-key", "dw_x", "--tenant-api-key", "acme:dw_y"
        with shepherd(tmp_path / "log", *flags, workers=[served.server.address], ready=lambda url: True):
            await fakes.until(lambda: served.server.gate.unauthenticated.total > 2)


class BundledTokenizer(ByteTokenizer):
    """Gateways tokenize as with the bundled model."""

    def files(self) -> dict[str, bytes]:
        return {
            path.name: path.read_bytes() for path in Path(BUNDLED_MODEL).iterdir() if path.suffix in (".json", ".jinja")
        }


async def test_one_for_each_tenant_behind_a_proxy_that_adds_its_key(tmp_path: Path) -> None:
    keys = keys_of(tmp_path / "auth.yaml", "acme", "beta")
    model = FakeModel(name=MODEL, vocab_size=4096, tokenizer=BundledTokenizer())
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(model=model, auth_file=tmp_path / "auth.yaml"))
        for tenant, key in zip(("acme", "beta"), keys, strict=True):
            proxy = await stack.enter_async_context(adding(key, served.server.address))
            gateway = shepherd(tmp_path / tenant, workers=[proxy])
            url = await asyncio.to_thread(gateway.__enter__)
            stack.callback(gateway.__exit__, None, None, None)
            served.engine.added.clear()
            assert await asyncio.to_thread(is_ready, url)
            assert [sequence.request.tenant for sequence in served.engine.added] == [tenant]


@asynccontextmanager
async def adding(key: str, target: str) -> AsyncIterator[str]:
    """The address of a proxy in front of a service that sends a key with each call, as Envoy's
    `request_headers_to_add` does."""

    class Passing(grpc.GenericRpcHandler):
        def service(self, details: Any) -> Any:
            method: Any = channel.stream_stream(details.method)

            async def call(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
                try:
                    async for answer in method(messages, metadata=(("authorization", f"Bearer {key}"),)):
                        yield answer
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details())

            return grpc.stream_stream_rpc_method_handler(call)

    async with grpc.aio.insecure_channel(target) as channel:
        server = grpc.aio.server(handlers=[Passing()])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(1.0)
