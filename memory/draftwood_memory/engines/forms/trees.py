"""Draft trees, for engines that verify trees of one fixed size.

Such an engine verifies as many nodes for a row without a draft as for one with, so a draft costs its time on the host
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from draftwood_memory.engines.forms.base import ChargedDraft, DecodeRow
from draftwood_memory.engines.session import Session, Step
from draftwood_memory.records import Int32Array
from draftwood_strategies.budgeting.draft_account import step_all
from draftwood_strategies.budgeting.guarded_batches import propose_all
from draftwood_strategies.budgeting.guarded_drafter import IndexingBudget
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import segment_sizes


@dataclass(eq=False, slots=True)
class TreeSession(Session):
    """A request that trees are drafted for.

    Attributes:
        nodes: of the draft that the latest step verified.
    """

    nodes: int = 0

    def advance(self, written: Int32Array, now: float) -> int:
        """As `Session.advance`: an engine writes what it accepts of a tree and one token more."""
        Session.advance(self, written, now)
        self.stats.drafts += self.nodes > 0
        accepted, self.nodes = min(written.shape[0] - 1, self.nodes), 0
        self.stats.accepted += accepted
        return accepted

    def finish(self, output: Int32Array) -> None:
        """It ended, having written `output`: less than what was taken, if it was cut, or more."""
        taken = self.seen - self.request.prompt.shape[0]
        rest = output[taken:]
        if taken > output.shape[0]:
            self.output = [output]
        elif rest.shape[0]:
            self.output.append(rest)
            if self.drafter is not None:
                self.drafter.defer(rest.tolist())
        self.seen = self.request.prompt.shape[0] + output.shape[0]


class RowTrees(NamedTuple):
    """The trees of some rows, by the numbers of these; None for no tree at all."""

    rows: list[int]
    trees: DraftTrees | None


NO_TREES = RowTrees([], None)


class TreeForm:
    """A `DraftForm`: a tree for each row that has a draft.

    Args:
        nodes: of each tree at most.
        output_of: int32[n], what a request wrote, once it has ended; None before, or if that is not known.
    """

    session_class = TreeSession

    def __init__(self, nodes: int, output_of: Callable[[str], Int32Array | None]) -> None:
        self._nodes = nodes
        self._output_of = output_of
        self._step_seconds = 0.0

    def reset(self) -> None:
        self._step_seconds = 0.0

    def record_step_time(self, step: Step, seconds: float) -> None:
        """Steps take as long with drafts as without."""
        self._step_seconds = seconds

    def charge(self, step: Step, seconds: float | None, drafts: SequenceOf[ChargedDraft]) -> None:
        if self._step_seconds:
            accounts, accepted, _ = zip(*drafts, strict=True)
            free = np.zeros(len(accounts))
            step_all(accounts, seconds or self._step_seconds, np.array(accepted, np.int32), free, step.rows)

    def propose(self, rows: int, decoding: SequenceOf[DecodeRow], indexing: IndexingBudget) -> RowTrees:
        asked = [one for one in decoding if one.session.drafter is not None and one.session.drafter.ready(indexing)]
        if not asked:
            return NO_TREES
        budgets = [min(one.session.request.max_draft_nodes, self._nodes) for one in asked]
        drafters = [one.session.drafter for one in asked if one.session.drafter is not None]
        trees = propose_all(drafters, np.array(budgets, np.int32))
        for one, nodes in zip(asked, segment_sizes(trees.offsets).tolist(), strict=True):
            assert isinstance(one.session, TreeSession)
            one.session.nodes = nodes
            one.session.stats.drafted += nodes
        return RowTrees([one.row_index for one in asked], trees)

    def before_end(self, session: Session) -> None:
        output = self._output_of(session.request.request_id)
        if output is not None and isinstance(session, TreeSession):
            session.finish(output)
