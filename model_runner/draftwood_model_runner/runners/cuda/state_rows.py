"""Recurrent layers on the host: which rows of the state memory a step uses, and its tokens as the kernels take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from draftwood_model_runner.errors import DeviceMemoryError
from draftwood_model_runner.runners.base import StepBatch
from draftwood_model_runner.runners.cuda.device import DeviceBuffer
from draftwood_model_runner.runners.page_states import LiveState, StatesByPage, StepRow, rows_of
from draftwood_model_runner.sequence import StateUse
from draftwood_strategies.arrays import Int32Array

NO_ROW = -1
SPARE_SEQUENCES = 1
"""Beyond those that run: one that is read without drafts while the others wait."""

_ROW = 9
"""Numbers of a batch row, see `kernels.states`."""
WALK = 4
"""Entries of `walk` for each token that steps at fixed addresses have room for: a token is on several paths of a tree,
and accepted nodes are replayed."""


@dataclass(eq=False, slots=True, kw_only=True)
class RowState(LiveState):
    """A sequence whose state, and whose inputs of nodes, are in a row of the memory."""

    row: int


@dataclass(frozen=True, eq=False, slots=True)
class PlannedRow:
    """Where a batch row reads and writes states.

    Attributes:
        tokens: its own.
        before: what it begins from; None for nothing.
        accepted: nodes that it replays.
        target: the row that it writes its state to.
        page_end: tokens of its chain after which the state goes to `end` as well.
        end: a row, or `NO_ROW`; page: the one that ends there.
    """

    tokens: StepRow
    before: RowState | None
    accepted: list[int]
    target: int
    page_end: int = 0
    end: int = NO_ROW
    page: int = -1

    @property
    def source(self) -> int:
        return NO_ROW if self.before is None else self.before.row


class _Pool:
    """Rows, each of which is free again when nobody holds it any more."""

    def __init__(self, rows: range) -> None:
        self._free = [*reversed(rows)]
        self._holders = Counter[int]()

    def take(self) -> int:
        """A free row, or `NO_ROW`."""
        if not self._free:
            return NO_ROW
        self.hold(row := self._free.pop())
        return row

    def hold(self, row: int) -> None:
        self._holders[row] += 1

    def drop(self, row: int) -> None:
        self._holders[row] -= 1
        if not self._holders[row]:
            del self._holders[row]
            self._free.append(row)


class StateRows(StatesByPage[RowState, int]):
    """Implements `runners.base.PageStates`: which rows of the memory belong to which sequence, and to which end of a
    page.

    All of this is on the host: rows are reused in the order of the steps, which is that of the device.

    Args:
        page_size, sequences, bytes_per_sequence: as for `StatesByPage`.
        kept: states of no live sequence at most.
        state_bytes: of a sequence after a token.
    """

    def __init__(
        self, page_size: int, sequences: int, kept: int, state_bytes: int = 0, bytes_per_sequence: int = 0
    ) -> None:
        super().__init__(page_size, sequences, bytes_per_sequence)
        self._state_bytes = state_bytes
        self.scratch = 2 * (sequences + SPARE_SEQUENCES)  # written to by steps of which nothing is kept
        self.live_rows, self.rows = self.scratch + 1, self.scratch + 1 + kept
        self._of_live, self._of_ends = _Pool(range(self.scratch)), _Pool(range(self.live_rows, self.rows))

    @property
    def use(self) -> StateUse:
        """A state that a sequence began with and that is kept counts in both parts."""
        return StateUse(len(self._live) * self.bytes_per_sequence // 2, len(self._ends) * self._state_bytes)

    def plan(self, batch: StepBatch) -> list[PlannedRow]:
        """Rows for a step, to be given to `commit` or `discard`.

        Raises:
            RuntimeError: the state of a sequence is not known.
            DeviceMemoryError: more sequences are live than there are rows for.
        """
        if batch.is_dummy:
            return [PlannedRow(row, None, [], self.scratch) for row in rows_of(batch)]
        planned: list[PlannedRow] = []
        try:
            for row in rows_of(batch):
                planned.append(self._planned(row))
        except BaseException:
            self.discard(planned)
            raise
        return planned

    def discard(self, planned: Sequence[PlannedRow]) -> None:
        """The step was not computed."""
        for row in planned:
            if row.target != self.scratch:
                self._of_live.drop(row.target)
            if row.end != NO_ROW:
                self._of_ends.drop(row.end)

    def commit(self, planned: Sequence[PlannedRow]) -> list[RowState | None]:
        """Replaces what is known of the sequences of a step that was launched; returns it; None where nothing is."""
        states = [self._committed(row) for row in planned]
        for row in planned:
            if row.end != NO_ROW:
                self._drop_end(row.page)
                self._ends[row.page] = row.end
        return states

    def _committed(self, row: PlannedRow) -> RowState | None:
        if row.target == self.scratch:
            return None
        state = RowState(row=row.target, position=row.tokens.context + len(row.tokens.chain))
        self.store(row.tokens, row.before, state)
        return state

    def _planned(self, tokens: StepRow) -> PlannedRow:
        before = self.find(tokens.table, tokens.context) if tokens.context else None
        accepted = [] if before is None else before.nodes[: tokens.context - before.position]
        target = self._of_live.take()
        if target == NO_ROW:
            raise DeviceMemoryError(f"the device has no memory for the states of {self.sequences + 1} sequences")
        page_end = tokens.page_end(self.page_size)
        if page_end < 0:
            return PlannedRow(tokens, before, accepted, target)
        page, end = tokens.page_ending_at(page_end, self.page_size), self._taken_end()
        return PlannedRow(tokens, before, accepted, target, page_end - tokens.chain.start, end, page)

    def _taken_end(self) -> int:
        """A row for the end of a page, if need be that of the least recently used one."""
        row = self._of_ends.take()
        while row == NO_ROW and self._ends:
            self._drop_end(next(iter(self._ends)))
            row = self._of_ends.take()
        return row

    def _begun(self, end: int, first: int, position: int) -> RowState:
        self._pool(end).hold(end)
        return RowState(row=end, position=position, page=first)

    def _drop(self, page: int) -> RowState | None:
        if (state := super()._drop(page)) is not None:
            self._pool(state.row).drop(state.row)
        return state

    def _drop_end(self, page: int) -> int | None:
        if (row := super()._drop_end(page)) is not None:
            self._of_ends.drop(row)
        return row

    def _pool(self, row: int) -> _Pool:
        return self._of_live if row < self.live_rows else self._of_ends


class StateArrays:
    """The inputs of a step, for at most `tokens` tokens. See `kernels.states`.

    Attributes:
        buffer: all of them, on the device.
        row_count: int32[1].
        rows: int32[tokens, 9].
        token_rows, parents: int32[tokens]; -1 for padding.
        is_prompt: int32[tokens], 1 for tokens of a prompt.
        walk: int32[entries].
    """

    def __init__(self, tokens: int, entries: int, device: torch.device) -> None:
        self.capacity, self.entries = tokens, entries
        self.buffer = DeviceBuffer(
            {
                "row_count": (np.int32, (1,)),
                "rows": (np.int32, (tokens, _ROW)),
                "token_rows": (np.int32, (tokens,)),
                "parents": (np.int32, (tokens,)),
                "is_prompt": (np.int32, (tokens,)),
                "walk": (np.int32, (entries,)),
            },
            device,
            pieces=2,  # a step is filled in while the one before is in flight
        )

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.buffer[name]

    def fill(self, layout: StateLayout, padded: int) -> None:
        """Copies a step to the device, where it is in place for what is launched afterwards on the current stream.

        Args:
            padded: tokens that the kernels will compute.
        """
        self.buffer.swap()
        host, n = self.buffer.host, layout.parents.size
        host["row_count"][0] = layout.rows.shape[0]
        host["rows"][: layout.rows.shape[0]] = layout.rows
        for name, values in (("token_rows", layout.token_rows), ("parents", layout.parents)):
            host[name][:n], host[name][n:padded] = values, -1
        host["is_prompt"][:n] = layout.is_prompt
        host["walk"][: layout.walk.size] = layout.walk
        self.buffer.send(until="walk", size=layout.walk.size)


class StateLayout:
    """The arrays of a step on the host, before it is known where they go.

    Attributes:
        rows: int32[S, 9].
        token_rows, parents, is_prompt: int32[T].
        walk: int32[entries].
    """

    def __init__(self, batch: StepBatch, planned: Sequence[PlannedRow]) -> None:
        sizes = np.diff(batch.cu_seqlens)
        offsets = np.repeat(batch.cu_seqlens[:-1], sizes)
        self.parents: Int32Array = np.where(batch.parents < 0, -1, batch.parents + offsets).astype(np.int32)
        self.token_rows: Int32Array = np.repeat(np.arange(len(planned), dtype=np.int32), sizes)
        self.is_prompt: Int32Array = np.zeros(batch.size, np.int32)
        self.rows: npt.NDArray[Any] = np.zeros((len(planned), _ROW), np.int32)
        parts: list[Int32Array] = []
        entries = 0
        for number, row in enumerate(planned):
            tokens = row.tokens
            self.is_prompt[tokens.prompt.start : tokens.prompt.stop] = 1
            walk = [np.array(row.accepted, np.int32)] if row.accepted else []
            if tokens.nodes:
                walk.append(paths(self.parents, tokens.nodes.start, tokens.nodes.stop))
            parts += walk
            end = entries + sum(part.size for part in walk)
            self.rows[number] = (
                *(row.source, row.target, row.end, row.page_end, tokens.chain.start, len(tokens.chain)),
                *(entries, len(row.accepted), end),
            )
            entries = end
        self.walk: Int32Array = np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def fits(self, arrays: StateArrays) -> bool:
        """Whether it can be filled in."""
        return self.parents.size <= arrays.capacity and self.walk.size <= arrays.entries


def paths(parents: Int32Array, begin: int, end: int) -> Int32Array:
    """The paths of a tree, from below its root to each leaf, one after the other: int32[...], each token times 2, plus
    1 for the first of a further path.

    Args:
        parents: int32[T], tokens of the step.
        begin, end: the nodes of the tree.
    """
    walk: Int32Array = _paths(parents, begin, end)
    return walk


@numba.njit(cache=True, nogil=True)
def _paths(parents: Int32Array, begin: int, end: int) -> Int32Array:
    inner = np.zeros(end - begin, np.bool_)
    depths = np.ones(end - begin, np.int32)
    for node in range(begin, end):
        above = parents[node]
        if above >= begin:
            inner[above - begin] = True
            depths[node - begin] = depths[above - begin] + 1
    walk = np.empty(np.sum(depths[~inner]), np.int32)
    at = 0
    for leaf in range(begin, end):
        if inner[leaf - begin]:
            continue
        node, depth = leaf, depths[leaf - begin]
        for i in range(depth - 1, -1, -1):
            walk[at + i] = 2 * node
            node = parents[node]
        if at > 0:
            walk[at] += 1
        at += depth
    return walk
