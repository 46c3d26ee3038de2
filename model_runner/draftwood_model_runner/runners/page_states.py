"""What runners remember of recurrent layers between steps: a state for each live sequence, and some for later ones.

A runner knows sequences by their pages only. What a sequence writes next lies in pages that no other holds, so its
state is known by the last page that it wrote to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from draftwood_model_runner.runners.base import StepBatch
from draftwood_strategies.arrays import Int32Array

End = TypeVar("End")


@dataclass(frozen=True, eq=False, slots=True)
class StepRow:
    """A batch row as recurrent layers see it.

    Attributes:
        context: committed tokens.
        chain: tokens before its tree, the root included.
        prompt: those of them that are of its prompt.
        nodes: tokens of the step in its tree.
        table: its pages.
    """

    context: int
    chain: range
    prompt: range
    nodes: range
    table: Int32Array

    def page_end(self, page_size: int) -> int:
        """The first token behind the last full page of the prompt, if the step ends that page, after which others may
        begin; -1 if not. Written tokens are computed one by one, and are no prompt of others."""
        ends = (self.context + len(self.prompt)) // page_size * page_size
        return self.chain.start + ends - self.context if ends > self.context else -1

    def page_ending_at(self, page_end: int, page_size: int) -> int:
        """The page that ends before a token of the step, see `page_end`."""
        return int(self.table[(self.context + page_end - self.chain.start) // page_size - 1])


def rows_of(batch: StepBatch) -> list[StepRow]:
    """The batch rows of a step. What needs logits after the first token that does is a draft."""
    first_logits = np.searchsorted(batch.logit_rows, batch.cu_seqlens[:-1])
    rows = []
    for number, (begin, end) in enumerate(
        zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ):
        at, context = int(first_logits[number]), int(batch.context_lens[number])
        root = min(int(batch.logit_rows[at]) if at < batch.logit_rows.size else end - 1, end - 1)
        chain = range(begin, root + 1)
        prompt = len(chain) if batch.prompt_lens is None else max(0, int(batch.prompt_lens[number]) - context)
        table = batch.block_table[batch.cu_blocks[number] : batch.cu_blocks[number + 1]]
        rows.append(StepRow(context, chain, chain[:prompt], range(root + 1, end), table))
    return rows


@dataclass(eq=False, slots=True, kw_only=True)
class LiveState:
    """A sequence after a step.

    Attributes:
        position: tokens that its state covers.
        page: by which it is known.
        nodes: drafted tokens behind them. The next step replays those that were accepted, which come first.
    """

    position: int
    page: int = -1
    nodes: list[int] = field(default_factory=list)


Live = TypeVar("Live", bound=LiveState)


class StatesByPage(ABC, Generic[Live, End]):
    """Implements `runners.base.PageStates`, but for the size of what is kept.

    Args:
        page_size: tokens of a page.
        sequences: live ones at most.
        bytes_per_sequence: that each of them needs in a step.
    """

    def __init__(self, page_size: int, sequences: int, bytes_per_sequence: int) -> None:
        self.page_size, self.sequences, self.bytes_per_sequence = page_size, sequences, bytes_per_sequence
        self._live: dict[int, Live] = {}
        self._ends: OrderedDict[int, End] = OrderedDict()

    def resumes_after(self, page: int) -> bool:
        return page in self._ends

    def resume(self, after: int, first: int, position: int) -> None:
        self._ends.move_to_end(after)
        self._live[first] = self._begun(self._ends[after], first, position)

    def release(self, pages: Iterable[int], *, kept: bool) -> None:
        for page in pages:
            self._drop(page)
            if not kept:
                self._drop_end(page)

    def find(self, table: Int32Array, context: int) -> Live:
        """What a sequence needs to go on after `context` committed tokens.

        Args:
            table: its pages.

        Raises:
            RuntimeError: it is not there.
        """
        for page in range(min(context // self.page_size, table.size - 1), -1, -1):
            state = self._live.get(int(table[page]))
            if state is not None and state.position <= context <= state.position + len(state.nodes):
                return state
        raise RuntimeError(f"no state of the first {context} tokens of a sequence is known")

    def store(self, row: StepRow, before: Live | None, state: Live) -> None:
        """Replaces what is known of a sequence after a step."""
        if before is not None:
            self._drop(before.page)
        written = len(row.chain) + len(row.nodes)
        for page in row.table[
            row.context // self.page_size : (row.context + written - 1) // self.page_size + 1
        ].tolist():
            self._drop(page)
            self._drop_end(page)
        state.page = int(row.table[(state.position - 1) // self.page_size])
        self._live[state.page] = state

    @abstractmethod
    def _begun(self, end: End, first: int, position: int) -> Live:
        """A sequence that begins with the state at the end of a page."""

    def _drop(self, page: int) -> Live | None:
        """Forgets the sequence that is known by a page."""
        return self._live.pop(page, None)

    def _drop_end(self, page: int) -> End | None:
        """Forgets the state at the end of a page."""
        return self._ends.pop(page, None)
