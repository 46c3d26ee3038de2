"""Recurrent layers by interpreted kernels: against those for CPUs, and models against transformers' `generate`."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftwood_model_runner.errors import DeviceMemoryError, UnsupportedRunnerError
from draftwood_model_runner.loading.model import LoadedModel
from draftwood_model_runner.request import StopParams
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.runners.cuda.recurrent_layers import STATE_NODES
from draftwood_model_runner.runners.cuda.runner import CudaRunner
from draftwood_model_runner.runners.cuda.state_rows import StateRows
from draftwood_strategies.draft import EMPTY_TREE, DraftTree
from tests.model_runner.families import generate, taken_over
from tests.model_runner.oracle import OracleStrategy
from tests.model_runner.runners.cuda.device import DEVICE
from tests.model_runner.runners.cuda.state_reference import Pair, RowSizes, Shape, StateCase, random_rows
from tests.model_runner.sequences import engine_of, make_sequence, run
from tests.model_runner.small_models import VOCAB, tiny_hybrid
from tests.model_runner.test_hybrids import SMALLER, TIE, generated, hybrid

SHAPES = [Shape(2, 2, 128, 128), Shape(4, 2, 96, 192), Shape(4, 1, 64, 64), Shape(3, 1, 128, 64), Shape(2, 1, 256, 64)]
"""Of a head's state in families that exist: Qwen 3 Next and 3.5, Olmo Hybrid, Zamba 2, Bamba and Granite, Falcon H1."""
PAGE = 4
TABLE = np.array([7, 3, 9, 5], np.int32)


def close(pairs: list[Pair], tolerance: float) -> None:
    assert len(pairs) > 1
    for pair in pairs:
        torch.testing.assert_close(
            pair.actual.cpu().float(), pair.expected, rtol=tolerance, atol=tolerance, msg=pair.name
        )


@pytest.mark.parametrize(
    ("seed", "dtype", "tolerance"),
    [*((seed, torch.float32, 1e-4) for seed in range(4)), (4, torch.float16, 1e-2), (5, torch.bfloat16, 5e-2)],
)
def test_trees_chains_and_prompts_in_one_call(seed: int, dtype: torch.dtype, tolerance: float) -> None:
    random = np.random.default_rng(seed)
    rows = [
        *random_rows(random, 3, most_nodes=12),
        RowSizes(2, 1, 6, page_end=1),
        RowSizes(0, 7, 0, page_end=4, cu_seqlens=True),
    ]
    case = StateCase(random, rows, Shape(4, 2, 8, 6), dtype, padding=3, device=DEVICE)
    for pairs in (case.convolution(20), case.delta_rule(), case.state_space()):
        close(pairs, tolerance)


def test_trees_that_are_larger_than_what_is_kept_of_them() -> None:
    random = np.random.default_rng(5)
    rows = [RowSizes(0, 1, 3 * STATE_NODES), RowSizes(1, 2, STATE_NODES)]
    case = StateCase(random, rows, Shape(2, 1, 8, 8), deep=0.4, device=DEVICE)
    for pairs in (case.convolution(9, biased=False, silu=False), case.delta_rule(), case.state_space()):
        close(pairs, 1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_size_of_state(shape: Shape) -> None:
    case = StateCase(np.random.default_rng(1), [RowSizes(2, 2, 5, page_end=1)], shape, device=DEVICE)
    close(case.delta_rule() if shape.columns > shape.rows or shape.groups == shape.heads else case.state_space(), 1e-4)


def batch(context: int, chain: int, nodes: int = 0, table: Any = TABLE, **options: Any) -> StepBatch:
    tree = DraftTree.of([*range(nodes)], [*range(-1, nodes - 1)]) if nodes else EMPTY_TREE
    return lay_out([BatchRow(table, context, np.zeros(chain, np.int32), tree, chain - 1, **options)])


@pytest.fixture
def rows() -> StateRows:
    return StateRows(PAGE, sequences=1, kept=1)


def step(rows: StateRows, of_step: StepBatch) -> Any:
    planned = rows.plan(of_step)
    return planned[0], rows.commit(planned)[0]


def test_a_state_serves_up_to_its_last_accepted_node_and_after_steps_that_failed(rows: StateRows) -> None:
    planned, state = step(rows, batch(0, 3, 4))
    assert planned.source == -1
    state.nodes = [1, 3]
    for context, accepted in (*((3, []) for _ in range(10)), (4, [1]), (5, [1, 3])):
        again = rows.plan(batch(context, 1))
        assert (again[0].source, again[0].accepted) == (state.row, accepted)
        assert again[0].target != state.row
        rows.discard(again)
    with pytest.raises(RuntimeError, match="first 6 tokens"):
        rows.plan(batch(6, 1))


def test_the_end_of_a_page_of_a_prompt_is_kept_for_others_until_it_is_written_again(rows: StateRows) -> None:
    planned, _ = step(rows, batch(0, 6))
    assert (planned.page_end, planned.page) == (PAGE, 7)
    rows.release([7, 3], kept=True)
    rows.resume(7, first=9, position=PAGE)
    other, _ = step(rows, batch(PAGE, 2, table=np.array([7, 9], np.int32), prompt_len=6))
    assert other.source == planned.end
    rows.release([7, 9], kept=True)
    assert rows.resumes_after(7)
    step(rows, batch(0, 3, table=np.array([7], np.int32)))
    assert not rows.resumes_after(7)
    with pytest.raises(RuntimeError):
        rows.plan(batch(PAGE, 2))


def test_an_end_that_a_sequence_begins_with_is_not_given_away(rows: StateRows) -> None:
    planned, _ = step(rows, batch(0, 5))
    rows.release(TABLE.tolist()[1:], kept=True)
    rows.resume(7, first=9, position=PAGE)
    other = rows.plan(batch(0, 5, table=np.array([11, 12], np.int32)))
    assert other[0].end == -1, "the only row for ends is in use"
    rows.commit(other)
    resumed = rows.plan(batch(PAGE, 2, table=np.array([7, 9], np.int32), prompt_len=6))
    assert resumed[0].source == planned.end


def test_rows_do_not_run_out_and_more_sequences_than_rows_are_refused(rows: StateRows) -> None:
    step(rows, batch(0, 3))
    for context in range(3, 14):
        step(rows, batch(context, 1))
    assert rows.use == (0, 0)
    for page in (20, 21, 22):
        step(rows, batch(0, 3, table=np.array([page], np.int32)))
    with pytest.raises(DeviceMemoryError):
        rows.plan(batch(0, 3, table=np.array([23], np.int32)))


def test_steps_over_made_up_contexts_leave_no_state(rows: StateRows) -> None:
    planned = rows.plan(replace(batch(9, 1, 3), is_dummy=True))
    assert rows.commit(planned) == [None]
    assert planned[0].target == rows.scratch
    with pytest.raises(RuntimeError):
        rows.plan(batch(10, 1))


CONTEXT, DRAFT, NEW = 64, 12, 8
ELSEWHERE = ("mamba", "kimi_linear", "minimax")
"""Families with recurrent layers that the kernels do not compute."""


@functools.cache
def served(family: str) -> LoadedModel:
    return taken_over(hybrid(family).to(DEVICE), max_context=CONTEXT, defaults="greedy", runner="cuda")


def prompts_of(family: str, seed: int) -> list[tuple[int, ...]]:
    """Three prompts, two of which begin alike with more than a page, whose answers do not depend on rounding."""
    random = np.random.default_rng(seed)
    prompts = list[tuple[int, ...]]()
    common = random.integers(0, VOCAB, 18).tolist()
    while len(prompts) < 3:
        begin = [] if len(prompts) == 1 else common
        prompt = (*begin, *random.integers(0, VOCAB, int(random.integers(1, 9))).tolist())
        if generated(family, prompt, NEW).closest >= TIE:
            prompts.append(prompt)
    return prompts


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "halves"),
    [
        *((family, False) for family in [*SMALLER][:2]),
        ("bamba small", True),
        *(pytest.param(family, False, marks=pytest.mark.slow) for family in [*SMALLER][2:]),
    ],
)
def test_trees_joins_prefixes_and_interruptions(family: str, halves: bool) -> None:
    """The first two requests at once and the last one when they have ended, in a memory that is too small for all; one
    is cancelled. Nothing leaks, and steps were replayed as they were recorded. Or in halves, which are in flight in
    turn."""
    prompts = prompts_of(family, seed=1)
    answers = {prompt: generated(family, prompt, NEW).tokens for prompt in prompts}
    kv_cache_tokens = CONTEXT + 2 * DRAFT
    engine = engine_of(served(family), DRAFT, max_running=3, prefill_chunk=16, kv_cache_tokens=kv_cache_tokens)
    if halves:
        patched: Any = engine
        patched._microbatches.microbatch = lambda running: -(-running // 2)
    oracle = OracleStrategy(answers, VOCAB, seed=len(family))
    first, second, later, cancelled = (
        make_sequence(str(i), prompt, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
        for i, prompt in enumerate([*prompts, prompts[1]])
    )
    for sequence in (first, second, cancelled):
        engine.add(sequence)
    waiting = [later]
    for step in itertools.count():
        if not engine.has_work and not waiting:
            break
        if not engine.has_work:
            engine.add(waiting.pop())
        if not halves and step == 2:
            engine.pause(first)
        if not halves and step == 4:
            engine.resume(first)
        engine.step()
        engine.check()
        if cancelled.output:
            engine.cancel(cancelled)
    assert isinstance(engine._runner, CudaRunner)
    assert engine._runner.states is not None
    assert engine._runner._graphs is not None
    assert engine._runner._graphs.sizes
    assert engine._runner.capture_problem == ""
    assert cancelled.output == answers[prompts[1]][: len(cancelled.output)]
    for sequence, prompt in zip((first, second, later), prompts, strict=True):
        assert sequence.output == answers[prompt]
        assert sequence.stats.drafting_disabled_reason == ""
    assert first.stats.accepted_tokens + second.stats.accepted_tokens + later.stats.accepted_tokens > NEW
    assert later.stats.cached_prompt_tokens >= 16
    assert halves or first.stats.pauses + first.stats.preemptions > 0


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
    oracle = OracleStrategy({prompt: expected}, VOCAB, seed=2)
    sequence = make_sequence("r", prompt, StopParams(NEW), strategy=oracle, max_draft_nodes=DRAFT)
    run(engine_of(taken_over(module, max_context=CONTEXT, runner="cuda"), DRAFT, max_running=1), sequence)
    assert sequence.output == expected
    assert sequence.stats.accepted_tokens > 0
