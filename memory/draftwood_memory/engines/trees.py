"""Draft trees of one fixed size for the rows of an engine's step, from tenants' memories.

Such an engine verifies as many nodes for a row without a draft as for one with, so a draft costs its time on the host
and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftwood_memory.engines.drafts import ChargedDraft, EngineDrafts, Row
from draftwood_memory.engines.figures import Point
from draftwood_memory.engines.policy import RequestPolicy
from draftwood_memory.engines.session import Session, Step
from draftwood_memory.memory import Memory
from draftwood_memory.records import Int32Array
from draftwood_memory.settings.memory_settings import MemorySettings
from draftwood_strategies.budgeting.draft_account import step_all
from draftwood_strategies.budgeting.fixed_trees import FixedTrees, fixed_trees
from draftwood_strategies.budgeting.guarded_batches import propose_all
from draftwood_strategies.budgeting.prompt_indexing import IndexingBudget
from draftwood_strategies.draft import DraftTrees
from draftwood_strategies.native import sizes_between

_log = logging.getLogger("draftwood")


@dataclass(eq=False, slots=True)
class TreeSession(Session):
    """A request that trees are drafted for.

    Attributes:
        nodes: of the draft that the latest step verified.
    """

    nodes: int = 0

    def take(self, written: Int32Array, now: float) -> int:
        """As `Session.take`: an engine writes what it accepts of a tree and one token more."""
        Session.take(self, written, now)
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
                self.drafter.keep(rest.tolist())
        self.seen = self.request.prompt.shape[0] + output.shape[0]


class TreeDrafts(EngineDrafts):
    """Drafts for all requests of one engine that verifies trees.

    Args:
        memory, settings, policy, vocab_size, is_live, publish: as in `EngineDrafts`.
        nodes: of each tree, the last written token among them; 2 or more.
        output_of: int32[n], what a request wrote, once it has ended; None before, or if that is not known.
    """

    _session_class = TreeSession

    def __init__(
        self,
        memory: Memory,
        settings: MemorySettings,
        policy: RequestPolicy,
        vocab_size: int,
        nodes: int,
        is_live: Callable[[str], bool],
        output_of: Callable[[str], Int32Array | None],
        publish: Callable[[list[Point]], None] | None = None,
    ) -> None:
        super().__init__(memory, settings, policy, vocab_size, nodes - 1, is_live, publish)
        self._nodes = nodes
        self._output_of = output_of
        self._step_seconds = 0.0
        self._proposed: tuple[list[int], DraftTrees | None] = [], None

    def trees(self, rows: SequenceOf[Row], last_tokens: SequenceOf[int]) -> FixedTrees:
        """A tree for each row, after the engine's step.

        Args:
            last_tokens: of the rows; that of a row's text, unless that has ended.
        """
        self._proposed = [], None
        self.step(rows)
        return fixed_trees(np.array(last_tokens, np.int64), self._nodes, *self._proposed)

    def _warm_up(self) -> None:
        super()._warm_up()
        self._step_seconds = 0.0

    def _took(self, step: Step, seconds: float) -> None:
        """Steps take as long with drafts as without."""
        self._step_seconds = seconds

    def _charge(self, step: Step, seconds: float | None, accounts: SequenceOf[ChargedDraft]) -> None:
        if self._step_seconds:
            charged, accepted, _ = zip(*accounts, strict=True)
            free = np.zeros(len(charged))
            step_all(charged, seconds or self._step_seconds, np.array(accepted, np.int32), free, step.rows)

    def _propose(self, rows: int, writing: list[tuple[int, Row, Any]]) -> list[list[int]]:
        """Keeps the trees for `trees`. There are no chains: a step is as wide with drafts as without."""
        indexing = IndexingBudget()
        asked = [
            (i, session) for i, _, session in writing if session.drafter is not None and session.drafter.ready(indexing)
        ]
        if asked:
            budgets = [min(session.request.max_draft_nodes, self._nodes - 1) for _, session in asked]
            trees = propose_all([session.drafter for _, session in asked], np.array(budgets, np.int32))
            for (_, session), nodes in zip(asked, sizes_between(trees.begins).tolist(), strict=True):
                session.nodes = nodes
                session.stats.drafted += nodes
            self._proposed = [i for i, _ in asked], trees
        return [[] for _ in range(rows)]

    def _end(self, request_id: str) -> None:
        session = self.sessions[request_id]
        try:
            output = self._output_of(request_id)
            if output is not None and isinstance(session, TreeSession):
                session.finish(output)
        except Exception:
            _log.exception("the last tokens of request %r are not learned", request_id)
        super()._end(request_id)
