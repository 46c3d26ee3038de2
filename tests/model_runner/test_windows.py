"""Models with sliding windows: pages behind the window are given up, and what is written stays that of `generate`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.model import BUNDLED_MODEL, LoadedModel, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.page_table import AttentionWindow
from tests.model_runner.attention_models import WINDOW, tiny_attention
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import make_sequence
from tests.model_runner.test_hybrids import assert_lossless

VOCAB, LONG, CHUNK, DRAFT = 128, 900, 64, 16
NEEDED = AttentionWindow(WINDOW, CHUNK).needs(DRAFT)
FAMILIES = ("windows", "windows-in-some-layers")


def served(
    family: str = "windows", exact: bool = False, dtype: torch.dtype = torch.float32, runner: str = "torch"
) -> LoadedModel:
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(BUNDLED_MODEL))
    module = tiny_attention(family, VOCAB, LONG).to(dtype)
    return adopt(module, tokenizer, name=family, runner=runner, exact=exact, defaults="greedy")


def prompt_of(size: int) -> Any:
    return np.random.default_rng(size).integers(0, VOCAB, size, np.int32)


@torch.inference_mode()
def generated(prompt: Any, new: int) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    found = tiny_attention("windows", VOCAB, LONG).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = found[0, prompt.size :].tolist()
    return tokens


def engine_of(model: LoadedModel, **options: Any) -> Engine:
    config = EngineConfig(max_draft_nodes=DRAFT, adaptive_budget=False, prefill_chunk=CHUNK, **options)
    return Engine(model, config)


def run(engine: Engine, prompt: Any, answer: list[int], nodes: int = DRAFT) -> list[int]:
    """What is written; looks at the pages after each step."""
    oracle = OracleStrategy({tuple(prompt.tolist()): answer}, VOCAB, 0)
    sequence = make_sequence("r", prompt, StopParams(len(answer)), strategy=oracle, max_draft_nodes=nodes)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.check()
        assert engine.kv_use.held * engine._pool.page_size <= NEEDED
    return sequence.output


@pytest.mark.parametrize(
    ("by", "size", "new", "prefix_cache"),
    [
        ("torch", 5, 400, False),
        ("torch", 700, 150, True),
        ("openvino", 5, 400, True),
        ("openvino", 700, 150, False),
    ],
)
def test_a_long_sequence_needs_memory_for_its_window(by: str, size: int, new: int, prefix_cache: bool) -> None:
    torch.set_num_threads(1)
    prompt = prompt_of(size)
    answer = generated(prompt, new)
    model = served(runner=by)
    engine = engine_of(model, kv_cache_tokens=NEEDED, prefix_cache=prefix_cache)
    for _ in range(2):
        assert run(engine, prompt, answer) == answer
        assert engine.kv_use.held == 0
    with pytest.raises(InvalidValueError, match=f"needs {NEEDED}"):
        engine_of(model, kv_cache_tokens=NEEDED - 1)


@pytest.mark.parametrize("by", ["torch", "openvino"])
def test_a_cached_prefix_behind_the_window_is_found(by: str) -> None:
    torch.set_num_threads(1)
    prompt = prompt_of(400)
    answer = generated(prompt, 100)
    engine = engine_of(served(runner=by), kv_cache_tokens=LONG)
    assert run(engine, prompt, answer) == answer
    longer = np.concatenate([prompt, np.array(answer, np.int32), prompt_of(9)])
    sequence = make_sequence("again", longer, StopParams(20), max_draft_nodes=0)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.check()
    assert sequence.stats.cached_prompt_tokens == (496 if by == "torch" else 480)
    assert sequence.output == generated(longer, 20)


def test_exact_mode_gives_up_pages_and_keeps_its_bits() -> None:
    torch.set_num_threads(1)
    model = served(exact=True, dtype=torch.bfloat16)
    assert model.exact
    assert model.factory.window == WINDOW + 127
    prompt, written = prompt_of(300), list[list[int]]()
    for nodes, capacity in ((0, 2 * LONG), (DRAFT, model.factory.window + CHUNK + 128 + DRAFT)):
        engine = engine_of(model, kv_cache_tokens=capacity)
        sequence = make_sequence(
            "r",
            prompt,
            StopParams(300),
            strategy=OracleStrategy({tuple(prompt.tolist()): written[0]}, VOCAB, 0) if written else None,
            max_draft_nodes=nodes,
        )
        engine.add(sequence)
        while engine.has_work:
            engine.step()
            engine.check()
        written.append(sequence.output)
    assert written[0] == written[1]
    assert sequence.stats.accepted_tokens > 100


def test_a_model_with_one_layer_without_a_window_keeps_all_pages() -> None:
    assert served("windows-in-some-layers").factory.window is None
    assert served("windows").factory.window == WINDOW


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_few_requests_of_every_kind(kind: str) -> None:
    assert_lossless(kind, range(4))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", FAMILIES)
def test_two_hundred_random_requests(kind: str) -> None:
    assert_lossless(kind, range(40))
