"""States of recurrent layers on CPUs: what is kept between steps, and the recurrences over draft trees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from draftwood_model_runner.runners.base import KVCompaction
from draftwood_model_runner.runners.page_states import StepRow
from draftwood_model_runner.runners.recurrent_layers import State
from draftwood_model_runner.runners.torch.scan import HostScan, StepShape
from draftwood_model_runner.runners.torch.states import RowStates, StateMemory

PAGE = 4
TABLE = np.array([7, 3, 9], np.int32)
KEPT = 256
"""Bytes of states at the ends of pages: four of them."""


def state(value: float) -> list[State]:
    return [{("recurrent", 0): torch.full((1, 16), value)}]


def after_step(memory: StateMemory, context: int, chain: int, nodes: int, before: RowStates | None = None) -> RowStates:
    entries = np.arange(context + chain, context + chain + nodes)
    slots = TABLE[entries // PAGE] * PAGE + entries % PAGE
    row = RowStates(position=context + chain, states=state(1.0), nodes=[*range(nodes)], slots=slots.tolist())
    step_row = StepRow(context, range(chain), range(chain), range(chain, chain + nodes), TABLE)
    memory.store(step_row, before, row)
    return row


@pytest.fixture
def memory() -> StateMemory:
    return StateMemory(PAGE, KEPT)


def test_a_state_serves_up_to_its_last_accepted_node(memory: StateMemory) -> None:
    row = after_step(memory, 0, 3, 4)
    assert all(memory.find(TABLE, context) is row for context in (3, 4, 7))
    for context in (1, 2, 8):
        with pytest.raises(RuntimeError, match=f"first {context} tokens"):
            memory.find(TABLE, context)


def test_accepted_nodes_come_first_as_their_keys_do(memory: StateMemory) -> None:
    row = after_step(memory, 0, 3, 4)
    moves = np.array(row.slots, np.int32)
    memory.move(KVCompaction(moves[[1, 3]], moves[[0, 1]], np.array([0, 2], np.int32)))
    assert row.nodes[:2] == [1, 3]


def test_the_state_before_is_gone_after_a_step(memory: StateMemory) -> None:
    first = after_step(memory, 0, 3, 0)
    after_step(memory, 3, 6, 0, before=first)
    with pytest.raises(RuntimeError):
        memory.find(TABLE, 3)


def test_nothing_is_found_in_pages_that_were_released(memory: StateMemory) -> None:
    after_step(memory, 0, 4, 0)
    memory.keep_end(7, state(2.0))
    memory.release([7], kept=True)
    assert memory.resumes_after(7)
    with pytest.raises(RuntimeError):
        memory.find(TABLE, 4)
    memory.release([7], kept=False)
    assert not memory.resumes_after(7)


def test_two_sequences_begin_after_the_same_page(memory: StateMemory) -> None:
    memory.keep_end(7, state(2.0))
    memory.resume(7, first=3, position=PAGE)
    memory.resume(7, first=8, position=PAGE)
    for table in (TABLE, np.array([7, 8], np.int32)):
        assert memory.find(table, PAGE).states[0]["recurrent", 0][0, 0] == 2.0


def test_a_page_that_is_written_again_has_no_state(memory: StateMemory) -> None:
    memory.keep_end(3, state(2.0))
    after_step(memory, 4, 1, 0)
    assert not memory.resumes_after(3)


def test_the_least_recently_used_states_are_given_up(memory: StateMemory) -> None:
    for page in range(5):
        memory.keep_end(page, state(float(page)))
    assert [memory.resumes_after(page) for page in range(5)] == [False, True, True, True, True]


HEADS, KEY_HEADS, KEY, VALUE, CHANNELS, WIDTH = 4, 2, 8, 6, 5, 4
CHAIN, NODES, REPLAYED = (3, 1), (6, 9), (0, 2)
"""Of two batch rows; the first is at its beginning."""
PAGE_END = 2
"""Tokens of the first row up to a page's end."""
PADDING = 3


class Case:
    """Two batch rows with random trees."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        parents, cu_seqlens = list[int](), [0]
        for chain, nodes in zip(CHAIN, NODES, strict=True):
            parents += range(-1, chain - 1)
            parents += [int(random.integers(chain - 1, chain + i)) for i in range(nodes)]
            cu_seqlens.append(len(parents))
        self.step = StepShape(
            parents=np.array(parents, np.int32),
            cu_seqlens=np.array(cu_seqlens, np.int32),
            roots=np.array([begin + chain - 1 for begin, chain in zip(cu_seqlens, CHAIN, strict=False)], np.int32),
            page_ends=np.array([PAGE_END, -1], np.int32),
            is_prompt=torch.arange(cu_seqlens[-1]) < CHAIN[0],
            replayed_offsets=np.cumsum([0, *REPLAYED], dtype=np.int32),
        )
        self.generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, tokens: int | None = None) -> torch.Tensor:
        width = self.step.size + PADDING if tokens is None else tokens
        return torch.randn(1, width, *shape, generator=self.generator)

    def path(self, token: int) -> tuple[int, list[int]]:
        """The row of a token, and it with what it follows in the step, the first first."""
        row = int(token >= self.step.cu_seqlens[1])
        begin, actual = int(self.step.cu_seqlens[row]), [token]
        while (above := int(self.step.parents[actual[0]])) >= 0:
            actual.insert(0, begin + above)
        return row, actual


@pytest.mark.parametrize("kimi_decay", [False, True])
def test_the_delta_rule_follows_trees(kimi_decay: bool) -> None:
    case = Case(1)
    heads = HEADS if kimi_decay else KEY_HEADS
    shapes = ((heads, KEY), (heads, KEY), (HEADS, VALUE), (HEADS, KEY) if kimi_decay else (HEADS,), (HEADS,))
    tokens = [case.random(*shape) for shape in shapes]
    old = [case.random(*shape, tokens=sum(REPLAYED)) for shape in shapes]
    for parts in (tokens, old):
        parts[3], parts[4] = -parts[3].abs(), parts[4].sigmoid()
    state = torch.randn(1, HEADS, KEY, VALUE, generator=case.generator)
    earlier = [part[0] for part in (*old[1:3], old[3] if kimi_decay else old[3][..., None], old[4])]
    scan = HostScan(case.step, [{}, {("recurrent", 0): state}], earlier)
    query, key, value, decay, beta = tokens
    output, _ = scan.delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    function: Any = kimi.recurrent_kimi_delta_attention if kimi_decay else qwen3_next.torch_recurrent_gated_delta_rule

    def expected(row: int, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        replayed = [part[:, : REPLAYED[row]] for part in old]
        chosen = [torch.cat([a, b[:, places]], 1) for a, b in zip(replayed, tokens, strict=True)]
        q, k, v, g, b = chosen
        q, k = (part.repeat_interleave(HEADS // heads, 2) for part in (q, k))
        output, final = function(q, k, v, g=g, beta=b, initial_state=state if row else None, output_final_state=True,
                                 use_qk_l2norm_in_kernel=True)  # fmt: skip
        return output, final

    _compare(case, scan, output, expected)


def test_the_state_space_follows_trees_and_limits_steps_of_prompts_only() -> None:
    case = Case(2)
    shapes = ((HEADS, VALUE), (HEADS,), (KEY_HEADS, KEY))
    inputs, steps, written = (case.random(*shape) for shape in shapes)
    read, old = case.random(KEY_HEADS, KEY), [case.random(*shape, tokens=sum(REPLAYED)) for shape in shapes]
    old[1] = torch.nn.functional.softplus(old[1])  # replayed time steps are those that were computed
    rates, skips = -torch.rand(HEADS, generator=case.generator), torch.randn(HEADS, generator=case.generator)
    state, limit = torch.randn(1, HEADS, KEY, VALUE, generator=case.generator), 0.9
    earlier = [old[2][0], old[0][0], old[1][0, ..., None]]
    scan = HostScan(case.step, [{}, {("recurrent", 0): state}], earlier)
    output = scan.state_space(
        inputs, steps, rates, written, read, 16, D=skips, dt_softplus=True, dt_limit=(limit, float("inf"))
    )
    assert isinstance(output, torch.Tensor)
    final = torch.nn.functional.softplus(steps)
    given = torch.zeros(final.shape[1], dtype=torch.bool)
    given[: case.step.size] = case.step.is_prompt
    final[:, given] = final[:, given].clamp(min=limit)

    def expected(row: int, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(old, (inputs, final, written), strict=True)
        x, dt, b = (torch.cat([before[:, : REPLAYED[row]], part[:, places]], 1) for before, part in pairs)
        c = torch.cat([torch.zeros(1, REPLAYED[row], KEY_HEADS, KEY), read[:, places]], 1)
        initial = state.transpose(2, 3) if row else None
        results: Any = mamba2.mamba2_chunk_scan(
            x, dt, rates, b, c, chunk_size=4, D=skips, initial_states=initial, return_final_states=True
        )
        return results[0], results[1].transpose(2, 3)

    _compare(case, scan, output, expected)


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_follows_trees(bias: bool) -> None:
    case = Case(3)
    tokens, old = case.random(CHANNELS), case.random(CHANNELS, tokens=sum(REPLAYED))
    weight = torch.randn(CHANNELS, WIDTH, generator=case.generator)
    offsets = torch.randn(CHANNELS, generator=case.generator) if bias else None
    state = torch.randn(1, WIDTH - 1, CHANNELS, generator=case.generator)
    scan = HostScan(case.step, [{}, {("conv", 1): state}], [old[0]])
    hidden = scan.update_conv_state(tokens.transpose(1, 2), 0, state_idx=1)
    output = scan.convolve(hidden, weight, offsets, activation="silu").transpose(1, 2)
    blank = torch.zeros(1, WIDTH - 1, CHANNELS)

    def expected(row: int, places: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat([state if row else blank, old[:, : REPLAYED[row]], tokens[:, places]], 1)
        mixed: torch.Tensor = qwen3_next.causal_conv1d_fn(seen.transpose(1, 2), weight, offsets, activation="silu")
        return mixed.transpose(1, 2), seen[:, -(WIDTH - 1) :]

    _compare(case, scan, output, expected)


def _compare(case: Case, scan: HostScan, output: torch.Tensor, expected: Any) -> None:
    """Outputs of all tokens, and the states at roots and borders."""
    (kind,) = scan.states
    for token in range(case.step.size):
        row, path = case.path(token)
        outputs, state = expected(row, path)
        torch.testing.assert_close(output[0, token], outputs[0, -1], rtol=1e-4, atol=1e-5)
        if token == case.step.roots[row]:
            torch.testing.assert_close(scan.states[kind][row], state[0], rtol=1e-4, atol=1e-5)
        if token == PAGE_END - 1:
            torch.testing.assert_close(scan.ends[kind][0], state[0], rtol=1e-4, atol=1e-5)
    assert not output[0, case.step.size :].any()
