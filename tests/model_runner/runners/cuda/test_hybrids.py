"""Models with recurrent layers by interpreted kernels: their tokens are those of transformers' own `generate`, whatever
is drafted, joins, is cancelled, is interrupted or begins with a cached prefix."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.errors import UnsupportedRunnerError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from draftwood_model_runner.sequence import Sequence
from tests.model_runner.families import generate, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.sequences import engine_of, make_sequence
from tests.model_runner.sequences import run as run_all
from tests.model_runner.test_hybrids import SMALLER, TIE, generated, hybrid
from tools.model_sweep.hybrids import VOCAB, tiny_hybrid

CONTEXT, DRAFT, NEW = 64, 12, 8
ELSEWHERE = ("mamba", "kimi_linear", "minimax")
"""Families with mixers that the kernels do not compute."""


@functools.cache
def served(family: str) -> LoadedModel:
    return taken_over(hybrid(family).to(DEVICE), max_context=CONTEXT, defaults="greedy", runner="cuda")


def prompts_of(family: str, seed: int) -> list[tuple[int, ...]]:
    """Three prompts, two of which begin alike with more than a page, whose answers do not depend on rounding."""
    random = np.random.default_rng(seed)
    found = list[tuple[int, ...]]()
    common = random.integers(0, VOCAB, 18).tolist()
    offsets: tuple[list[int], ...] = (common, [], common)
    for begin in offsets:
        for _ in range(100):
            prompt = (*begin, *random.integers(0, VOCAB, int(random.integers(1, 9))).tolist())
            if prompt not in found and generated(family, prompt, NEW).closest >= TIE:
                found.append(prompt)
                break
    assert len(found) == 3
    return found


def run(family: str, prompts: list[tuple[int, ...]], *, interrupted: bool, halves: bool = False) -> list[Sequence]:
    """The first two requests at once and the last one when they have ended, in a memory that is too small for all; one
    is cancelled. Asserts that nothing leaks, and that steps were replayed as they were recorded."""
    answers = {prompt: generated(family, prompt, NEW).tokens for prompt in prompts}
    kv_cache_tokens = CONTEXT + 2 * DRAFT
    engine = engine_of(served(family), DRAFT, max_running=3, prefill_chunk=16, kv_cache_tokens=kv_cache_tokens)
    if halves:
        patched: Any = engine
        patched._microbatches.microbatch = lambda running: -(-running // 2)
    oracle = OracleStrategy(answers, VOCAB, seed=len(family))

    def request(name: str, prompt: tuple[int, ...]) -> Sequence:
        one = make_sequence(name, prompt, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
        engine.add(one)
        return one

    sequences = [request(str(number), prompt) for number, prompt in enumerate(prompts[:2])]
    cancelled = request("cancelled", prompts[1])
    for step in range(100):
        if not engine.has_work and len(sequences) == len(prompts):
            break
        if not engine.has_work:
            sequences.append(request("later", prompts[2]))
        if interrupted and step == 2:
            engine.pause(sequences[0])
        if interrupted and step == 4:
            engine.resume(sequences[0])
        engine.step()
        engine.check()
        if cancelled.output:
            engine.cancel(cancelled)
    assert not engine.has_work
    assert isinstance(engine._runner, CudaRunner)
    assert engine._runner.states is not None
    assert cancelled.output == answers[prompts[1]][: len(cancelled.output)]
    assert [one.output for one in sequences] == [answers[prompt] for prompt in prompts]
    assert all(one.stats.drafting_disabled_reason == "" for one in sequences)
    return sequences


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "family", [*[*SMALLER][:2], *(pytest.param(family, marks=pytest.mark.slow) for family in [*SMALLER][2:])]
)
def test_trees_joins_prefixes_and_interruptions(family: str) -> None:
    prompts = prompts_of(family, seed=1)
    sequences = run(family, prompts, interrupted=True)
    assert sum(one.stats.accepted_tokens for one in sequences) > NEW
    assert sequences[-1].stats.cached_prompt_tokens >= 16
    assert sequences[0].stats.pauses + sequences[0].stats.preemptions > 0


@pytest.mark.timeout(600)
def test_halves_in_turn() -> None:
    sequences = run("bamba small", prompts_of("bamba small", seed=2), interrupted=False, halves=True)
    assert sum(one.stats.accepted_tokens for one in sequences) > 0


@pytest.mark.timeout(600)
def test_steps_are_replayed_as_they_were_recorded() -> None:
    engine = engine_of(served("bamba small"), DRAFT, max_running=2)
    prompt = prompts_of("bamba small", seed=1)[1]
    answers = {prompt: generated("bamba small", prompt, NEW).tokens}
    oracle = OracleStrategy(answers, VOCAB, seed=3)
    one = make_sequence("r", prompt, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
    run_all(engine, one)
    assert one.output == answers[prompt]
    runner = engine._runner
    assert isinstance(runner, CudaRunner)
    assert runner._graphs is not None
    assert runner._graphs.sizes
    assert runner.capture_problem == ""


@pytest.mark.parametrize("family", ELSEWHERE)
def test_families_that_the_kernels_do_not_compute_are_left_to_torch(family: str) -> None:
    module = tiny_hybrid(family).to(DEVICE)
    ids = torch.arange(1, 9, device=DEVICE)[None]
    with torch.inference_mode():
        before = module(input_ids=ids).logits
    with pytest.raises(UnsupportedRunnerError, match="CUDA: "):
        taken_over(module, max_context=CONTEXT, runner="cuda")
    model = taken_over(module, max_context=CONTEXT, runner="torch", exact=False)
    assert model.factory.name == "torch"
    with torch.inference_mode():
        module.set_attn_implementation("eager")
        torch.testing.assert_close(module(input_ids=ids).logits, before, rtol=1e-4, atol=1e-4)


@pytest.mark.timeout(600)
def test_tokens_that_the_host_chooses() -> None:
    """Whose accepted nodes the host knows alone."""
    family, prompt = "bamba small", tuple(range(1, 12))
    free = generated(family, prompt, NEW).tokens
    suppressed = (free[1], free[4])
    expected = generate(hybrid(family), prompt, NEW, suppress_tokens=suppressed)
    module = hybrid(family).to(DEVICE)
    module.generation_config.suppress_tokens = [*suppressed]
    engine = engine_of(taken_over(module, max_context=CONTEXT, runner="cuda"), DRAFT, max_running=1)
    oracle = OracleStrategy({prompt: expected}, VOCAB, seed=2)
    one = make_sequence("r", prompt, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
    run_all(engine, one)
    assert one.output == expected
    assert one.stats.accepted_tokens > 0
