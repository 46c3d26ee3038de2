"""Which rows of the state memory belong to which sequence, and to which end of a page.

The runner knows sequences by their pages only, as `runners.torch.states.memory`: what a sequence writes next lies in
pages that no other holds, so its state is known by the last page that it wrote to. All of this is on the host: rows
are reused in the order of the steps, which is that of the device.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from draftwood_model_runner.errors import DeviceMemoryError
from draftwood_model_runner.runners.base import StateUse, StepBatch
from draftwood_model_runner.runners.states.rows import StepRow, rows_of
from draftwood_strategies.draft import Int32Array

NO_ROW = -1
SPARE_SEQUENCES = 1
"""Beyond those that run: one that is read without drafts while the others wait."""


@dataclass(eq=False, slots=True)
class LiveState:
    """A sequence after a step.

    Attributes:
        row: of its state.
        position: tokens that it covers.
        page: by which it is known.
        accepted: the nodes behind them that were accepted, whose inputs are in that row too.
    """

    row: int
    position: int
    page: int
    accepted: list[int] = field(default_factory=list)


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
    before: LiveState | None
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


class StateRows:
    """Implements `runners.base.PageStates`.

    Args:
        page_size: tokens of a page.
        sequences: live ones at most.
        kept: states of no live sequence at most.
        state_bytes: of a sequence after a token.
        bytes_per_sequence: that each of them needs in a step.
    """

    def __init__(
        self, page_size: int, sequences: int, kept: int, state_bytes: int = 0, bytes_per_sequence: int = 0
    ) -> None:
        self.page_size = page_size
        self.sequences = sequences
        self.bytes_per_sequence = bytes_per_sequence
        self._state_bytes = state_bytes
        self.scratch = 2 * (sequences + SPARE_SEQUENCES)  # written to by steps of which nothing is kept
        self.live_rows, self.rows = self.scratch + 1, self.scratch + 1 + kept
        self._of_live, self._of_ends = _Pool(range(self.scratch)), _Pool(range(self.live_rows, self.rows))
        self._live: dict[int, LiveState] = {}
        self._ends: OrderedDict[int, int] = OrderedDict()

    def resumes_after(self, page: int) -> bool:
        return page in self._ends

    def resume(self, after: int, first: int, position: int) -> None:
        self._ends.move_to_end(after)
        row = self._ends[after]
        self._pool(row).hold(row)
        self._live[first] = LiveState(row, position, first)

    def release(self, pages: Iterable[int], *, kept: bool) -> None:
        for page in pages:
            self._forget(page)
            if not kept:
                self._forget_end(page)

    @property
    def use(self) -> StateUse:
        """A state that a sequence began with and that is kept counts in both parts."""
        return StateUse(
            len(self._live) * self.bytes_per_sequence // 2,
            len(self._ends) * self._state_bytes,
        )

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

    def commit(self, planned: Sequence[PlannedRow]) -> list[LiveState | None]:
        """Replaces what is known of the sequences of a step that was launched; returns it; None where nothing is."""
        states = [self._committed(row) for row in planned]
        for row in planned:
            if row.end != NO_ROW:
                self._forget_end(row.page)
                self._ends[row.page] = row.end
        return states

    def _committed(self, row: PlannedRow) -> LiveState | None:
        if row.target == self.scratch:
            return None
        tokens, size = row.tokens, self.page_size
        if row.before is not None:
            self._forget(row.before.page)
        written = len(tokens.chain) + len(tokens.nodes)
        first, last = tokens.context // size, (tokens.context + written - 1) // size
        for page in tokens.table[first : last + 1].tolist():
            self._forget(page)
            self._forget_end(page)
        position = tokens.context + len(tokens.chain)
        page = int(tokens.table[(position - 1) // size])
        self._live[page] = LiveState(row.target, position, page)
        return self._live[page]

    def _planned(self, tokens: StepRow) -> PlannedRow:
        before = self._find(tokens.table, tokens.context) if tokens.context else None
        accepted = [] if before is None else before.accepted[: tokens.context - before.position]
        target = self._of_live.take()
        if target == NO_ROW:
            raise DeviceMemoryError(f"the device has no memory for the states of {self.sequences + 1} sequences")
        page_end = tokens.page_end(self.page_size)
        if page_end < 0:
            return PlannedRow(tokens, before, accepted, target)
        page, end = tokens.page_ending_at(page_end, self.page_size), self._taken_end()
        return PlannedRow(tokens, before, accepted, target, page_end - tokens.chain.start, end, page)

    def _find(self, pages: Int32Array, context: int) -> LiveState:
        for page in range(min(context // self.page_size, pages.size - 1), -1, -1):
            state = self._live.get(int(pages[page]))
            if state is not None and state.position <= context <= state.position + len(state.accepted):
                return state
        raise RuntimeError(f"no state of the first {context} tokens of a sequence is known")

    def _taken_end(self) -> int:
        """A row for the end of a page, if need be that of the least recently used one."""
        row = self._of_ends.take()
        while row == NO_ROW and self._ends:
            self._forget_end(next(iter(self._ends)))
            row = self._of_ends.take()
        return row

    def _forget(self, page: int) -> None:
        if (state := self._live.pop(page, None)) is not None:
            self._pool(state.row).drop(state.row)

    def _forget_end(self, page: int) -> None:
        if (row := self._ends.pop(page, None)) is not None:
            self._of_ends.drop(row)

    def _pool(self, row: int) -> _Pool:
        return self._of_live if row < self.live_rows else self._of_ends
