"""One gateway in front of the services of several models."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from draftwood_benchmarks.harness.servers import running_gateway, running_server
from draftwood_client import Client
from draftwood_service.auth.auth_file import new_key
from tests.service.fakes import FakeEngine, FakeModel, Served, serving
from tests.service.gateway.listening import Listening, get, listening, post

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SMALL: dict[str, Any] = {"prompt": "x", "max_tokens": 2}


@asynccontextmanager
async def two(**of_second: Any) -> AsyncIterator[tuple[Listening, Served, Served]]:
    """A gateway for `first` and `second`, and their services, which call both of their models `fake`."""
    async with (
        serving(model=FakeModel(max_context=100)) as first,
        serving(FakeEngine(), FakeModel(max_context=200), **of_second) as second,
        listening({"first": first.server.address, "org/second": second.server.address}) as gateway,
    ):
        yield gateway, first, second


@pytest.fixture
def away() -> Iterator[str]:
    """An address on which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def with_key(sent: bytes, key: str) -> bytes:
    return sent.replace(b"host: x", f"host: x\r\nauthorization: Bearer {key}".encode())


@pytest.mark.parametrize("fields", [{"messages": MESSAGES}, {"prompt": ["x", "y"]}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_to_the_service_of_its_model(fields: dict[str, Any], stream: bool) -> None:
    path, prompts = (CHAT, 1) if "messages" in fields else (COMPLETIONS, 2)
    async with two() as (gateway, first, second):
        for model, expected in (("org/second", (0, 1)), ("first", (1, 1)), (None, (2, 1)), ("", (3, 1))):
            status, answer = await gateway.posted(path, {"max_tokens": 2, "stream": stream, "model": model, **fields})
            assert status == 200, answer
            names = {answer["model"]} if not stream else set(re.findall(r'"model":"([^"]+)"', answer))
            assert names == {model or "first"}
            assert (len(first.engine.added), len(second.engine.added)) == tuple(prompts * one for one in expected)


async def test_an_unknown_model_is_not_found_and_the_others_are_named() -> None:
    async with two() as (gateway, first, second):
        for model, stream in (("fake", False), ("fake", True), ("x" * 9999, False)):
            status, answer = await gateway.posted(COMPLETIONS, {**SMALL, "model": model, "stream": stream})
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
            assert answer["error"]["message"].startswith(f"model: there is no model '{model[:200]}'")
            assert answer["error"]["message"].endswith("; there are first, org/second")
        status, answer = await gateway.answered(get("/v1/models/fake"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        status, answer = await gateway.posted(COMPLETIONS, {**SMALL, "model": ["first"]})
        assert (status, answer["error"]["message"]) == (400, "model: must be a text")
        assert first.engine.added == second.engine.added == []


async def test_models_are_those_of_all_services_as_they_say_themselves() -> None:
    async with two() as (gateway, _, _):
        status, answer = await gateway.answered(get("/v1/models"))
        assert status == 200
        assert [(one["id"], one["max_model_len"]) for one in answer["data"]] == [("first", 100), ("org/second", 200)]
        assert await gateway.answered(get("/v1/models/org/second")) == (200, answer["data"][1])


async def test_a_service_that_is_away_is_so_for_its_own_requests_alone(away: str) -> None:
    async with serving() as first, listening({"away": away, "first": first.server.address}) as gateway:
        status, answer = await gateway.posted(CHAT, {"messages": MESSAGES, "model": "away"})
        message = "model 'away': the service cannot be reached; try again later"
        assert (status, answer["error"]["message"]) == (503, message)
        assert (await gateway.answered(get("/v1/models/away")))[0] == 503
        large = {**SMALL, "model": "first", "prompt": "x" * 100, "metadata": {"a": "x" * 70_000}}
        assert (await gateway.posted(COMPLETIONS, large))[0] == 200
        status, answer = await gateway.answered(get("/v1/models"))
        assert (status, [one["id"] for one in answer["data"]]) == (200, ["first"])
        expected = {"away": "the service cannot be reached; try again later", "first": "ok"}
        assert await gateway.answered(get("/health")) == (200, {"status": "ok", "models": expected})
        await first.server._set_serving(False)
        status, answer = await gateway.answered(get("/health"))
        assert (status, answer["status"]) == (503, "unavailable")
        assert answer["models"]["first"].startswith("the service does not serve requests now")
        assert away not in str(answer)
        _, metrics = await gateway.answered(get("/metrics"))
    counted = re.findall(r'draftwood_gateway_requests_total\{model="(\w*)",path="(\S+)",status="(\d+)"\} 1\.0', metrics)
    assert set(counted) == {("away", CHAT, "503"), ("first", COMPLETIONS, "200")}
    assert 'draftwood_gateway_request_duration_seconds_count{model="first",path="/v1/completions"} 1.0' in metrics


async def test_no_model_is_listed_if_no_service_answers(away: str) -> None:
    async with listening({"first": away, "second": away}) as gateway:
        for sent in (get("/v1/models"), get("/health"), post(COMPLETIONS, {**SMALL, "metadata": {"a": "x" * 70_000}})):
            assert (await gateway.answered(sent))[0] == 503


async def test_each_service_judges_the_key(tmp_path: Path) -> None:
    entry = new_key()
    listed = {"id": entry.id, "tenant": "acme", "sha256": entry.sha256, "created": "2026-11-22T12:00:00Z"}
    file = tmp_path / "auth.yaml"
    file.write_text(json.dumps({"keys": [listed]}))
    async with two(auth_file=file) as (gateway, _, second):
        fields = {**SMALL, "model": "org/second", "metadata": {"a": "x" * 70_000}}
        assert (await gateway.answered(with_key(post(COMPLETIONS, fields), entry.key)))[0] == 200
        assert [one["id"] for one in (await gateway.answered(get("/v1/models")))[1]["data"]] == ["first"]
        answer = await gateway.answered(with_key(get("/v1/models/org/second"), entry.key))
        assert (answer[0], answer[1]["id"]) == (200, "org/second")
        sent = post(COMPLETIONS, fields)
        for refused in (sent, with_key(sent, "dw_none"), get("/v1/models/org/second")):
            assert (await gateway.answered(refused))[0] == 401
        assert len(second.engine.added) == 1


@pytest.mark.system
@pytest.mark.timeout(300)
def test_two_models_answer_as_they_do_without_the_gateway(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from draftwood_model_runner.loading.checkpoint import BUNDLED_MODEL
    from tests.model_runner.families import tiny

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    tiny("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    small = ("--threads", "1", "--runner", "torch", "--model", str(tmp_path))
    with running_server("--threads", "1") as demo, running_server(*small) as tiny_one:
        targets = {"demo": demo, "tiny": tiny_one}
        with running_gateway(targets) as gateway:
            texts = {}
            for model, target in targets.items():
                body = {"model": model, "prompt": "Where is my parcel?", "max_tokens": 16, "temperature": 0}
                url = f"http://{gateway.target}{COMPLETIONS}"
                with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answered:
                    texts[model] = json.load(answered)["choices"][0]["text"]
                with Client(target) as client:
                    assert texts[model] == client.complete("Where is my parcel?", max_tokens=16, temperature=0).text
            assert texts["demo"] != texts["tiny"]
