"""Recurrent layers of the torch runner: a node of a draft tree takes its state from its parent.

A batch row begins with its chain, the tokens up to the root of its tree. They follow the sequence's state, behind the
accepted nodes of the step before, which its state does not cover yet. A layer that scans is called once, see `scan`.
Others are called twice: on the chain, after which their state is kept, and on the tree's paths from the root to its
leaves. No state of a node outlives the step, as only the walk tells which nodes are accepted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from draftwood_model_runner.runners.base import KVCompaction, StepBatch
from draftwood_model_runner.runners.model_calls import setting
from draftwood_model_runner.runners.page_states import LiveState, StatesByPage, StepRow, rows_of
from draftwood_model_runner.runners.recurrent_layers import STEP, LayerCall, RecurrentLayer, State
from draftwood_model_runner.runners.torch.scan import HostScan, StepShape
from draftwood_model_runner.sequence import StateUse
from draftwood_strategies.arrays import Int32Array


@dataclass(eq=False, slots=True, kw_only=True)
class RowStates(LiveState):
    """A sequence after a step.

    Attributes:
        nodes: the tokens that were drafted behind its position, in the order of their entries in the KV cache.
        states: of each recurrent layer; its tensors [1, ...] are never changed.
        slots: of each node, where its keys and values were written.
        inputs: of each recurrent layer what it was called with, each [nodes, ...].
    """

    states: list[State]
    slots: list[int] = field(default_factory=list)
    inputs: list[list[torch.Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return bytes_of(self.states) + sum(tensor.nbytes for of_layer in self.inputs for tensor in of_layer)


class StateMemory(StatesByPage[RowStates, list[State]]):
    """Implements `runners.base.PageStates`.

    Args:
        page_size, sequences, bytes_per_sequence: as for `StatesByPage`.
        most_bytes: of states that no live sequence needs.
    """

    def __init__(
        self, page_size: int, most_bytes: int, sequences: int = sys.maxsize, bytes_per_sequence: int = 0
    ) -> None:
        super().__init__(page_size, sequences, bytes_per_sequence)
        self._most_bytes = most_bytes
        self._by_slot: dict[int, tuple[RowStates, int]] = {}

    def store(self, row: StepRow, before: RowStates | None, state: RowStates) -> None:
        super().store(row, before, state)
        self._by_slot |= {slot: (state, node) for node, slot in enumerate(state.slots)}

    def keep_end(self, page: int, states: list[State]) -> None:
        """Keeps the states after the last token of a page; gives up the least recently used if they are too many."""
        self._ends[page] = states
        self._ends.move_to_end(page)
        while len(self._ends) > max(1, self._most_bytes // max(1, bytes_of(states))):
            self._ends.popitem(last=False)

    @property
    def use(self) -> StateUse:
        """A state that a sequence began with and that is kept counts in both parts."""
        held = sum(state.nbytes for state in self._live.values())
        return StateUse(held, sum(map(bytes_of, self._ends.values())))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence after a token; 0 where none lives."""
        return max((bytes_of(state.states) for state in self._live.values()), default=0)

    def move(self, moves: KVCompaction) -> None:
        """Accepted nodes moved behind the committed tokens."""
        known = self._by_slot
        read = [
            (known.get(target), known.get(source))
            for source, target in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True)
        ]
        changes = [(to[0], to[1], came[0].nodes[came[1]]) for to, came in read if to is not None and came is not None]
        for state, place, node in changes:
            state.nodes[place] = node

    def _begun(self, end: list[State], first: int, position: int) -> RowStates:
        return RowStates(position=position, page=first, states=end)

    def _drop(self, page: int) -> RowStates | None:
        if (state := super()._drop(page)) is not None:
            for slot in state.slots:
                self._by_slot.pop(slot, None)
        return state


def bytes_of(states: list[State]) -> int:
    """Bytes of the states of a sequence after a token."""
    return sum(tensor.nbytes for state in states for tensor in state.values())


def ways_to_call(recurrent_layers: tuple[RecurrentLayer, ...]) -> Iterator[None]:
    """Sets how recurrent layers take several tokens, one way after the other: the fastest first."""
    on_cpu = all(tensor.device.type == "cpu" for layer in recurrent_layers for tensor in layer.part.parameters())
    scanning = on_cpu and any(layer.can_scan for layer in recurrent_layers)
    limited = least_time_step(recurrent_layers) is not None
    for scans in (True, False) if scanning and not limited else (scanning,):
        for one_by_one in (False, True):
            for layer in recurrent_layers:
                layer.scans, layer.one_by_one = scans and layer.can_scan, one_by_one
            if scans or not limited:
                yield


def least_time_step(recurrent_layers: tuple[RecurrentLayer, ...]) -> str | None:
    """Why what transformers computes depends on how many tokens it is given at once, as in Zamba 2 and Nemotron H."""
    limits = (getattr(layer.part, "time_step_limit", None) for layer in recurrent_layers)
    highest = max((float(limit[0]) for limit in limits if limit), default=0.0)
    if highest == 0.0:
        return None
    return (
        f"transformers raises time steps of its state-space layers to {highest:g} where it is given several tokens, and"
        " does not for one token, which is computed alike on CPUs only"
    )


class _Run(NamedTuple):
    """Tokens that a recurrent layer is called with at once, equally many of some batch rows.

    Attributes:
        rows: of each sequence in the call, its batch row.
        places: int64[n, L], their tokens among those of the step and, behind these, the accepted nodes of earlier ones.
        taken: int64[t], places among the n * L outputs that are outputs of the step; of paths, of each node one.
        tokens: int64[t], which tokens of the step these are.
        keeps: the state after them is the sequence's.
        pages: of each row, the page that ends after these tokens, where its state is kept; None for none.
    """

    rows: list[int]
    places: torch.Tensor
    taken: torch.Tensor
    tokens: torch.Tensor
    keeps: bool
    pages: list[int | None]


@dataclass(frozen=True, eq=False, slots=True)
class _Row(StepRow):
    """A batch row with its states.

    Attributes:
        before: its states; None at the beginning of a sequence.
        accepted: nodes of the step before that its state does not cover.
    """

    before: RowStates | None
    accepted: list[int]


class StepStates:
    """Implements `recurrent_layers.RecurrentStep` for one step.

    Args:
        batch: the step; dummy contexts begin without a state.
        memory: the states.
        width: tokens of the step with those that fill it up.

    Raises:
        RuntimeError: the state of a sequence is not known.
    """

    def __init__(self, batch: StepBatch, memory: StateMemory, width: int, device: torch.device) -> None:
        self.width = width
        self._size = batch.size
        self._parents = batch.parents
        self._device = device
        self._page_size = memory.page_size
        self._rows = [*_rows(batch, None if batch.is_dummy else memory)]
        self._page_ends = [row.page_end(memory.page_size) for row in self._rows]
        self._states: dict[int, list[State]] = {}
        self._ends: dict[int, list[State]] = {}
        self._inputs: dict[int, list[torch.Tensor]] = {}

    def run(self, layer: RecurrentLayer, call: LayerCall) -> Any:
        """A recurrent layer's outputs for all tokens of the step."""
        states: list[State] = [{} if row.before is None else row.before.states[layer.index] for row in self._rows]
        if layer.scans:
            return self._scan(layer, call, states)
        inputs = [call.values[at][0, : self._size] for at in call.by_token]
        self._inputs[layer.index] = inputs
        earlier = self._earlier(layer)
        sources = [torch.cat(both) for both in zip(inputs, earlier, strict=True)] if earlier else inputs
        outputs, per_token = list[Any](), set[int]()
        for run in self._runs:
            taken, after = layer.compute(call, [source[run.places] for source in sources], _stacked(states, run.rows))
            values, spec = tree_flatten(taken)
            outputs = outputs or [*values]
            self._place(outputs, per_token, values, run)
            if run.keeps:
                for at, row in enumerate(run.rows):
                    states[row] = {key: tensor[at : at + 1] for key, tensor in after.items()}
                    if (page := run.pages[at]) is not None:
                        self._ends.setdefault(page, []).append(states[row])
        self._states[layer.index] = states
        return tree_unflatten(outputs, spec)

    def _scan(self, layer: RecurrentLayer, call: LayerCall, states: list[State]) -> Any:
        scan = HostScan(self._shape, states, self._earlier(layer))
        outputs = layer.scan(call, scan)
        self._inputs[layer.index] = scan.inputs
        self._states[layer.index] = _by_row(scan.states, len(self._rows))
        for page, ends in zip(self._pages, _by_row(scan.ends, len(self._pages)), strict=True):
            self._ends.setdefault(page, []).append(ends)
        return outputs

    def _earlier(self, layer: RecurrentLayer) -> list[torch.Tensor]:
        """What a recurrent layer was called with for the accepted nodes of earlier steps, those of all rows; [] for
        none."""
        of_rows = [
            [each[_run_or_list(row.accepted)] for each in row.before.inputs[layer.index]]
            for row in self._rows
            if row.before is not None and row.accepted
        ]
        return of_rows[0] if len(of_rows) == 1 else [torch.cat(parts) for parts in zip(*of_rows, strict=True)]

    @property
    def _pages(self) -> list[int]:
        """The pages that end in this step."""
        pairs = zip(self._rows, self._page_ends, strict=True)
        return [row.page_ending_at(page_end, self._page_size) for row, page_end in pairs if page_end >= 0]

    @cached_property
    def _shape(self) -> StepShape:
        rows, is_prompt = self._rows, torch.zeros(self._size, dtype=torch.bool)
        for row in rows:
            is_prompt[row.prompt.start : row.prompt.stop] = True
        return StepShape(
            parents=self._parents,
            cu_seqlens=np.array([*(row.chain.start for row in rows), self._size], np.int32),
            roots=np.array([row.chain.stop - 1 for row in rows], np.int32),
            page_ends=np.array(self._page_ends, np.int32),
            is_prompt=is_prompt,
            replayed_offsets=np.cumsum([0, *(len(row.accepted) for row in rows)], dtype=np.int32),
        )

    @cached_property
    def _runs(self) -> list[_Run]:
        """The calls of recurrent layers that do not scan."""
        runs = self._chain_runs()
        return [*runs, self._paths(self._parents)] if any(row.nodes for row in self._rows) else runs

    def _place(self, outputs: list[Any], per_token: set[int], values: list[Any], run: _Run) -> None:
        """Puts what a run computed for each token where it belongs, [1, width, ...]."""
        for at, value in enumerate(values):
            by_token = isinstance(value, torch.Tensor) and value.shape[:2] == run.places.shape
            if by_token and run is self._runs[0]:
                outputs[at] = value.new_zeros(1, self.width, *value.shape[2:])
                per_token.add(at)
            if by_token and at in per_token:  # others, such as MiniMax's states, may have that shape by chance
                outputs[at][0, run.tokens] = value.flatten(0, 1)[run.taken]

    def commit(self, memory: StateMemory, batch: StepBatch) -> None:
        """Keeps the states after the chains, and what recurrent layers were called with for the nodes."""
        recurrent_layers = range(len(self._states))
        slots = batch.slot_mapping(self._page_size)
        for number, row in enumerate(self._rows):
            nodes = slice(row.nodes.start, row.nodes.stop)
            after = RowStates(
                position=row.context + len(row.chain),
                states=[self._states[layer][number] for layer in recurrent_layers],
                nodes=[*range(len(row.nodes))],
                slots=slots[nodes].tolist(),
                inputs=[[each[nodes].clone() for each in self._inputs[layer]] for layer in recurrent_layers]
                if row.nodes
                else [],
            )
            memory.store(row, row.before, after)
        for page, states in self._ends.items():
            memory.keep_end(page, states)

    def _chain_runs(self) -> list[_Run]:
        """Calls on the chains, rows with equally many at once; of a prompt first up to its last full page,
        after which others may begin."""
        pieces: list[dict[tuple[int, bool], list[tuple[int, list[int], int, int | None]]]] = [{}, {}]
        behind, pages = self._size, iter(self._pages)
        for number, row in enumerate(self._rows):
            earlier = [*range(behind, behind + len(row.accepted))]
            behind += len(earlier)
            page_end = self._page_ends[number]
            page = next(pages) if page_end >= 0 else None
            cut = page_end - row.chain.start if page_end >= 0 else len(row.chain)
            first = [*earlier, *row.chain[:cut]]
            pieces[0].setdefault((len(first), row.before is not None), []).append((number, first, len(earlier), page))
            if rest := [*row.chain[cut:]]:
                pieces[1].setdefault((len(rest), True), []).append((number, rest, 0, None))
        return [self._run(group) for of_turn in pieces for group in of_turn.values()]

    def _run(self, group: list[tuple[int, list[int], int, int | None]]) -> _Run:
        index = np.array([tokens for _, tokens, _, _ in group], np.int64)
        taken = np.flatnonzero(index.reshape(-1) < self._size)
        return _Run(
            [number for number, *_ in group],
            self._tensor(index),
            self._tensor(taken),
            self._tensor(index.reshape(-1)[taken]),
            True,
            [page for *_, page in group],
        )

    def _paths(self, parents: Int32Array) -> _Run:
        """The call on all paths from a root to a leaf; shorter ones are filled up with their last node."""
        paths: list[list[int]] = []
        rows: list[int] = []
        for number, row in enumerate(self._rows):
            begin = row.chain.start
            inner = {begin + int(parents[node]) for node in row.nodes}
            for leaf in row.nodes:
                if leaf in inner:
                    continue
                path, node = [], leaf
                while node in row.nodes:
                    path.append(node)
                    node = begin + int(parents[node])
                paths.append(path[::-1])
                rows.append(number)
        longest = max(map(len, paths))
        index = np.array([path + path[-1:] * (longest - len(path)) for path in paths], np.int64)
        taken = np.unique(index, return_index=True)[1]  # the first place of a node is on a path
        tokens = index.reshape(-1)[taken]
        return _Run(rows, self._tensor(index), self._tensor(taken), self._tensor(tokens), False, [])

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


@contextmanager
def states_of_step(batch: StepBatch, memory: StateMemory | None, width: int, device: torch.device) -> Iterator[None]:
    """While it lasts, recurrent layers compute this step; afterwards its states are kept. Nothing for a model without
    recurrent layers.

    Args:
        width: tokens of the step with those that fill it up.
    """
    if memory is None:
        yield
        return
    step = StepStates(batch, memory, width, device)
    with setting(STEP, step):
        yield
    if not batch.is_dummy:
        step.commit(memory, batch)


def _rows(batch: StepBatch, memory: StateMemory | None) -> Iterator[_Row]:
    for row in rows_of(batch):
        before = memory.find(row.table, row.context) if memory is not None and row.context else None
        accepted = before.nodes[: row.context - before.position] if before is not None else []
        yield _Row(row.context, row.chain, row.prompt, row.nodes, row.table, before, accepted)


def _stacked(states: list[State], rows: list[int]) -> State:
    """The states of some sequences together, in tensors of their own."""
    first = states[rows[0]]
    return {key: torch.cat([states[row][key] for row in rows]) for key in first}


def _by_row(states: State, rows: int) -> list[State]:
    """The state of each row of states [rows, ...]."""
    return [{kind: tensor[row : row + 1] for kind, tensor in states.items()} for row in range(rows)]


def _run_or_list(places: list[int]) -> slice | list[int]:
    """Places as a slice if they are 0, 1, 2 and so on, which costs no copy."""
    return slice(len(places)) if places == [*range(len(places))] else places
