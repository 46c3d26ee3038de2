"""Chains of draft tokens, within the budget of the batch, for engines that verify one continuation of a request."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import partial

import numpy as np

from draftwood_memory.engines.forms.base import ChargedDraft, DecodeRow
from draftwood_memory.engines.session import Session, Step
from draftwood_strategies.budgeting.chains import worthwhile_chains
from draftwood_strategies.budgeting.draft_account import step_all
from draftwood_strategies.budgeting.guarded_batches import propose_all
from draftwood_strategies.budgeting.guarded_drafter import IndexingBudget
from draftwood_strategies.budgeting.online_step_times import OnlineStepTimes


class ChainForm:
    """A `DraftForm`: a chain for each row, empty where nothing is drafted.

    Args:
        longest: tokens of a chain, at most.
        times: cost model of steps; None for one that is fitted to measured steps.
    """

    session_class = Session

    def __init__(self, longest: int, times: OnlineStepTimes | None = None) -> None:
        self._longest = longest
        self._given = times
        self._times = times or OnlineStepTimes()

    def reset(self) -> None:
        self._times = self._given or OnlineStepTimes()

    def record_step_time(self, step: Step, seconds: float) -> None:
        self._times.observe(step.tokens, step.rows, seconds)

    def charge(self, step: Step, seconds: float | None, drafts: SequenceOf[ChargedDraft]) -> None:
        if not self._times.known(step.rows):
            return
        accounts, accepted, drafted = zip(*drafts, strict=True)
        longest = max(drafted)
        without = self._times.between(step.tokens - longest, step.tokens, step.rows)
        verifying = without[-1] - without[longest - np.array(drafted)]
        taken = float(without[-1]) if seconds is None else seconds
        step_all(accounts, taken, np.array(accepted, np.int32), verifying, step.rows)

    def propose(self, rows: int, decoding: SequenceOf[DecodeRow], indexing: IndexingBudget) -> list[list[int]]:
        chains: list[list[int]] = [[] for _ in range(rows)]
        if self._times.probes(rows):
            return chains
        asked = [
            (one, one.session.drafter)
            for one in decoding
            if one.row.max_draft_tokens > 0 and one.session.drafter is not None and one.session.drafter.ready(indexing)
        ]
        if not asked:
            return chains
        longest = np.minimum([one.row.max_draft_tokens for one, _ in asked], self._longest).astype(np.int32)
        # The nodes that the best chain is taken from: with more of them it is hardly ever another one.
        budgets = np.minimum([one.session.request.max_draft_nodes for one, _ in asked], self._longest)
        trees = propose_all([drafter for _, drafter in asked], budgets.astype(np.int32))
        found = worthwhile_chains(trees, longest, rows, partial(self._times.between, sequences=rows))
        for (one, _), chain in zip(asked, found.lists(), strict=True):
            chains[one.row_index], one.session.chain = chain, [*chain]  # the engine may shorten its own
        return chains

    def before_end(self, session: Session) -> None:
        """Nothing is left to do: every step has reported the tokens it wrote."""
