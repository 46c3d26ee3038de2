"""Mixers over the tokens of a step: a node of a draft tree takes its state from its parent.

A batch row begins with its chain, the tokens up to the root of its tree; they follow the sequence's state,
behind the accepted nodes of the step before, which its state does not cover yet. A mixer that scans is called once, see
`scan`. Others are called twice: on the chain, after which their state is kept, and on the tree's paths from
the root to its leaves. No state of a node outlives the step, as only the walk tells which nodes are accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from draftwood_model_runner.runners.attention_hook import setting
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.states.mixers import STEP, Mixer, MixerCall, State
from draftwood_model_runner.runners.states.rows import StepRow, rows_of
from draftwood_model_runner.runners.torch.states.memory import RowStates, StateMemory
from draftwood_model_runner.runners.torch.states.scan import HostScan, StepShape
from draftwood_strategies.draft import Int32Array


class _Run(NamedTuple):
    """Tokens that a mixer is called with at once, equally many of some batch rows.

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
    """Implements `mixers.StepOfMixers` for one step.

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

    def run(self, mixer: Mixer, call: MixerCall) -> Any:
        """A mixer's outputs for all tokens of the step."""
        states: list[State] = [{} if row.before is None else row.before.states[mixer.index] for row in self._rows]
        if mixer.scans:
            return self._scan(mixer, call, states)
        inputs = [call.values[at][0, : self._size] for at in call.by_token]
        self._inputs[mixer.index] = inputs
        earlier = self._earlier(mixer)
        sources = [torch.cat(both) for both in zip(inputs, earlier, strict=True)] if earlier else inputs
        outputs, per_token = list[Any](), set[int]()
        for run in self._runs:
            taken, after = mixer.compute(call, [source[run.places] for source in sources], _stacked(states, run.rows))
            values, spec = tree_flatten(taken)
            outputs = outputs or [*values]
            self._place(outputs, per_token, values, run)
            if run.keeps:
                for at, row in enumerate(run.rows):
                    states[row] = {key: tensor[at : at + 1] for key, tensor in after.items()}
                    if (page := run.pages[at]) is not None:
                        self._ends.setdefault(page, []).append(states[row])
        self._states[mixer.index] = states
        return tree_unflatten(outputs, spec)

    def _scan(self, mixer: Mixer, call: MixerCall, states: list[State]) -> Any:
        scan = HostScan(self._shape, states, self._earlier(mixer))
        outputs = mixer.scan(call, scan)
        self._inputs[mixer.index] = scan.inputs
        self._states[mixer.index] = _by_row(scan.states, len(self._rows))
        for page, ends in zip(self._pages, _by_row(scan.ends, len(self._pages)), strict=True):
            self._ends.setdefault(page, []).append(ends)
        return outputs

    def _earlier(self, mixer: Mixer) -> list[torch.Tensor]:
        """What a mixer was called with for the accepted nodes of earlier steps, those of all rows; [] for none."""
        of_rows = [
            [each[_run_or_list(row.accepted)] for each in row.before.inputs[mixer.index]]
            for row in self._rows
            if row.before is not None and row.accepted
        ]
        return of_rows[0] if len(of_rows) == 1 else [torch.cat(parts) for parts in zip(*of_rows, strict=True)]

    @property
    def _pages(self) -> list[int]:
        """Those that end in this step."""
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
        """The calls of mixers that do not scan."""
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
        """Keeps the states after the chains, and what mixers were called with for the nodes."""
        mixers = range(len(self._states))
        slots = batch.slot_mapping(self._page_size)
        for number, row in enumerate(self._rows):
            nodes = slice(row.nodes.start, row.nodes.stop)
            after = RowStates(
                position=row.context + len(row.chain),
                states=[self._states[mixer][number] for mixer in mixers],
                nodes=[*range(len(row.nodes))],
                slots=slots[nodes].tolist(),
                inputs=[[each[nodes].clone() for each in self._inputs[mixer]] for mixer in mixers] if row.nodes else [],
            )
            memory.store(row.table, row.context, row.before, after, len(row.chain) + len(row.nodes))
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
    """While it lasts, mixers compute this step; afterwards its states are kept. Nothing for a model without mixers.

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
    """Those of each row of states [rows, ...]."""
    return [{kind: tensor[row : row + 1] for kind, tensor in states.items()} for row in range(rows)]


def _run_or_list(places: list[int]) -> slice | list[int]:
    """Places as a slice if they are 0, 1, 2 and so on, which costs no copy."""
    return slice(len(places)) if places == [*range(len(places))] else places
