"""Models with sliding windows: pages behind the window are given up, and what is written stays that of `generate`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.engine import Engine
from draftwood_model_runner.errors import InvalidValueError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.scheduling.kv_pool import AttentionWindow
from tests.model_runner.beside import assert_no_faults, create_beside, drafting_for_itself
from tests.model_runner.families import generate, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.sequences import engine_of, make_sequence, run
from tests.model_runner.small_models import SHORT_WINDOW, tiny_attention

VOCAB, LONG, CHUNK, DRAFT = 128, 900, 64, 16
NEEDED = AttentionWindow(SHORT_WINDOW, CHUNK).needs(DRAFT)


def served(
    family: str = "windows", exact: bool = False, dtype: torch.dtype = torch.float32, runner: str = "torch"
) -> LoadedModel:
    return taken_over(tiny_attention(family, VOCAB, LONG).to(dtype), runner=runner, exact=exact, defaults="greedy")


def prompt_of(size: int) -> Any:
    return np.random.default_rng(size).integers(0, VOCAB, size, np.int32)


def written(engine: Engine, prompt: Any, answer: list[int]) -> list[int]:
    """What is written; looks at the pages after each step."""
    oracle = OracleStrategy({tuple(prompt.tolist()): answer}, VOCAB, 0)
    sequence = make_sequence("r", prompt, StopParams(len(answer)), strategy=oracle, max_draft_nodes=DRAFT)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.check()
        assert engine.kv_use.held * engine._pool.page_size <= NEEDED
    return sequence.output


@pytest.mark.parametrize(
    ("by", "size", "new", "prefix_cache"),
    [("torch", 5, 400, False), ("torch", 700, 150, True), ("openvino", 5, 400, True), ("openvino", 700, 150, False)],
)
def test_a_long_sequence_needs_memory_for_its_window(by: str, size: int, new: int, prefix_cache: bool) -> None:
    prompt = prompt_of(size)
    answer = generate(tiny_attention("windows", VOCAB, LONG), prompt, new)
    model = served(runner=by)
    engine = engine_of(model, DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=NEEDED, prefix_cache=prefix_cache)
    for _ in range(2):
        assert written(engine, prompt, answer) == answer
        assert engine.kv_use.held == 0
    with pytest.raises(InvalidValueError, match=f"needs {NEEDED}"):
        engine_of(model, DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=NEEDED - 1)


@pytest.mark.parametrize("by", ["torch", "openvino"])
def test_a_cached_prefix_behind_the_window_is_found(by: str) -> None:
    prompt, module = prompt_of(400), tiny_attention("windows", VOCAB, LONG)
    answer = generate(module, prompt, 100)
    engine = engine_of(served(runner=by), DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=LONG)
    assert written(engine, prompt, answer) == answer
    longer = np.concatenate([prompt, np.array(answer, np.int32), prompt_of(9)])
    sequence = make_sequence("again", longer, StopParams(20), max_draft_nodes=0)
    run(engine, sequence)
    assert sequence.stats.cached_prompt_tokens == (496 if by == "torch" else 480)
    assert sequence.output == generate(module, longer, 20)


@pytest.mark.parametrize("by", ["torch", "openvino"])
@pytest.mark.parametrize("beside", ["windows", "windows-in-some-layers"])
@pytest.mark.parametrize("name", ["draft_model", "hybrid"])
def test_a_model_that_drafts_has_the_pages_of_the_window(by: str, beside: str, name: str) -> None:
    """Also one that would attend to all tokens."""
    prompt, drafting = prompt_of(300), served(beside, runner=by)
    answer = generate(tiny_attention("windows", VOCAB, LONG), prompt, 150)
    target = drafting_for_itself(served(runner=by))
    itself = target.drafters["draft_model"]
    model = replace(target, drafters={"draft_model": itself._replace(factory=drafting.factory)})
    engine = engine_of(model, DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=NEEDED)
    sequence = make_sequence("r", prompt, StopParams(150), strategy=create_beside(engine, name), max_draft_nodes=DRAFT)
    run(engine, sequence)
    assert_no_faults([sequence])
    assert sequence.output == answer
    assert sequence.stats.draft_tokens > 0
    assert (beside, name) != ("windows", "draft_model") or sequence.stats.accepted_tokens > 75


def test_exact_mode_gives_up_pages_and_keeps_its_bits() -> None:
    model = served(exact=True, dtype=torch.bfloat16)
    assert model.exact
    assert model.factory.window == SHORT_WINDOW + 127
    prompt, stop = prompt_of(300), StopParams(300)
    plain = make_sequence("r", prompt, stop)
    run(engine_of(model, DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=2 * LONG), plain)
    oracle = OracleStrategy({tuple(prompt.tolist()): plain.output}, VOCAB, 0)
    sequence = make_sequence("r", prompt, stop, strategy=oracle, max_draft_nodes=DRAFT)
    capacity = model.factory.window + CHUNK + 128 + DRAFT
    run(engine_of(model, DRAFT, prefill_chunk=CHUNK, kv_cache_tokens=capacity), sequence)
    assert sequence.output == plain.output
    assert sequence.stats.accepted_tokens > 100
