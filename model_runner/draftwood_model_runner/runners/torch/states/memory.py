"""The states of recurrent layers between steps: one for each live sequence, and some at the ends of full pages.

The runner knows sequences by their pages only. What a sequence writes next lies in pages that no other holds, so its
state is known by the last page that it wrote to.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from draftwood_model_runner.runners.base import KVCompaction, StateUse
from draftwood_model_runner.runners.states.mixers import State
from draftwood_strategies.draft import Int32Array


@dataclass(eq=False, slots=True)
class RowStates:
    """A sequence after a step.

    Attributes:
        position: tokens that the states cover.
        states: of each mixer; its tensors [1, ...] are never changed.
        nodes: the tokens that were drafted after them, in the order of their entries in the KV cache: those that were
            accepted come first.
        slots: of each node, where its keys and values were written.
        inputs: of each mixer what it was called with, each [nodes, ...].
        page: by which it is known.
    """

    position: int
    states: list[State]
    nodes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    inputs: list[list[torch.Tensor]] = field(default_factory=list)
    page: int = -1

    @property
    def bytes_of_inputs(self) -> int:
        return sum(tensor.nbytes for of_mixer in self.inputs for tensor in of_mixer)


class StateMemory:
    """Implements `runners.base.PageStates`.

    Args:
        page_size: tokens of a page.
        most_bytes: of states that no live sequence needs.
        sequences: live ones at most.
        bytes_per_sequence: that each of them needs in a step.
    """

    def __init__(
        self, page_size: int, most_bytes: int, sequences: int = sys.maxsize, bytes_per_sequence: int = 0
    ) -> None:
        self.page_size = page_size
        self.sequences = sequences
        self.bytes_per_sequence = bytes_per_sequence
        self._most_bytes = most_bytes
        self._live: dict[int, RowStates] = {}
        self._ends: OrderedDict[int, list[State]] = OrderedDict()
        self._by_slot: dict[int, tuple[RowStates, int]] = {}

    def resumes_after(self, page: int) -> bool:
        return page in self._ends

    def resume(self, after: int, first: int, position: int) -> None:
        self._ends.move_to_end(after)
        self._live[first] = RowStates(position, self._ends[after], page=first)

    def release(self, pages: Iterable[int], *, kept: bool) -> None:
        for page in pages:
            self._drop(page)
            if not kept:
                self._ends.pop(page, None)

    def find(self, pages: Int32Array, context: int) -> RowStates:
        """What a sequence needs to go on after `context` committed tokens.

        Args:
            pages: its page table.

        Raises:
            RuntimeError: it is not there.
        """
        for page in range(min(context // self.page_size, pages.size - 1), -1, -1):
            row = self._live.get(int(pages[page]))
            if row is not None and row.position <= context <= row.position + len(row.nodes):
                return row
        raise RuntimeError(f"no state of the first {context} tokens of a sequence is known")

    def store(self, pages: Int32Array, context: int, before: RowStates | None, row: RowStates, written: int) -> None:
        """Replaces what is known of a sequence after a step that wrote so many tokens behind `context`.

        Args:
            pages: its page table.
        """
        if before is not None:
            self._drop(before.page)
        first, last = context // self.page_size, (context + written - 1) // self.page_size
        for page in pages[first : last + 1].tolist():
            self._drop(page)
            self._ends.pop(page, None)
        row.page = int(pages[(row.position - 1) // self.page_size])
        self._live[row.page] = row
        self._by_slot |= {slot: (row, node) for node, slot in enumerate(row.slots)}

    def keep_end(self, page: int, states: list[State]) -> None:
        """Keeps the states after the last token of a page; gives up the least recently used if they are too many."""
        self._ends[page] = states
        self._ends.move_to_end(page)
        while len(self._ends) > max(1, self._most_bytes // max(1, bytes_of(states))):
            self._ends.popitem(last=False)

    @property
    def use(self) -> StateUse:
        """A state that a sequence began with and that is kept counts in both parts."""
        held = sum(bytes_of(row.states) + row.bytes_of_inputs for row in self._live.values())
        return StateUse(held, sum(map(bytes_of, self._ends.values())))

    @property
    def state_bytes(self) -> int:
        """Of one sequence after a token; 0 where none lives."""
        return max((bytes_of(row.states) for row in self._live.values()), default=0)

    def move(self, moves: KVCompaction) -> None:
        """Accepted nodes moved behind the committed tokens."""
        known = self._by_slot
        read = [
            (known.get(target), known.get(source))
            for source, target in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True)
        ]
        changes = [(to[0], to[1], came[0].nodes[came[1]]) for to, came in read if to is not None and came is not None]
        for row, place, node in changes:
            row.nodes[place] = node

    def _drop(self, page: int) -> None:
        if (row := self._live.pop(page, None)) is not None:
            for slot in row.slots:
                self._by_slot.pop(slot, None)


def bytes_of(states: list[State]) -> int:
    """Of the states of a sequence after a token."""
    return sum(tensor.nbytes for state in states for tensor in state.values())
