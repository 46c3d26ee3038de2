"""Random steps of recurrent layers, and what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from draftwood_benchmarks.gpu.trees import random_tree
from draftwood_model_runner.runners.base import StepBatch
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
    """What a kernel computed, and what is right, in float64."""

    name: str
    found: torch.Tensor
    expected: torch.Tensor

    @property
    def error(self) -> float:
        return float((self.found.double() - self.expected).abs().max()) if self.found.numel() else 0.0


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
        from draftwood_model_runner.runners.cuda.states.arrays import StateArrays, StateLayout
        from draftwood_model_runner.runners.cuda.states.rows import LiveState, PlannedRow
        from draftwood_model_runner.runners.cuda.states.shapes import STATE_NODES
        from draftwood_model_runner.runners.states.rows import StepRow

        self._random, self._rows, self._shape, self._dtype, self._device = random, rows, shape, dtype, device
        self._beside = beside
        self._node_count, self._ends = STATE_NODES, 2 * len(rows)
        parents, cu_seqlens, self._accepted, planned = list[int](), [0], list[list[int]](), []
        none = np.zeros(0, np.int32)
        for number, row in enumerate(rows):
            begin, root = cu_seqlens[-1], row.chain - 1
            tree = random_tree(random, row.nodes, deep)
            parents += [*range(-1, root), *(int(parent) + 1 + root for parent in tree.parents)]
            cu_seqlens.append(len(parents))
            self._accepted.append(np.sort(random.permutation(STATE_NODES)[: row.replayed]).tolist())
            chain, nodes = range(begin, begin + row.chain), range(begin + row.chain, len(parents))
            tokens = StepRow(0, chain, chain[: row.chain if row.cu_seqlens else 0], nodes, none)
            before = None if row.cu_seqlens else LiveState(2 * number, 0, 0)
            end = self._ends + number if row.page_end else -1
            planned.append(PlannedRow(tokens, before, self._accepted[-1], 2 * number + 1, row.page_end, end))
        size, zeros = len(parents), np.zeros(len(parents), np.int32)
        self._parents, self._cu_seqlens = parents, cu_seqlens
        batch = StepBatch(
            zeros, zeros, np.array(parents, np.int32), np.array(cu_seqlens, np.int32), none, none, none, none
        )
        layout = StateLayout(batch, planned)
        self._size, self._padded = size, size + padding
        self._arrays = StateArrays(self._padded, max(1, layout.walk.size), device)
        self._arrays.fill(layout, self._padded)

    def convolution(self, channels: int, *, biased: bool = True, silu: bool = True) -> list[Pair]:
        """Outputs, states and inputs of nodes of a convolution."""
        from draftwood_model_runner.runners.cuda.states.memory import ConvolutionStates, MixerStates

        inputs, weight, bias = self._tokens(channels), self._numbers(channels, WIDTH), self._numbers(channels)
        memory = ConvolutionStates(self._states(WIDTH - 1, channels), self._nodes(channels))
        before = ConvolutionStates(*(part.clone() for part in memory))
        scan = self._scan(MixerStates((memory,), None))
        hidden = scan.update_conv_state(inputs.t()[None], 0)
        found = scan.convolve(hidden, weight, bias if biased else None, "silu" if silu else None)[0].t()
        assert not found[self._size :].any(), "padding"

        def follow(state: torch.Tensor, numbers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            seen = torch.cat([state, numbers[0][None]])
            mixed = (seen * weight.double().t()).sum(0) + (bias.double() if biased else 0.0)
            return seen[1:], mixed * torch.sigmoid(mixed) if silu else mixed

        old = (before.states, (before.nodes,))
        return self._compared("convolve", found, memory.states, (memory.nodes,), (inputs,), old, follow)

    def delta_rule(self) -> list[Pair]:
        """Those of the gated delta rule."""
        heads, groups, rows, columns = self._shape
        query, key, value = self._tokens(groups, rows), self._tokens(groups, rows), self._tokens(heads, columns)
        decay, beta = -self._tokens(heads).float().abs(), self._tokens(heads).sigmoid()
        decay_nodes = -self._nodes(heads).float().abs()
        nodes = (self._nodes(groups, rows), self._nodes(heads, columns), decay_nodes, self._nodes(heads).sigmoid())

        def normalized(vector: torch.Tensor) -> torch.Tensor:
            return (vector / (vector.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(heads // groups, 0)

        def follow(state: torch.Tensor, numbers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            k, v, g, b, *rest = numbers
            state, k = state * g.exp()[:, None, None], normalized(k)
            delta = (v - torch.einsum("hkv,hk->hv", state, k)) * b[:, None]
            state = state + torch.einsum("hk,hv->hkv", k, delta)
            q = normalized(rest[0]) / rows**0.5 if rest else torch.zeros_like(k)
            return state, torch.einsum("hkv,hk->hv", state, q)

        def compute(scan: Any) -> torch.Tensor:
            parts = (part[None] for part in (query, key, value))
            outputs: torch.Tensor
            outputs, _ = scan.delta_rule(*parts, g=decay[None], beta=beta[None], use_qk_l2norm_in_kernel=True)
            return outputs[0]

        return self._recurrence("delta_rule", compute, (key, value, decay, beta, query), nodes, follow)

    def state_space(self) -> list[Pair]:
        """Those of the recurrence of Mamba 2."""
        heads, groups, rows, columns = self._shape
        inputs, written, read = self._tokens(heads, columns), self._tokens(groups, rows), self._tokens(groups, rows)
        steps, rates, skips = self._tokens(heads), -self._numbers(heads).float().abs(), self._numbers(heads).float()
        softplus = torch.nn.functional.softplus
        nodes = (self._nodes(groups, rows), self._nodes(heads, columns), softplus(self._nodes(heads).float()))
        limited = softplus(steps).float()
        given = self._arrays.is_prompt[: self._padded] != 0
        limited[given] = limited[given].clamp(min=0.5)

        def follow(state: torch.Tensor, numbers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            b, x, dt, *rest = numbers
            b = b.repeat_interleave(heads // groups, 0)
            added = torch.einsum("hn,hp->hnp", b * dt[:, None], x)
            state = state * (dt * rates.double()).exp()[:, None, None] + added
            c = rest[0].repeat_interleave(heads // groups, 0) if rest else torch.zeros_like(b)
            return state, torch.einsum("hnp,hn->hp", state, c) + skips.double()[:, None] * x

        def compute(scan: Any) -> torch.Tensor:
            x, dt, b, c = (part[None] for part in (inputs, steps, written, read))
            limit = (0.5, float("inf"))
            found: torch.Tensor = scan.state_space(x, dt, rates, b, c, 16, D=skips, dt_softplus=True, dt_limit=limit)
            return found[0]

        return self._recurrence("state_space", compute, (written, inputs, limited, read), nodes, follow)

    def _recurrence(
        self,
        name: str,
        compute: Callable[[Any], torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        nodes: tuple[torch.Tensor, ...],
        follow: Callable[..., Any],
    ) -> list[Pair]:
        from draftwood_model_runner.runners.cuda.states.memory import MixerStates, RecurrenceStates

        states = self._states(self._shape.heads, self._shape.rows, self._shape.columns).float()
        old = (states.clone(), tuple(part.clone() for part in nodes))
        found = compute(self._scan(MixerStates((), RecurrenceStates(states, nodes))))
        assert not found[self._size :].any(), "padding"
        return self._compared(name, found, states, nodes, inputs, old, follow)

    def _compared(
        self,
        name: str,
        found: torch.Tensor,
        states: torch.Tensor,
        nodes: tuple[torch.Tensor, ...],
        inputs: tuple[torch.Tensor, ...],
        old: tuple[torch.Tensor, tuple[torch.Tensor, ...]],
        follow: Callable[..., Any],
    ) -> list[Pair]:
        """Outputs of all tokens, states behind roots and borders, and the inputs of nodes.

        Args:
            inputs: [T, ...], those that are replayed first.
            old: states and inputs of nodes before the step.
            follow: the state and the output after a token, from the state before and its inputs, in float64.
        """
        after: dict[int, torch.Tensor] = {}
        outputs = []
        pairs = []
        for row, token in self._order():
            sizes, begin = self._rows[row], self._cu_seqlens[row]
            parent = self._parents[token]
            if parent < 0:
                state = torch.zeros_like(old[0][0]) if sizes.cu_seqlens else old[0][2 * row]
                state = state.double()
                for node in self._accepted[row]:
                    state = follow(state, tuple(part[2 * row, node].double() for part in old[1]))[0]
            else:
                state = after[begin + parent]
            after[token], output = follow(state, tuple(part[token].double() for part in inputs))
            outputs.append(output)
            if token == begin + sizes.chain - 1:
                pairs.append(Pair(f"{name}: state", states[2 * row + 1], after[token]))
            if token == begin + sizes.page_end - 1:
                pairs.append(Pair(f"{name}: end of a page", states[self._ends + row], after[token]))
            if 0 <= (node := token - begin - sizes.chain) < self._node_count:
                kept = [part[2 * row + 1, node].flatten().double() for part in nodes]
                given = [part[token].flatten().double() for part in inputs[: len(nodes)]]
                pairs.append(Pair(f"{name}: inputs of a node", torch.cat(kept), torch.cat(given)))
        return [Pair(name, found[: self._size], torch.stack(outputs)), *pairs]

    def _order(self) -> Iterator[tuple[int, int]]:
        """Batch row and number of each token."""
        for row in range(len(self._rows)):
            for token in range(self._cu_seqlens[row], self._cu_seqlens[row + 1]):
                yield row, token

    def _scan(self, states: Any) -> Any:
        from draftwood_model_runner.runners.cuda.device.launching import Machine
        from draftwood_model_runner.runners.cuda.states.scan import DeviceScan

        return DeviceScan(states, self._arrays, Machine(2))

    def _numbers(self, *size: int) -> torch.Tensor:
        return torch.from_numpy(self._random.standard_normal(size)).to(device=self._device, dtype=self._dtype)

    def _tokens(self, *size: int) -> torch.Tensor:
        """[T, ...], a part of something wider, as projections that were split leave it."""
        flat = int(np.prod(size))
        found = self._numbers(self._padded, flat + self._beside)[:, :flat]
        found[self._size :] = torch.nan
        tokens: torch.Tensor = found.unflatten(1, size)
        return tokens

    def _states(self, *size: int) -> torch.Tensor:
        """[state rows, ...]: a row that is read and one that is written for each batch row, then ends of pages."""
        found = self._numbers(self._ends + len(self._rows), *size)
        found[1 : self._ends : 2] = torch.nan
        found[self._ends :] = torch.nan
        for number, row in enumerate(self._rows):
            if row.cu_seqlens:
                found[2 * number] = torch.nan
        return found

    def _nodes(self, *size: int) -> torch.Tensor:
        found = self._numbers(self._ends, self._node_count, *size)
        found[1::2] = torch.nan
        return found
