"""Random steps of recurrent layers by the kernels, and by the functions for CPUs, which `test_states` tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood_benchmarks.gpu_sections import random_tree
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.device import Machine
from draftwood_model_runner.runners.cuda.recurrent_layers import (
    STATE_NODES,
    ConvolutionStates,
    DeviceScan,
    LayerStates,
    RecurrenceStates,
)
from draftwood_model_runner.runners.cuda.state_rows import PlannedRow, RowState, StateArrays, StateLayout
from draftwood_model_runner.runners.page_states import StepRow
from draftwood_model_runner.runners.scanning import Scan
from draftwood_model_runner.runners.torch.scan import HostScan, StepShape
from tests.model_runner.runners.cuda.reference import CPU

WIDTH = 4
"""Inputs of a convolution."""


class Shape(NamedTuple):
    """Of a recurrence: heads, heads of keys, and the size of a head's state [rows, columns]."""

    heads: int
    groups: int
    rows: int
    columns: int


class RowSizes(NamedTuple):
    """Of a batch row.
    Attributes:
        replayed: accepted nodes of the step before.
        chain: tokens up to the root of its tree.
        page_end: of these, after how many the state is kept as the end of a page; 0 for none.
        cu_seqlens: it has no state before it.
    """

    replayed: int
    chain: int
    nodes: int
    page_end: int = 0
    cu_seqlens: bool = False


class Pair(NamedTuple):
    """What a kernel computed, and what is right."""

    name: str
    actual: torch.Tensor
    expected: torch.Tensor


def random_rows(random: np.random.Generator, count: int, most_nodes: int) -> list[RowSizes]:
    """Prompts' chunks, chains and trees."""
    rows = []
    for _ in range(count):
        cu_seqlens, chain = bool(random.random() < 0.3), int(random.choice([1, 1, 2, 3, 9]))
        replayed = 0 if cu_seqlens else int(random.integers(0, 6))
        nodes, page_end = int(random.integers(0, most_nodes + 1)), int(random.integers(0, chain + 1))
        rows.append(RowSizes(replayed, chain, nodes, page_end, cu_seqlens))
    return rows


class StateCase:
    """A step over random states. Memory that no kernel has written, or none may read, holds NaN.
    Args:
        rows: its batch rows.
        padding: tokens behind them.
        beside: numbers of a token that lie beside each of its inputs.
    """

    def __init__(
        self,
        random: np.random.Generator,
        rows: list[RowSizes],
        shape: Shape,
        dtype: torch.dtype = torch.float32,
        padding: int = 0,
        deep: float = 0.6,
        beside: int = 3,
        device: torch.device = CPU,
    ) -> None:
        self._random, self._rows, self._shape, self._dtype, self._device = random, rows, shape, dtype, device
        self._beside, self._ends, none = beside, 2 * len(rows), np.zeros(0, np.int32)
        self._accepted = [np.sort(random.permutation(STATE_NODES)[: row.replayed]).tolist() for row in rows]
        parents, cu_seqlens, roots, page_ends, planned = list[int](), [0], list[int](), list[int](), []
        for number, row in enumerate(rows):
            begin, root = cu_seqlens[-1], row.chain - 1
            tree = random_tree(random, row.nodes, deep)
            parents += [*range(-1, root), *(int(parent) + 1 + root for parent in tree.parents)]
            cu_seqlens.append(len(parents))
            roots.append(begin + root)
            page_ends.append(begin + row.page_end if row.page_end else -1)
            chain, nodes = range(begin, begin + row.chain), range(begin + row.chain, len(parents))
            tokens = StepRow(0, chain, chain[: row.chain if row.cu_seqlens else 0], nodes, none)
            before = None if row.cu_seqlens else RowState(row=2 * number, position=0)
            end = self._ends + number if row.page_end else -1
            planned.append(PlannedRow(tokens, before, self._accepted[number], 2 * number + 1, row.page_end, end))
        self._cu_seqlens, self._size, self._padded = cu_seqlens, len(parents), len(parents) + padding
        trees, offsets = np.array(parents, np.int32), np.array(cu_seqlens, np.int32)
        zeros = np.zeros(self._size, np.int32)
        layout = StateLayout(StepBatch(zeros, zeros, trees, offsets, none, none, none, none), planned)
        self._arrays = StateArrays(self._padded, max(1, layout.walk.size), device)
        self._arrays.fill(layout, self._padded)
        self._step = StepShape(
            trees,
            offsets,
            roots=np.array(roots, np.int32),
            page_ends=np.array(page_ends, np.int32),
            is_prompt=(self._arrays.is_prompt[: self._size] != 0).cpu(),
            replayed_offsets=np.cumsum([0, *(row.replayed for row in rows)], dtype=np.int32),
        )

    def convolution(self, channels: int, *, biased: bool = True, silu: bool = True) -> list[Pair]:
        """Outputs, states and inputs of nodes of a convolution."""
        inputs, weight, bias = self._tokens(channels), self._numbers(channels, WIDTH), self._numbers(channels)
        memory = ConvolutionStates(self._states(WIDTH - 1, channels), self._nodes(channels))
        host = self._host(("conv", 0), memory.states, [memory.nodes])

        def compute(scan: Scan, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            hidden = scan.update_conv_state(inputs.t()[None], 0)
            return scan.convolve(hidden, weight, bias if biased else None, "silu" if silu else None)[0].t()

        states = LayerStates((memory,), None)
        return self._compared("convolve", compute, states, host, (inputs, weight, bias), memory.states, (memory.nodes,))

    def delta_rule(self) -> list[Pair]:
        """Those of the gated delta rule."""
        heads, groups, rows, columns = self._shape
        query, key, value = self._tokens(groups, rows), self._tokens(groups, rows), self._tokens(heads, columns)
        decay, beta = -self._tokens(heads).float().abs(), self._tokens(heads).sigmoid()
        decay_nodes = -self._nodes(heads).float().abs()
        nodes = (self._nodes(groups, rows), self._nodes(heads, columns), decay_nodes, self._nodes(heads).sigmoid())

        def compute(scan: Scan, *tokens: torch.Tensor) -> torch.Tensor:
            query, key, value, decay, beta = (part[None] for part in tokens)
            return scan.delta_rule(query, key, value, decay, beta, use_qk_l2norm_in_kernel=True)[0][0]

        return self._recurrence("delta_rule", compute, (query, key, value, decay, beta), nodes)

    def state_space(self) -> list[Pair]:
        """Those of the recurrence of Mamba 2."""
        heads, groups, rows, columns = self._shape
        inputs, written, read = self._tokens(heads, columns), self._tokens(groups, rows), self._tokens(groups, rows)
        steps, rates, skips = self._tokens(heads), -self._numbers(heads).float().abs(), self._numbers(heads).float()
        time_steps = torch.nn.functional.softplus(self._nodes(heads).float())
        nodes = (self._nodes(groups, rows), self._nodes(heads, columns), time_steps)

        def compute(scan: Scan, *given: torch.Tensor) -> torch.Tensor:
            x, dt, b, c = (part[None] for part in given[:4])
            rates, skips = given[4:]
            options: dict[str, Any] = {"D": skips, "dt_softplus": True, "dt_limit": (0.5, float("inf"))}
            output = scan.state_space(x, dt, rates, b, c, 16, **options)
            assert isinstance(output, torch.Tensor)
            return output[0]

        return self._recurrence("state_space", compute, (inputs, steps, written, read, rates, skips), nodes)

    def _recurrence(
        self,
        name: str,
        compute: Callable[..., torch.Tensor],
        arguments: tuple[torch.Tensor, ...],
        nodes: tuple[torch.Tensor, ...],
    ) -> list[Pair]:
        states = self._states(self._shape.heads, self._shape.rows, self._shape.columns).float()
        of_heads = [part if at != 2 else part[..., None] for at, part in enumerate(nodes)]  # as the host keeps them
        host = self._host(("recurrent", 0), states, of_heads)
        memory = LayerStates((), RecurrenceStates(states, nodes))
        return self._compared(name, compute, memory, host, arguments, states, nodes)

    def _host(self, kind: tuple[str, int], states: torch.Tensor, nodes: list[torch.Tensor]) -> HostScan:
        """The same step for CPUs, from a copy of the states and of the nodes that are accepted."""
        before: list[dict[Any, torch.Tensor]] = [
            {} if row.cu_seqlens else {kind: states[2 * number][None].cpu().float()}
            for number, row in enumerate(self._rows)
        ]
        kept = [
            torch.cat([part[2 * number, accepted].cpu().float() for number, accepted in enumerate(self._accepted)])
            for part in nodes
        ]
        return HostScan(self._step, before, kept)

    def _compared(
        self,
        name: str,
        compute: Callable[..., torch.Tensor],
        memory: Any,
        host: HostScan,
        arguments: tuple[torch.Tensor, ...],
        states: torch.Tensor,
        nodes: tuple[torch.Tensor, ...],
    ) -> list[Pair]:
        """Outputs of all tokens, states behind roots and ends of pages, and the inputs of nodes."""
        actual = compute(DeviceScan(memory, self._arrays, Machine(2)), *arguments)
        assert not actual[self._size :].any(), "padding"
        expected = compute(host, *(part.cpu().float() for part in arguments))
        [after], [ends] = host.states.values(), host.ends.values()
        pages = [self._ends + number for number, row in enumerate(self._rows) if row.page_end]
        pairs = [
            Pair(name, actual[: self._size], expected[: self._size]),
            Pair(f"{name}: states", states[1 : self._ends : 2], after),
            Pair(f"{name}: ends of pages", states[pages], ends),
        ]
        for number, row in enumerate(self._rows):
            begin, kept = self._cu_seqlens[number] + row.chain, min(row.nodes, STATE_NODES)
            for part, inputs in zip(nodes, host.inputs, strict=True):
                of_row = part[2 * number + 1, :kept].flatten(1), inputs[begin : begin + kept].flatten(1)
                pairs.append(Pair(f"{name}: inputs of nodes", *of_row))
        return pairs

    def _numbers(self, *size: int) -> torch.Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device=self._device, dtype=self._dtype)

    def _tokens(self, *size: int) -> torch.Tensor:
        """[T, ...], a part of something wider, as projections that were split leave it."""
        flat = int(np.prod(size))
        numbers = self._numbers(self._padded, flat + self._beside)[:, :flat]
        numbers[self._size :] = torch.nan
        tokens: torch.Tensor = numbers.unflatten(1, size)
        return tokens

    def _states(self, *size: int) -> torch.Tensor:
        """[state rows, ...]: a row that is read and one that is written for each batch row, then ends of pages."""
        numbers = self._numbers(self._ends + len(self._rows), *size)
        numbers[1 : self._ends : 2] = torch.nan
        numbers[self._ends :] = torch.nan
        for number, row in enumerate(self._rows):
            if row.cu_seqlens:
                numbers[2 * number] = torch.nan
        return numbers

    def _nodes(self, *size: int) -> torch.Tensor:
        numbers = self._numbers(self._ends, STATE_NODES, *size)
        numbers[1::2] = torch.nan
        return numbers
